// The rules as the Python package sees them, `llm_datadist._rules`. Converts, and knows no rule.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>

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
  add_numbers_and_names(m);

  m.def("status_of", &status_of, "kind"_a, "call"_a = "");
  m.def("known_kinds", &known_kinds);

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

  nb::class_<Member>(m, "Member").def_ro("cluster_id", &Member::cluster_id).def_ro("rank", &Member::rank).def_ro("host", &Member::host);
  m.def("members_of", &members_of, "rank_table"_a, "ranks"_a);

  m.def("layer_tensors", &layer_tensors, "layers"_a, "tensors_per_layer"_a);
  m.def("unit_geometry", [](std::uint64_t num_tensors, const std::vector<std::int64_t>& shape, std::uint64_t element_bytes) {
    const auto geometry = unit_geometry(num_tensors, shape, element_bytes);
    return std::pair(geometry.unit_bytes, geometry.count);
  }, "num_tensors"_a, "shape"_a, "element_bytes"_a);
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
