// The binding: converts arguments, releases the GIL around whatever may wait or takes longer than about 5 µs, and raises
// what the error factory makes of an Error. It decides nothing.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <new>
#include <stdexcept>
#include <system_error>

#include "../core/checksum.hpp"
#include "../core/copier.hpp"
#include "../core/host.hpp"
#include "../core/interrupt.hpp"
#include "../core/node.hpp"
#include "../core/room.hpp"
#include "../core/sentence.hpp"
#include "../core/thread.hpp"
#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvferry;

namespace {

// ---- errors

PyObject* error_classes = nullptr;  // kind -> class; never given back: the interpreter may be gone by then

// Text that a peer may have said, who may say anything.
PyObject* text(const std::string& s) { return PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"); }
nb::object text_of(const std::string& s) {
  nb::object made = nb::steal(text(s));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

// Makes the exception without running any Python. Raising happens inside a C++ handler, and a thread that an ending
// interpreter takes away there (gil.hpp) could not be held: Python code would have to give the GIL up and come back for it.
void raise(const Error& error) {
  const auto& outcome = error.outcome();
  const std::string kind(kind_name(outcome.kind));
  PyObject* type = error_classes == nullptr ? nullptr : PyDict_GetItemString(error_classes, kind.c_str());
  PyObject* sentence = PyUnicode_DecodeUTF8(outcome.sentence.data(), static_cast<Py_ssize_t>(outcome.sentence.size()), "replace");
  if (sentence == nullptr) return;
  if (type == nullptr) {
    PyErr_SetObject(PyExc_RuntimeError, sentence);
    Py_DECREF(sentence);
    return;
  }
  PyObject* arguments = PyTuple_Pack(1, sentence);
  Py_DECREF(sentence);
  auto* base = reinterpret_cast<PyTypeObject*>(PyExc_BaseException);
  PyObject* exception = arguments == nullptr ? nullptr : base->tp_new(reinterpret_cast<PyTypeObject*>(type), arguments, nullptr);
  Py_XDECREF(arguments);
  if (exception == nullptr) return;
  const auto set = [exception](const char* name, PyObject* value) {
    if (value != nullptr) PyObject_SetAttrString(exception, name, value);
    Py_XDECREF(value);
  };
  set("peer", text(error.peer));
  set("cache", text(error.cache));
  set("operation", text(error.operation));
  set("bytes_touched", PyBool_FromLong(outcome.touched));
  set("destination_settled", PyBool_FromLong(outcome.settled));
  PyErr_SetObject(type, exception);
  Py_DECREF(exception);
}

// ---- waiting

// Whether a signal handler of Python has raised, as Ctrl-C's does. Handlers run on the main thread alone: for others, no.
bool handler_has_raised() {
  const WithGil held;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

// Does what may wait, without the GIL and so that Ctrl-C ends it: then it has ended as a cancelled call does, and what the
// handler has raised goes on in its place.
template <typename Work>
auto waiting(Work&& work) {
  const auto here = [&work] {
    const WithoutGil released;
    const Interruptible asks(handler_has_raised);
    return work();
  };
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      here();
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
    } else {
      auto made = here();
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return made;
    }
  } catch (const Error&) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    throw;
  }
}

// ---- arguments

std::int64_t checked_timeout(std::int64_t timeout_ms) {
  if (timeout_ms < 0 || timeout_ms > INT32_MAX)
    throw Error(Kind::invalid_argument, "timeout_ms must lie in 0 .. 2147483647, not " + std::to_string(timeout_ms));
  return timeout_ms;
}

Deadline deadline_of(std::int64_t timeout_ms) { return Deadline::after_ms(checked_timeout(timeout_ms)); }

[[noreturn]] void refuse_unit(Py_ssize_t place, const std::string& what) {
  PyErr_Clear();
  throw Error(Kind::invalid_argument, "number " + std::to_string(place) + " of the list is " + what + ": blocks, rows and layers are whole numbers");
}

// Unit numbers from a list, a tuple, or an array of any integer type.
std::vector<std::int64_t> units_of(nb::handle object) {
  std::vector<std::int64_t> units;
  PyObject* sequence = object.ptr();
  if (const bool is_list = PyList_Check(sequence); is_list || PyTuple_Check(sequence)) {
    const auto size = [&] { return is_list ? PyList_GET_SIZE(sequence) : PyTuple_GET_SIZE(sequence); };
    const Py_ssize_t n = size();
    const auto check_size = [&] {
      if (size() != n)
        throw Error(Kind::invalid_argument, sentence("the list of blocks, rows or layers was changed while it was read: it had ", n, " numbers and has ", size()));
    };
    units.reserve(static_cast<std::size_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      // What is no plain int is asked what it is, which may run any code: also such as changes this list, or drops the item.
      check_size();
      const auto item = nb::borrow(is_list ? PyList_GET_ITEM(sequence, i) : PyTuple_GET_ITEM(sequence, i));
      const auto index = nb::steal(PyBool_Check(item.ptr()) ? nullptr : PyNumber_Index(item.ptr()));
      if (!index.is_valid()) refuse_unit(i, std::string("of type ") + Py_TYPE(item.ptr())->tp_name);
      int overflow = 0;
      const auto value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
      if (overflow != 0) refuse_unit(i, "far beyond 2**32 - 1");
      units.push_back(value);
    }
    check_size();
    return units;
  }
  nb::object array = nb::module_::import_("numpy").attr("ascontiguousarray")(object, "dtype"_a = "int64");
  const auto view = nb::cast<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(array);
  units.assign(view.data(), view.data() + view.shape(0));
  return units;
}

// The same, merged; or an array [n, 2] of first units and counts.
std::vector<UnitRun> runs_of(nb::handle object) {
  nb::object shape = nb::getattr(object, "shape", nb::none());
  if (shape.is_none() || nb::len(shape) != 2) {
    const auto units = units_of(object);
    return merge_units(units.data(), units.size());
  }
  nb::object array = nb::module_::import_("numpy").attr("ascontiguousarray")(object, "dtype"_a = "int64");
  const auto view = nb::cast<nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>>(array);
  std::vector<UnitRun> runs;
  runs.reserve(view.shape(0));
  for (std::size_t i = 0; i < view.shape(0); ++i) {
    const auto first = view(i, 0), count = view(i, 1);
    if (first < 0 || count <= 0 || first > UINT32_MAX || count > UINT32_MAX)
      throw Error(Kind::invalid_argument, sentence("run ", i, " is of ", count, " units from ", first, " on, and units are 0 to 2**32 - 1"));
    runs.push_back({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count)});
  }
  return runs;
}

TensorRange range_of(std::pair<std::int64_t, std::int64_t> range) {
  if (range.first < 0 || range.first > UINT32_MAX || range.second < -1 || range.second > UINT32_MAX)
    throw Error(Kind::invalid_argument, "a tensor range (first, count) is out of bounds");
  return {static_cast<std::uint32_t>(range.first), range.second};
}

std::uint32_t small_unsigned(std::int64_t value, const char* what) {
  if (value < 0 || value > UINT32_MAX) throw Error(Kind::invalid_argument, std::string(what) + " must lie in 0 .. 2^32-1, not " + std::to_string(value));
  return static_cast<std::uint32_t>(value);
}

// The bytes of a bytes-like object, held still. Of which thread it is given back: one with the GIL.
class Message {
 public:
  explicit Message(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    PyErr_Clear();
    throw Error(Kind::invalid_argument, std::string("a message of type ") + Py_TYPE(object.ptr())->tp_name + ": bytes are needed, or something contiguous that is like them");
  }
  ~Message() { PyBuffer_Release(&view_); }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  std::span<const std::uint8_t> bytes() const noexcept { return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_{};
};

constexpr std::size_t long_message = 256 << 10;  // copying that takes longer than giving the GIL up and taking it back

nb::bytes bytes_of(std::span<const std::uint8_t> data) {
  nb::object made = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(data.size())));
  if (!made.is_valid()) throw nb::python_error();
  auto* to = PyBytes_AS_STRING(made.ptr());
  if (data.size() < long_message) {
    if (!data.empty()) std::memcpy(to, data.data(), data.size());
  } else {
    const WithoutGil released;
    std::memcpy(to, data.data(), data.size());
  }
  return nb::steal<nb::bytes>(made.release());
}

Payload copy_of(const Message& message) {
  check_message(message.bytes().size());
  if (message.bytes().size() < long_message) return Payload(message.bytes());
  const WithoutGil released;
  return Payload(message.bytes());
}

using KeyTuple = std::tuple<std::string, std::uint64_t, std::uint64_t>;

Key key_of(const KeyTuple& tuple) {
  const auto& space = std::get<0>(tuple);
  Key key{Key::Space::request, std::get<1>(tuple), std::get<2>(tuple)};
  if (space == "prefix")
    key.space = Key::Space::prefix;
  else if (space == "blocks")
    key.space = Key::Space::blocks, key.id = 0;
  else if (space != "request")
    throw Error(Kind::invalid_argument, "a key is a request, prefix or blocks key, not '" + space + "'");
  return key;
}

std::vector<std::optional<Key>> keys_of(const std::vector<std::optional<KeyTuple>>& tuples) {
  std::vector<std::optional<Key>> keys;
  for (const auto& tuple : tuples) keys.push_back(tuple ? std::optional(key_of(*tuple)) : std::nullopt);
  return keys;
}

unsigned transports_of(int transport) { return transport == 0 ? 7u : static_cast<unsigned>(transport); }

Layout layout_of(int layout) {
  if (layout < 0 || layout > 2) throw Error(Kind::invalid_argument, "a layout is ROWS, BLOCKS or MIXED");
  return static_cast<Layout>(layout);
}

// ---- what Python holds

struct PyNode {
  std::shared_ptr<Node> node;
};

struct PyLink {
  std::shared_ptr<Node> node;
  std::shared_ptr<Link> link;
};

struct PyTransfer {
  std::shared_ptr<Node> node;
  std::shared_ptr<Operation> operation;
};

struct PyAnswer {
  std::shared_ptr<Node> node;
  std::shared_ptr<Ask> ask;
};

struct PyCall {
  std::shared_ptr<Node> node;
  std::unique_ptr<Call> call;
  nb::bytes payload;
};

struct PyLayerPush {
  std::shared_ptr<Node> node;
  std::shared_ptr<LayerPush> push;
};

struct PyNotifier {
  std::shared_ptr<Notifier> notifier;
};

// What keeps the segments of an allocated cache mapped while Python still looks at them.
struct PyKeeper {
  std::vector<std::shared_ptr<Segment>> segments;
};

struct PyPrepared {
  std::shared_ptr<Node> node;
  std::shared_ptr<PreparedPull> prepared;
};

struct Done {
  std::uint64_t size_bytes;
  std::int64_t nanoseconds;
  Transport transport;
};

Done done_of(const Operation& operation, const Result& result) {
  checked(operation, result);
  return {result.bytes, result.nanoseconds, result.transport};
}

// Small transfers that need no answer from anybody keep the GIL: giving it up beside a busy Python thread costs up to 5 ms.
constexpr std::uint64_t keep_gil_bytes = 64 << 10;

Done run(Operation& operation, bool keep_gil) {
  if (keep_gil) return done_of(operation, operation.run_here());
  return done_of(operation, waiting([&] { return operation.run_here(); }));
}

Done pull(PyLink& self, const Target& target, std::optional<std::uint64_t> into, std::shared_ptr<const Moves> moves, std::int64_t timeout_ms, int transport,
          nb::bytes resolution) {
  const auto deadline = deadline_of(timeout_ms);
  const auto operation =
      self.node->pull(self.link, target, into, moves, deadline, transports_of(transport), {resolution.c_str(), resolution.size()});
  return run(*operation, operation->will_not_wait(keep_gil_bytes));
}

void wait_for(Operation& operation, std::int64_t timeout_ms) {
  const auto until = deadline_of(timeout_ms);
  if (!waiting([&] { return operation.wait(until); }))
    throw Error({Kind::deadline, "still in flight when the wait was over", false, true}, operation.link()->label(), operation.subject(), operation.verb());
}

bool cancel(Operation& operation) {
  return waiting([&] {
    const bool was_running = !operation.done();
    operation.cancel();
    operation.wait(Deadline::after_ms(60'000));  // the piece in hand
    return was_running;
  });
}

nb::bytes answer_of(const Ask& ask) {
  checked(ask, ask.result());
  return bytes_of(ask.answer());
}

// Nothing when the time is up. A call that is there already is taken without giving the GIL up, which beside busy Python
// threads costs more than everything else.
nb::object next_call(PyNode& self, std::int64_t timeout_ms) {
  const auto until = deadline_of(timeout_ms);
  auto event = self.node->next_call(Deadline{0});
  if (event.index() == 0) event = waiting([&] { return self.node->next_call(until); });
  if (const auto* down = std::get_if<LinkDown>(&event)) return nb::cast(*down);
  auto* call = std::get_if<std::unique_ptr<Call>>(&event);
  if (call == nullptr) return nb::none();
  auto payload = bytes_of((*call)->message.bytes());
  (*call)->message = {};
  return nb::cast(PyCall{self.node, std::move(*call), std::move(payload)});
}

bool answer(PyCall& self, nb::handle payload) {
  const Message message(payload);
  if (message.bytes().size() < long_message) return self.call->answer(message.bytes());
  const WithoutGil released;
  return self.call->answer(message.bytes());
}

PyTransfer started(const std::shared_ptr<Node>& node, std::shared_ptr<Operation> operation) {
  {
    const WithoutGil released;
    operation->start();
  }
  return {node, std::move(operation)};
}

nb::dict statistics_of(PyLink& self) {
  const auto s = self.node->statistics(*self.link);
  nb::dict transports;
  transports["map"] = text_of(s.map);
  transports["cma"] = text_of(s.cma);
  transports["socket"] = s.socket;
  nb::dict d;
  d["peer"] = text_of(s.peer);
  d["peer_id"] = s.peer_id;
  d["address"] = text_of(s.address);
  d["alive"] = s.alive;
  d["outgoing"] = s.outgoing;
  d["same_host"] = s.same_host;
  d["transports"] = transports;
  d["lanes"] = s.lanes;
  d["pulls"] = s.pulls;
  d["pushes"] = s.pushes;
  d["bytes_pulled"] = s.bytes_pulled;
  d["bytes_pushed"] = s.bytes_pushed;
  d["failures"] = s.failures;
  d["resets"] = s.resets;
  return d;
}

template <typename Word>
using Words = nb::ndarray<const Word, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Of memory that `may_shrink` the bytes are asked of the kernel, which says that they are not there; touching them would end
// the process.
void add_by_kernel(Checksum& checksum, std::uint64_t address, std::uint64_t size) {
  thread_local std::vector<std::byte> copy(64 << 10);
  for (std::uint64_t at = 0; at < size;) {
    const auto bytes = std::min<std::uint64_t>(size - at, copy.size());
    if (!copy_bytes_by_kernel(copy.data(), reinterpret_cast<const void*>(address + at), bytes))
      throw Error(Kind::invalid_argument, sentence(size, " bytes at address ", address, " are not there (any more)"));
    checksum.add(copy.data(), bytes);
    at += bytes;
  }
}

nb::bytes checksums(const Words<std::uint64_t>& addresses, const Words<std::uint64_t>& sizes, const Words<std::int64_t>& counts, const Words<std::uint64_t>& seeds,
                    bool may_shrink) {
  const std::size_t segments = addresses.shape(0), values = counts.shape(0);
  std::size_t counted = 0;
  for (std::size_t i = 0; i < values; ++i) {
    if (counts(i) < 0 || static_cast<std::size_t>(counts(i)) > segments - counted) throw Error(Kind::invalid_argument, "the counts are of more segments than there are");
    counted += static_cast<std::size_t>(counts(i));
  }
  if (counted != segments || sizes.shape(0) != segments || seeds.shape(0) != values)
    throw Error(Kind::invalid_argument, sentence(segments, " addresses, ", sizes.shape(0), " sizes, ", seeds.shape(0), " seeds and ", values, " counts of ", counted, " segments do not go together"));
  std::vector<std::uint64_t> found(values);
  // Values [first, last), whose segments begin at `at`.
  const auto take = [&](std::size_t first, std::size_t last, std::size_t at) {
    for (std::size_t i = first; i < last; ++i) {
      Checksum checksum(seeds(i));
      for (const std::size_t end = at + static_cast<std::size_t>(counts(i)); at < end; ++at) {
        if (may_shrink)
          add_by_kernel(checksum, addresses(at), sizes(at));
        else
          checksum.add(reinterpret_cast<const void*>(addresses(at)), sizes(at));
      }
      found[i] = checksum.end();
    }
  };
  {
    const WithoutGil released;
    // Half of many bytes by another thread, if one is to be had: one core does not read as fast as the memory gives.
    constexpr std::uint64_t shared_from = 8 << 20;
    std::uint64_t total = 0, before = 0;
    for (std::size_t i = 0; i < segments; ++i) total += sizes(i);
    std::size_t middle = 0, at = 0;
    for (; middle < values && before < total / 2; ++middle)
      for (const std::size_t end = at + static_cast<std::size_t>(counts(middle)); at < end; ++at) before += sizes(at);
    std::thread other;
    std::exception_ptr failed;
    if (total >= shared_from && middle < values && std::thread::hardware_concurrency() > 1) {
      try {
        other = start_thread("kvferry-sums", [&, at] {
          try {
            take(middle, values, at);
          } catch (...) {
            failed = std::current_exception();
          }
        });
      } catch (const Error&) {  // no thread: all of it here
      }
    }
    try {
      take(0, other.joinable() ? middle : values, 0);
    } catch (...) {
      failed = std::current_exception();
    }
    if (other.joinable()) other.join();
    if (failed) std::rethrow_exception(failed);
  }
  return bytes_of({reinterpret_cast<const std::uint8_t*>(found.data()), found.size() * sizeof(std::uint64_t)});
}

constexpr const char* layout_names[] = {"rows", "blocks", "mixed"};

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a process may exit with nodes alive: the kernel closes what they hold
  m.doc() = "The native core of kvferry; see _core.pyi.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    } catch (const std::bad_alloc&) {
      raise(Error(Kind::out_of_memory, "this process has no memory left for what was asked for"));
    } catch (const std::system_error& error) {  // a lock, or what else the library asks the system for
      raise(Error(Kind::busy, sentence("the system refuses what was asked for: ", error.what())));
    } catch (const std::length_error&) {
      raise(Error(Kind::out_of_memory, "more was asked for than can be addressed"));
    }
  });

  m.attr("MAP") = 1;
  m.attr("CMA") = 2;
  m.attr("SOCKET") = 4;
  m.attr("ROWS") = 0;
  m.attr("BLOCKS") = 1;
  m.attr("MIXED") = 2;
  m.attr("READ") = 1;
  m.attr("WRITE") = 2;
  m.attr("WIRE_VERSION") = static_cast<int>(wire::version);
  m.def("set_error_classes", [](nb::dict by_kind) { error_classes = by_kind.inc_ref().ptr(); });
  m.def("enable_test_kind", &enable_test_kind);
  m.def("test_kind_allocate", &test_kind_allocate);
  m.def("test_kind_read", [](std::uint64_t address, std::size_t bytes) {
    std::string data(bytes, '\0');
    if (!test_kind_read(data.data(), address, bytes)) throw Error(Kind::invalid_argument, "not test:0 memory");
    return nb::bytes(data.data(), data.size());
  });
  m.def("test_kind_write", [](std::uint64_t address, nb::bytes data) {
    if (!test_kind_write(address, data.c_str(), data.size())) throw Error(Kind::invalid_argument, "not test:0 memory");
  });
  m.def("host_report", [] {
    const auto report = host_report();
    nb::dict d;
    d["kernel"] = report.kernel;
    d["boot_id"] = report.boot_id;
    d["yama_scope"] = report.yama_scope < 0 ? nb::object(nb::none()) : nb::object(nb::int_(report.yama_scope));
    d["memfd_seals"] = report.memfd_seals;
    d["map"] = report.map;
    d["cma"] = report.cma;
    d["socket"] = report.socket;
    d["cores"] = report.cores;
    return d;
  });
  m.def("memory_room", [](bool with_swap) {
    const auto room = memory_room("", with_swap);
    return nb::make_tuple(room.bytes, room.of);
  }, "with_swap"_a);

  m.def("checksums", &checksums, "addresses"_a, "sizes"_a, "counts"_a, "seeds"_a, "may_shrink"_a = false);

  nb::class_<Target>(m, "Target")
      .def_static("by_id", [](std::uint64_t id) { return Target{Target::By::id, id, 0, {}, {}}; })
      .def_static("by_name", [](std::string name) { return Target{Target::By::name, 0, 0, std::move(name), {}}; })
      .def_static("by_request", [](std::uint64_t id, std::uint64_t model) { return Target{Target::By::request, id, model, {}, {}}; })
      .def_static("by_prefix", [](std::uint64_t id, std::uint64_t model) { return Target{Target::By::prefix, id, model, {}, {}}; })
      .def_static("by_blocks_key", [](std::uint64_t model) { return Target{Target::By::blocks_key, 0, model, {}, {}}; })
      .def_static("by_window", [](nb::bytes name) { return Target{Target::By::window, 0, 0, std::string(name.c_str(), name.size()), {}}; })
      .def_static("by_addresses", [](std::vector<std::uint64_t> addresses, std::uint64_t unit_bytes) {
        return Target{Target::By::addresses, 0, unit_bytes, {}, std::move(addresses)};
      }, "addresses"_a.noconvert(), "unit_bytes"_a = 0)  // nanobind walks a list in place: its items must not run code
      .def("__repr__", &Target::label);

  nb::class_<ValueSums>(m, "ValueSums")
      .def_static("of", [](const Words<std::uint64_t>& sizes, const Words<std::uint64_t>& seeds) {
        const auto n = sizes.shape(0);
        return std::make_shared<ValueSums>(std::vector(sizes.data(), sizes.data() + n), std::vector(seeds.data(), seeds.data() + seeds.shape(0)));
      }, "sizes"_a, "seeds"_a)
      .def("taken", [](const ValueSums& self) -> std::optional<nb::bytes> {
        const auto sums = self.taken();
        if (sums.empty()) return std::nullopt;
        return bytes_of({reinterpret_cast<const std::uint8_t*>(sums.data()), sums.size() * sizeof(std::uint64_t)});
      });

  nb::class_<Moves>(m, "Moves")
      .def_static("whole", [](std::pair<std::int64_t, std::int64_t> source, std::pair<std::int64_t, std::int64_t> destination) {
        return std::const_pointer_cast<Moves>(Moves::make_whole(range_of(source), range_of(destination)));
      }, nb::kw_only(), "source_tensors"_a = std::pair(0, -1), "destination_tensors"_a = std::pair(0, -1))
      .def_static("row", [](std::int64_t source_row, std::int64_t destination_row, std::int64_t size_bytes,
                            std::pair<std::int64_t, std::int64_t> source, std::pair<std::int64_t, std::int64_t> destination) {
        return std::const_pointer_cast<Moves>(
            Moves::make_row(source_row, small_unsigned(destination_row, "destination_row"), size_bytes, range_of(source), range_of(destination)));
      }, "source_row"_a, "destination_row"_a, "size_bytes"_a = -1, nb::kw_only(), "source_tensors"_a = std::pair(0, -1),
         "destination_tensors"_a = std::pair(0, -1))
      .def_static("blocks", [](nb::handle source, nb::handle destination, std::pair<std::int64_t, std::int64_t> source_tensors,
                               std::pair<std::int64_t, std::int64_t> destination_tensors, bool keep_order) {
        const auto from = units_of(source), to = units_of(destination);
        return std::const_pointer_cast<Moves>(Moves::make_blocks(from.data(), from.size(), to.data(), to.size(), range_of(source_tensors),
                                                                 range_of(destination_tensors), keep_order));
      }, "source"_a, "destination"_a, nb::kw_only(), "source_tensors"_a = std::pair(0, -1), "destination_tensors"_a = std::pair(0, -1),
         "keep_order"_a = false)
      .def_static("in_window_order", [](nb::handle mine, std::pair<std::int64_t, std::int64_t> source_tensors,
                                        std::pair<std::int64_t, std::int64_t> destination_tensors) {
        const auto units = units_of(mine);
        return std::const_pointer_cast<Moves>(
            Moves::make_in_window_order(units.data(), units.size(), range_of(source_tensors), range_of(destination_tensors)));
      }, "mine"_a, nb::kw_only(), "source_tensors"_a = std::pair(0, -1), "destination_tensors"_a = std::pair(0, -1))
      .def_static("row_to_blocks", [](std::int64_t source_row, nb::handle destination, std::pair<std::int64_t, std::int64_t> source_tensors,
                                      std::pair<std::int64_t, std::int64_t> destination_tensors) {
        const auto to = units_of(destination);
        return std::const_pointer_cast<Moves>(
            Moves::make_row_to_blocks(source_row, to.data(), to.size(), range_of(source_tensors), range_of(destination_tensors)));
      }, "source_row"_a, "destination"_a, nb::kw_only(), "source_tensors"_a = std::pair(0, -1), "destination_tensors"_a = std::pair(0, -1))
      .def_static("spans", [](nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu> listed, std::shared_ptr<ValueSums> sums) {
        // Negative numbers are beyond 2^63-1 as unsigned ones: refused as such.
        const auto* numbers = reinterpret_cast<const std::uint64_t*>(listed.data());
        const auto n = listed.shape(0);
        const auto make = [&] {
          auto moves = std::const_pointer_cast<Moves>(Moves::make_spans(numbers, n));
          moves->sums = std::move(sums);
          return moves;
        };
        if (n <= 1024) return make();
        const WithoutGil released;
        return make();
      }, "listed"_a, "sums"_a.none() = nb::none())
      .def_prop_ro("units", [](const Moves& moves) { return moves.units; });

  nb::class_<Done>(m, "Done")
      .def_ro("size_bytes", &Done::size_bytes)
      .def_prop_ro("seconds", [](const Done& d) { return static_cast<double>(d.nanoseconds) * 1e-9; })
      .def_prop_ro("transport", [](const Done& d) { return std::string(transport_name(d.transport)); })
      .def_prop_ro("gb_per_s", [](const Done& d) { return d.nanoseconds > 0 ? static_cast<double>(d.size_bytes) / static_cast<double>(d.nanoseconds) : 0.0; })
      .def("__repr__", [](const Done& d) {
        return "Done(size_bytes=" + std::to_string(d.size_bytes) + ", seconds=" + std::to_string(static_cast<double>(d.nanoseconds) * 1e-9) +
               ", transport='" + std::string(transport_name(d.transport)) + "')";
      });

  nb::class_<PyNotifier>(m, "Notifier")
      .def("__init__", [](PyNotifier* self) { new (self) PyNotifier{std::make_shared<Notifier>()}; })
      .def("fileno", [](PyNotifier& self) { return self.notifier ? self.notifier->descriptor() : -1; })
      .def("take", [](PyNotifier& self) { return self.notifier ? self.notifier->take() : std::vector<std::uint64_t>{}; })
      .def("close", [](PyNotifier& self) { self.notifier.reset(); });

  nb::class_<PyTransfer>(m, "Transfer")
      .def("done", [](PyTransfer& self) { return self.operation->done(); })
      .def("wait", [](PyTransfer& self, std::int64_t timeout_ms) {
        wait_for(*self.operation, timeout_ms);
        return done_of(*self.operation, self.operation->result());
      }, "timeout_ms"_a)
      .def("cancel", [](PyTransfer& self) { return cancel(*self.operation); })
      .def("notify", [](PyTransfer& self, PyNotifier& notifier, std::uint64_t token) { return self.operation->notify(notifier.notifier, token); });

  nb::class_<PyAnswer>(m, "Answer")
      .def("done", [](PyAnswer& self) { return self.ask->done(); })
      .def("wait", [](PyAnswer& self, std::int64_t timeout_ms) {
        wait_for(*self.ask, timeout_ms);
        return answer_of(*self.ask);
      }, "timeout_ms"_a)
      .def("cancel", [](PyAnswer& self) { return cancel(*self.ask); })
      .def("notify", [](PyAnswer& self, PyNotifier& notifier, std::uint64_t token) { return self.ask->notify(notifier.notifier, token); });

  nb::class_<PyCall>(m, "Call")
      .def_ro("payload", &PyCall::payload)
      .def_prop_ro("link_id", [](PyCall& self) { return self.call->link_id; })
      .def_prop_ro("same_host", [](PyCall& self) { return self.call->same_host; })
      .def_prop_ro("one_way", [](PyCall& self) { return self.call->one_way; })
      .def_prop_ro("left_ms", [](PyCall& self) { return self.call->deadline.left_ms(); })
      .def("answer", &answer, "payload"_a.none());

  nb::class_<LinkDown>(m, "LinkDown")
      .def_ro("link_id", &LinkDown::link_id)
      .def_ro("process_ended", &LinkDown::process_ended)
      .def("__repr__", [](const LinkDown& down) {
        return "LinkDown(link_id=" + std::to_string(down.link_id) + ", process_ended=" + (down.process_ended ? "True)" : "False)");
      });

  nb::class_<PyLayerPush>(m, "LayerPush")
      .def("layer_ready", [](PyLayerPush& self, std::int64_t layer) {
        const auto number = small_unsigned(layer, "a layer");
        const WithoutGil released;
        self.push->layer_ready(number);
      })
      .def("cancel", [](PyLayerPush& self) { return cancel(*self.push); })
      .def_prop_ro("transfer", [](PyLayerPush& self) { return PyTransfer{self.node, self.push}; });

  nb::class_<PyPrepared>(m, "Prepared").def("run", [](PyPrepared& self, std::int64_t timeout_ms) {
    self.node->engine();  // open?
    const auto deadline = deadline_of(timeout_ms);
    bool touched = false;
    if (const auto result = self.prepared->run_at_once(deadline, touched)) return Done{result->bytes, result->nanoseconds, result->transport};
    const auto operation = self.prepared->operation(deadline, touched);
    return run(*operation, operation->will_not_wait(keep_gil_bytes));
  }, "timeout_ms"_a);

  nb::class_<PyLink>(m, "Link")
      .def_prop_ro("link_id", [](PyLink& self) { return self.link->id; })
      .def_prop_ro("peer_id", [](PyLink& self) { return self.link->peer.node_id; })
      .def_prop_ro("peer_program", [](PyLink& self) { return text_of(self.link->peer.program); })
      .def_prop_ro("peer", [](PyLink& self) { return text_of(self.link->label()); })
      .def_prop_ro("alive", [](PyLink& self) { return !self.node->closed() && self.link->alive(); })
      .def_prop_ro("outgoing", [](PyLink& self) { return self.link->outgoing; })
      .def("pull", &pull, "target"_a, "into"_a.none(), "moves"_a, "timeout_ms"_a, "transport"_a = 0, "resolution"_a = nb::bytes("", 0))
      .def("pull_async", [](PyLink& self, const Target& target, std::optional<std::uint64_t> into, std::shared_ptr<const Moves> moves, std::int64_t timeout_ms, int transport, nb::bytes resolution) {
        return started(self.node, self.node->pull(self.link, target, into, std::move(moves), deadline_of(timeout_ms), transports_of(transport), {resolution.c_str(), resolution.size()}));
      }, "target"_a, "into"_a.none(), "moves"_a, "timeout_ms"_a, "transport"_a = 0, "resolution"_a = nb::bytes("", 0))
      .def("push", [](PyLink& self, std::optional<std::uint64_t> source, const Target& target, std::shared_ptr<const Moves> moves, std::int64_t timeout_ms, int transport) {
        const auto operation = self.node->push(self.link, source, target, std::move(moves), deadline_of(timeout_ms), transports_of(transport));
        return run(*operation, false);
      }, "source"_a.none(), "target"_a, "moves"_a, "timeout_ms"_a, "transport"_a = 0)
      .def("push_async", [](PyLink& self, std::optional<std::uint64_t> source, const Target& target, std::shared_ptr<const Moves> moves, std::int64_t timeout_ms, int transport) {
        return started(self.node, self.node->push(self.link, source, target, std::move(moves), deadline_of(timeout_ms), transports_of(transport)));
      }, "source"_a.none(), "target"_a, "moves"_a, "timeout_ms"_a, "transport"_a = 0)
      .def("push_layers", [](PyLink& self, std::uint64_t source, const Target& target, std::shared_ptr<const Moves> moves, nb::handle layers,
                             std::int64_t tensors_per_layer, nb::handle destination_layers, std::int64_t timeout_ms, int transport) {
        std::vector<std::uint32_t> from, to;
        for (const auto layer : units_of(layers)) from.push_back(small_unsigned(layer, "a layer"));
        for (const auto layer : units_of(destination_layers)) to.push_back(small_unsigned(layer, "a layer"));
        auto push = self.node->push_layers(self.link, source, target, std::move(moves), std::move(from), std::move(to),
                                           small_unsigned(tensors_per_layer, "tensors_per_layer"), checked_timeout(timeout_ms), transports_of(transport));
        {
          const WithoutGil released;
          push->start();
        }
        return PyLayerPush{self.node, std::move(push)};
      }, "source"_a, "target"_a, "moves"_a, "layers"_a, "tensors_per_layer"_a, "destination_layers"_a, "timeout_ms"_a, "transport"_a = 0)
      .def("call", [](PyLink& self, nb::handle payload, std::int64_t timeout_ms) {
        const auto deadline = deadline_of(timeout_ms);
        const Message message(payload);
        const auto ask = self.node->ask(self.link, message.bytes(), deadline);
        waiting([&] { return ask->run_here(); });
        return answer_of(*ask);
      }, "payload"_a.none(), "timeout_ms"_a)
      .def("call_async", [](PyLink& self, nb::handle payload, std::int64_t timeout_ms) {
        const auto deadline = deadline_of(timeout_ms);
        auto ask = self.node->ask(self.link, copy_of(Message(payload)), deadline, false);
        const WithoutGil released;
        ask->start_here();
        return PyAnswer{self.node, std::move(ask)};
      }, "payload"_a.none(), "timeout_ms"_a)
      .def("send", [](PyLink& self, nb::handle payload, std::int64_t timeout_ms) {
        const auto deadline = deadline_of(timeout_ms);
        const auto ask = self.node->ask(self.link, copy_of(Message(payload)), deadline, true);
        const WithoutGil released;
        ask->start_here();
      }, "payload"_a.none(), "timeout_ms"_a)
      .def("prepare_pull", [](PyLink& self, const Target& target, std::uint64_t into, std::shared_ptr<const Moves> moves, std::int64_t timeout_ms, int transport) {
        const auto deadline = deadline_of(timeout_ms);
        return PyPrepared{self.node, waiting([&] { return self.node->prepare(self.link, target, into, std::move(moves), deadline, transports_of(transport)); })};
      }, "target"_a, "into"_a, "moves"_a, "timeout_ms"_a, "transport"_a = 0)
      .def("describe", [](PyLink& self, const Target& target, std::int64_t timeout_ms) {
        const auto deadline = deadline_of(timeout_ms);
        const auto found = waiting([&] { return self.node->describe(self.link, target, deadline); });
        const auto& g = found.first->geometry;
        nb::dict d = statistics_of(self);
        nb::dict out;
        out["cache_id"] = g.cache_id;
        out["name"] = text_of(g.name);
        out["layout"] = layout_names[static_cast<int>(g.layout)];
        out["kind"] = text_of(g.kind);
        out["tensors"] = g.tensors.size();
        out["unit_bytes"] = g.unit_bytes;
        out["count"] = g.count;
        out["transport"] = std::string(transport_name(found.second));
        out["reasons"] = d["transports"];
        out["window"] = nb::none();
        if (found.first->windowed) {
          nb::list units;
          for (const auto& run : found.first->window)
            for (std::uint32_t i = 0; i < run.count; ++i) units.append(run.first + i);
          out["window"] = nb::tuple(units);
        }
        return out;
      }, "target"_a, "timeout_ms"_a)
      .def("unlink", [](PyLink& self, std::int64_t timeout_ms, bool force) {
        const auto deadline = deadline_of(timeout_ms);
        waiting([&] { self.node->unlink(self.link, deadline, force); });
      }, "timeout_ms"_a, "force"_a = false)
      .def("statistics", &statistics_of);

  nb::class_<PyKeeper>(m, "Keeper");

  nb::class_<PyNode>(m, "Node")
      .def("__init__", [](PyNode* self, std::uint64_t node_id, nb::bytes secret, int transports, unsigned copy_threads, unsigned lanes,
                          std::int64_t heartbeat_ms, std::int64_t heartbeat_timeout_ms, bool attach_any, std::string program) {
        NodeOptions options;
        options.node_id = node_id;
        const auto* p = reinterpret_cast<const std::uint8_t*>(secret.c_str());
        options.secret.assign(p, p + secret.size());
        options.transports = static_cast<unsigned>(transports);
        options.copy_threads = copy_threads;
        options.lanes = lanes;
        options.heartbeat_ms = heartbeat_ms;
        options.heartbeat_timeout_ms = heartbeat_timeout_ms;
        options.attach_any = attach_any;
        options.program = std::move(program);
        new (self) PyNode{std::make_shared<Node>(std::move(options))};
      }, nb::kw_only(), "node_id"_a, "secret"_a = nb::bytes("", 0), "transports"_a = 7, "copy_threads"_a = 0, "lanes"_a = 2,
         "heartbeat_ms"_a = 1000, "heartbeat_timeout_ms"_a = 10000, "attach_any"_a = false, "program"_a = "")
      .def_prop_ro("node_id", [](PyNode& self) { return self.node->id(); })
      .def_prop_ro("closed", [](PyNode& self) { return self.node->closed(); })
      .def("close", [](PyNode& self) {
        const WithoutGil released;
        self.node->close();
      })
      .def("listen", [](PyNode& self, const std::string& host, int port) {
        if (port < 0 || port > 65535) throw Error(Kind::invalid_argument, "a port lies in 0 .. 65535, not " + std::to_string(port));
        const WithoutGil released;
        const auto endpoint = self.node->listen(host, static_cast<std::uint16_t>(port));
        return std::pair<std::string, int>(endpoint.host, endpoint.port);
      }, "host"_a, "port"_a)
      .def("stop_listening", [](PyNode& self) {
        const WithoutGil released;
        self.node->stop_listening();
      })
      .def("connect", [](PyNode& self, const std::string& host, int port, std::int64_t timeout_ms, bool replace) {
        if (port < 0 || port > 65535) throw Error(Kind::invalid_argument, "a port lies in 0 .. 65535, not " + std::to_string(port));
        const auto deadline = deadline_of(timeout_ms);
        return PyLink{self.node, waiting([&] { return self.node->connect(host, static_cast<std::uint16_t>(port), deadline, replace); })};
      }, "host"_a, "port"_a, "timeout_ms"_a, "replace"_a = true)
      .def("listen_unix", [](PyNode& self, const std::string& path) {
        const WithoutGil released;
        return self.node->listen_unix(path).path;
      }, "path"_a)
      .def("connect_unix", [](PyNode& self, const std::string& path, std::int64_t timeout_ms, bool replace) {
        const auto deadline = deadline_of(timeout_ms);
        return PyLink{self.node, waiting([&] { return self.node->connect_unix(path, deadline, replace); })};
      }, "path"_a, "timeout_ms"_a, "replace"_a = true)
      .def("links", [](PyNode& self) {
        std::vector<PyLink> links;
        for (auto& link : self.node->links()) links.push_back({self.node, link});
        return links;
      })
      .def("serve_calls", [](PyNode& self) { self.node->serve_calls(); })
      .def("next_call", &next_call, "timeout_ms"_a)
      .def("next_event", [](PyNode& self, std::int64_t timeout_ms) -> nb::object {
        checked_timeout(timeout_ms);
        std::optional<std::pair<std::string, std::string>> event;
        {
          const WithoutGil released;
          event = self.node->next_event(timeout_ms);
        }
        if (!event) return nb::none();
        return nb::make_tuple(text_of(event->first), text_of(event->second));
      }, "timeout_ms"_a)
      .def("register_cache", [](PyNode& self, std::string name, const std::string& kind, int layout, std::vector<std::uint64_t> addresses,
                                std::uint64_t unit_bytes, std::uint64_t stride_bytes, std::uint64_t count,
                                const std::vector<std::optional<KeyTuple>>& keys, bool reachable) {
        auto& registry = self.node->registry();
        Geometry geometry;
        geometry.name = std::move(name);
        geometry.kind = kind;
        geometry.layout = layout_of(layout);
        geometry.unit_bytes = unit_bytes;
        geometry.stride_bytes = stride_bytes;
        geometry.count = count;
        for (const auto address : addresses) geometry.tensors.push_back({address, 0, 0});
        const auto kind_id = kind_by_name(kind);
        return registry.add(std::move(geometry), kind_id, keys_of(keys), reachable)->geometry.cache_id;
      }, nb::kw_only(), "name"_a, "kind"_a, "layout"_a, "addresses"_a.noconvert(), "unit_bytes"_a, "stride_bytes"_a, "count"_a,
         "keys"_a = std::vector<std::optional<KeyTuple>>{}, "reachable"_a = true)
      .def("create_pool", [](PyNode& self, std::size_t size_bytes, unsigned page_shift, std::size_t segment_bytes) {
        self.node->registry().create_pool(size_bytes, page_shift, segment_bytes);
      }, nb::kw_only(), "size_bytes"_a, "page_shift"_a = 16, "segment_bytes"_a = std::size_t{256} << 20)
      .def("allocate_cache", [](PyNode& self, std::string name, int layout, std::uint32_t tensors, std::uint64_t unit_bytes, std::uint64_t count,
                                const std::vector<std::optional<KeyTuple>>& keys, int key_use) {
        if (key_use < 0 || key_use > 2) throw Error(Kind::invalid_argument, "key_use is 0, 1 or 2");
        const auto cache = self.node->registry().allocate(std::move(name), layout_of(layout), tensors, unit_bytes, count, keys_of(keys), static_cast<KeyUse>(key_use));
        std::vector<std::uint64_t> addresses;
        for (const auto& tensor : cache->geometry.tensors) addresses.push_back(tensor.address);
        return std::pair(cache->geometry.cache_id, addresses);
      }, nb::kw_only(), "name"_a, "layout"_a, "tensors"_a, "unit_bytes"_a, "count"_a, "keys"_a = std::vector<std::optional<KeyTuple>>{}, "key_use"_a = 0)
      .def("keep_memory", [](PyNode& self, std::uint64_t cache_id) {
        const auto cache = self.node->registry().find(cache_id);
        if (!cache || !cache->allocated) throw Error(Kind::not_found, "this node has allocated no cache " + std::to_string(cache_id));
        PyKeeper keeper;
        for (const auto& place : cache->places) keeper.segments.push_back(place.segment);
        return keeper;
      }, "cache_id"_a)
      .def("unregister_cache", [](PyNode& self, std::uint64_t cache_id) {
        auto& registry = self.node->registry();
        const WithoutGil released;
        return registry.remove(cache_id);
      }, "cache_id"_a)
      .def("deallocate_cache", [](PyNode& self, std::uint64_t cache_id) {
        auto& registry = self.node->registry();
        const WithoutGil released;
        return registry.deallocate(cache_id);
      }, "cache_id"_a)
      .def("remove_key", [](PyNode& self, const KeyTuple& key) {
        auto& registry = self.node->registry();
        const auto named = key_of(key);
        const WithoutGil released;
        return registry.remove_key(named);
      }, "key"_a)
      .def("cache_ids", [](PyNode& self) { return self.node->registry().cache_ids(); })
      .def("open_window", [](PyNode& self, std::uint64_t cache_id, nb::handle units, int access, std::int64_t ttl_ms) {
        if (access != 1 && access != 2) throw Error(Kind::invalid_argument, "a window is for READ or for WRITE");
        const auto window = self.node->registry().open_window(cache_id, runs_of(units), static_cast<Access>(access), checked_timeout(ttl_ms));
        return nb::bytes(window->name.data(), window->name.size());
      }, "cache_id"_a, "units"_a, "access"_a, "ttl_ms"_a)
      .def("check_memory", [](PyNode& self, std::shared_ptr<const Moves> moves, bool writable) {
        const auto memory = memory_of_process(std::move(moves));
        auto& engine = self.node->engine();
        engine.look_anew(*memory, writable);
        if (writable) engine.check_writable(*memory);  // whether the kernel still holds a copy into it
        return memory->may_shrink.load();
      }, "moves"_a, "writable"_a)
      .def("resolution", [](PyNode& self, nb::bytes window) {
        const auto told = self.node->resolution(std::string(window.c_str(), window.size()));
        return nb::bytes(told.data(), told.size());
      }, "window"_a)
      .def("close_window", [](PyNode& self, nb::bytes name) {
        auto& registry = self.node->registry();
        const std::string text(name.c_str(), name.size());
        const WithoutGil released;
        return registry.close_window(text);
      }, "name"_a)
      .def("copy", [](PyNode& self, const Target& source, const Target& destination, std::shared_ptr<const Moves> moves, std::uint64_t offset_bytes) {
        const auto result = waiting([&] { return self.node->copy(source, destination, *moves, offset_bytes); });
        return Done{result.bytes, result.nanoseconds, result.transport};
      }, "source"_a, "destination"_a, "moves"_a, "offset_bytes"_a = 0)
      .def("statistics", [](PyNode& self) {
        const auto s = self.node->statistics();
        nb::dict d;
        d["node_id"] = s.node_id;
        d["threads"] = s.threads;
        d["caches"] = s.caches;
        d["windows"] = s.windows;
        d["links"] = s.links;
        d["pool_bytes"] = s.pool_bytes;
        d["pool_used_bytes"] = s.pool_used_bytes;
        d["slots_open"] = s.slots_open;
        return d;
      });
}
