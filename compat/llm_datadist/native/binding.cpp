// The rules as the Python package sees them, `llm_datadist._rules`. Converts, and knows no rule.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "links.hpp"
#include "rules.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace llm_datadist::rules;

namespace {

// Python's numbers have no end; what does not fit is far out of every range that is allowed.
std::int64_t clamped(nb::handle number) {
  int over = 0;
  const auto value = PyLong_AsLongLongAndOverflow(number.ptr(), &over);
  if (value == -1 && over == 0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (over == 0) return value;
  return over > 0 ? std::numeric_limits<std::int64_t>::max() : std::numeric_limits<std::int64_t>::min();
}

std::optional<Layers> layers_of(nb::handle range) {
  if (range.is_none()) return std::nullopt;
  return Layers{clamped(range.attr("start")), clamped(range.attr("stop"))};
}

nb::object range_of(const std::optional<Layers>& layers) {
  if (!layers) return nb::none();
  return nb::steal(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "LL", static_cast<long long>(layers->start),
                                         static_cast<long long>(layers->stop)));
}

// A kvferry.Link as the book has it: the object itself, asked for what the book wants to know.
struct LinkObject {
  nb::object object;
  bool operator==(const LinkObject& other) const { return object.is(other.object); }
};
struct LinkFacts {
  static bool alive(const LinkObject& link) { return nb::cast<bool>(link.object.attr("alive")); }
  static std::uint64_t peer_id(const LinkObject& link) { return nb::cast<std::uint64_t>(link.object.attr("peer_id")); }
  static std::string program(const LinkObject& link) { return nb::cast<std::string>(link.object.attr("peer_program")); }
};
using Book = LinkBook<LinkObject, LinkFacts>;

Book::Links links_of(nb::list listed) {
  Book::Links links;
  for (nb::handle link : listed) links.push_back({nb::borrow(link)});
  return links;
}

nb::tuple words(const Answer& answer) { return nb::make_tuple(answer.status, answer.why); }

nb::object object_of(const std::optional<LinkObject>& link) { return link ? link->object : nb::object(nb::none()); }

// Methods take the node's links, in order, and answer (status, sentence).
void add_links(nb::module_& m) {
  nb::class_<Book>(m, "LinkBook")
      .def(nb::init<std::uint64_t, const EngineOptions&, bool>(), "cluster_id"_a, "options"_a, "needs_local_address"_a)
      .def_prop_ro("program", &Book::program)
      .def("listens", &Book::listens, "listen"_a.none())
      .def("to", [](Book& book, std::uint64_t cluster, nb::list links) {
        const auto found = book.to(cluster, links_of(links));
        return nb::make_tuple(found.answer.status, found.answer.why, object_of(found.link));
      }, "cluster_id"_a, "links"_a)
      .def("alive", [](Book& book, std::uint64_t cluster, nb::list links) { return object_of(book.alive(cluster, links_of(links))); }, "cluster_id"_a, "links"_a)
      .def("is_of_the_other_mode", [](Book& book, nb::object link) { return book.is_of_the_other_mode({link}); }, "link"_a)
      .def("may_dial", [](Book& book, std::uint64_t cluster, std::size_t local, std::size_t remote, nb::list links) {
        return words(book.may_dial(cluster, local, remote, links_of(links)));
      }, "cluster_id"_a, "local_addresses"_a, "remote_addresses"_a, "links"_a)
      .def("dialled", [](Book& book, nb::object link, const std::string& host, std::uint32_t port) { return words(book.dialled({link}, host, port)); },
           "link"_a, "host"_a, "port"_a)
      .def("adopt", [](Book& book, std::uint64_t cluster, nb::list links) { return book.adopt(cluster, links_of(links)); }, "cluster_id"_a, "links"_a)
      .def("keep", [](Book& book, std::uint64_t cluster, nb::object link) { book.keep(cluster, {link}); }, "cluster_id"_a, "link"_a)
      .def("has_opened", &Book::has_opened, "cluster_id"_a)
      .def("parting", [](Book& book, std::uint64_t cluster, std::size_t remote, bool force, nb::list links) {
        const auto parting = book.parting(cluster, remote, force, links_of(links));
        nb::list ending;
        for (const auto& link : parting.links) ending.append(link.object);
        return nb::make_tuple(parting.answer.status, parting.answer.why, ending, parting.tell_if_lost);
      }, "cluster_id"_a, "remote_addresses"_a, "force"_a, "links"_a)
      .def("parted", &Book::parted, "cluster_id"_a)
      .def("forget", &Book::forget, "cluster_id"_a)
      .def("clear", &Book::clear);
}

void add_numbers_and_names(nb::module_& m) {
  const std::pair<const char*, std::uint32_t> numbers[] = {
      {"SUCCESS", status::success},           {"FAILED", status::failed},
      {"KV_CACHE_NOT_EXIST", status::kv_cache_not_exist}, {"PARAM_INVALID", status::param_invalid},
      {"NOT_YET_LINK", status::not_yet_link}, {"ALREADY_LINK", status::already_link},
      {"LINK_FAILED", status::link_failed},   {"UNLINK_FAILED", status::unlink_failed},
      {"EXIST_LINK", status::exist_link},     {"FEATURE_NOT_ENABLED", status::feature_not_enabled},
      {"TIMEOUT", status::timeout},           {"LINK_BUSY", status::link_busy},
      {"OUT_OF_MEMORY", status::out_of_memory},
  };
  for (const auto& [name, number] : numbers) m.attr(name) = number;
  const std::pair<const char*, const char*> names[] = {
      {"ROLE", option::role},
      {"DEVICE_ID", option::device_id},
      {"GRAPH_MEMORY", option::graph_memory},
      {"CACHE_MANAGER", option::cache_manager},
      {"REMOTE_ACCESSIBLE", option::remote_accessible},
      {"LOCAL_COMM_RES", option::local_comm_res},
      {"TRANSFER_BACKEND", option::transfer_backend},
      {"GLOBAL_RESOURCE", option::global_resource},
      {"LISTEN", option::listen},
      {"LISTEN_IP", option::listen_ip},
      {"LISTEN_PORT", option::listen_port},
      {"SYNC_TIMEOUT", option::sync_timeout},
      {"LINK_TOTAL_TIME", option::link_total_time},
      {"LINK_RETRY_COUNT", option::link_retry_count},
      {"DEVICE_POOL", option::device_pool},
      {"HOST_POOL", option::host_pool},
      {"SECRET", option::secret},
      {"TRANSPORTS", option::transports},
      {"ATTACH", option::attach},
      {"RENDEZVOUS_PORT", option::rendezvous_port},
  };
  for (const auto& [name, text] : names) m.attr(name) = text;
}

}  // namespace

NB_MODULE(_rules, m) {
  nb::exception<RuleError> rule_error(m, "RuleError");
  nb::exception<OptionError>(m, "OptionError", rule_error.ptr());  // the later one is looked at first
  nb::exception<TooLittleLeft>(m, "TooLittleLeft");
  add_numbers_and_names(m);

  m.def("status_of", &status_of, "kind"_a, "call"_a = "");
  m.def("known_kinds", &known_kinds);
  m.def("overall", &overall, "statuses"_a);

  m.def("ip_to_int", &ip_to_int, "ip"_a);
  m.def("int_to_ip", [](nb::handle number) { return int_to_ip(clamped(number)); }, "number"_a);
  m.def("parse_listen", [](const std::string& text) { return parse_listen(text); }, "text"_a);

  nb::class_<Pool>(m, "Pool").def_ro("size_bytes", &Pool::size_bytes).def_ro("page_shift", &Pool::page_shift);
  nb::class_<EngineOptions>(m, "EngineOptions")
      .def(nb::init<>())
      .def_ro("remote", &EngineOptions::remote)
      .def_ro("hixl", &EngineOptions::hixl)
      .def_ro("listen", &EngineOptions::listen)
      .def_ro("timeout_ms", &EngineOptions::timeout_ms)
      .def_ro("link_total_time_s", &EngineOptions::link_total_time_s)
      .def_ro("link_retry_count", &EngineOptions::link_retry_count)
      .def_ro("local_comm_res", &EngineOptions::local_comm_res)
      .def_ro("device_pool", &EngineOptions::device_pool)
      .def_ro("host_pool", &EngineOptions::host_pool)
      .def_ro("secret", &EngineOptions::secret)
      .def_ro("transports", &EngineOptions::transports)
      .def_ro("attach", &EngineOptions::attach)
      .def_ro("rendezvous_port", &EngineOptions::rendezvous_port);
  m.def("with_environment", &with_environment, "options"_a, "environment"_a);
  m.def("completed", &completed, "options"_a, "role"_a);
  m.def("is_cache_manager_mode", &is_cache_manager_mode, "options"_a);
  m.def("parse_options", &parse_options, "options"_a);

  m.def("role_name", [](nb::handle role) { return role_name(clamped(role)); }, "role"_a);

  m.def("pool_of", &pool_of, "options"_a);
  m.def("pools_too_large", [](const EngineOptions& options, const std::string& meminfo) { return pools_too_large(options, meminfo); }, "options"_a, "meminfo"_a);
  nb::class_<Share>(m, "Share")
      .def(nb::init<const Pool&>(), "pool"_a)
      .def("wanted", &Share::wanted, "tensors"_a, "tensor_bytes"_a)
      .def("take", &Share::take, "cache_id"_a, "size_bytes"_a)
      .def("give_back", &Share::give_back, "cache_id"_a);
  nb::enum_<ListenerMove>(m, "ListenerMove")
      .value("STAYS", ListenerMove::stays)
      .value("MOVES", ListenerMove::moves)
      .value("REFUSED_LINKED", ListenerMove::refused_linked)
      .value("REFUSED_HIXL", ListenerMove::refused_hixl);
  m.def("listener_move", &listener_move, "has_links"_a, "hixl"_a, "before"_a.none(), "wanted"_a.none());
  nb::enum_<IdMeans>(m, "IdMeans").value("CACHE", IdMeans::cache).value("BLOCKS_OF_MODEL_0", IdMeans::blocks_of_model_0).value("REQUEST_0", IdMeans::request_0);
  m.def("meaning_of_id", &meaning_of_id, "cache_id"_a, "remote"_a, "pushing"_a);
  add_links(m);

  nb::class_<Member>(m, "Member").def_ro("cluster_id", &Member::cluster_id).def_ro("rank", &Member::rank).def_ro("host", &Member::host);
  m.def("members_of", &members_of, "rank_table"_a, "ranks"_a);

  m.def("layer_tensors", &layer_tensors, "layers"_a, "tensors_per_layer"_a);
  m.def("element_bits", &element_bits, "data_type"_a);
  m.def("unit_geometry", [](std::uint64_t num_tensors, const std::vector<std::int64_t>& shape, std::int64_t data_type) {
    const auto geometry = unit_geometry(num_tensors, shape, data_type);
    return std::pair(geometry.unit_bytes, geometry.count);
  }, "num_tensors"_a, "shape"_a, "data_type"_a);
  m.def("check_addresses", &check_addresses, "given"_a, "num_tensors"_a, "one_is_0"_a);
  m.def("check_size", &check_size, "size"_a);
  m.def("check_row", [](const std::string& name, std::uint64_t row, std::uint64_t count) { check_row(name, row, count); }, "name"_a, "row"_a, "count"_a);
  m.def("check_tensors_per_layer", &check_tensors_per_layer, "tensors_per_layer"_a);
  m.def("check_timeout", &check_timeout, "timeout_ms"_a);
  m.def("check_paired", &check_paired, "sources"_a, "destinations"_a);
  m.def("pull_layers", [](nb::handle source, nb::handle destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer) {
    const auto layers = pull_layers(layers_of(source), layers_of(destination), num_tensors, tensors_per_layer);
    return nb::make_tuple(range_of(layers.source), range_of(layers.destination));
  }, "source"_a.none(), "destination"_a.none(), "num_tensors"_a, "tensors_per_layer"_a);
  m.def("push_layers", [](nb::handle source, nb::handle destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer) {
    const auto [from, to] = push_layers(layers_of(source), layers_of(destination), num_tensors, tensors_per_layer);
    return nb::make_tuple(range_of(from), range_of(to));
  }, "source"_a.none(), "destination"_a.none(), "num_tensors"_a, "tensors_per_layer"_a);
  m.def("copied_bytes", &copied_bytes, "offset"_a, "size"_a, "source_row_bytes"_a, "destination_row_bytes"_a);
  m.def("check_blocks_of_row", &check_blocks_of_row, "tensor_bytes"_a, "block_bytes"_a, "listed"_a);
}
