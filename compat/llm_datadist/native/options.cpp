// What the option strings given to an instance mean. Two steps: `completed` adds what one option implies for another,
// `parse_options` turns the completed strings into values.
#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>

#include "json.hpp"
#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {
namespace {

template <class... Words>
[[noreturn]] void refuse(const Words&... words) {
  throw OptionError(said(words...));
}

const std::string* find(const Options& options, const char* name) {
  const auto found = options.find(name);
  return found == options.end() ? nullptr : &found->second;
}

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool names_one_device(std::string_view text) {
  std::int32_t device = 0;
  return all_digits(text) && std::from_chars(text.data(), text.data() + text.size(), device).ec == std::errc{};
}

std::int64_t number(const Options& options, const char* name, std::int64_t otherwise, std::int64_t low, std::int64_t high) {
  const auto* text = find(options, name);
  if (text == nullptr) return otherwise;
  std::int64_t value = 0;
  const bool is_number = all_digits(*text) && std::from_chars(text->data(), text->data() + text->size(), value).ec == std::errc{};
  if (!is_number || value < low || value > high) refuse(name, " must be a number from ", low, " to ", high, ", not '", *text, "'");
  return value;
}

Json json_object(const char* name, const std::string& text) {
  Json value;
  try {
    value = read_json(text);
  } catch (const std::invalid_argument& error) {
    refuse(name, " is ", error.what());
  }
  if (value.kind != Json::Kind::object) refuse(name, " must be a JSON object, not '", text, "'");
  return value;
}

std::optional<Pool> pool(const Options& options, const char* name) {
  const auto* text = find(options, name);
  if (text == nullptr || text->empty()) return std::nullopt;
  const auto fields = json_object(name, *text);
  const auto* size = fields.find("memory_size");
  const auto* shift = fields.find("page_shift");
  if (size == nullptr || !size->integer || *size->integer <= 0) refuse(name, ": memory_size must be a positive number of bytes in '", *text, "'");
  Pool out{static_cast<std::uint64_t>(*size->integer)};
  if (shift == nullptr) return out;
  if (!shift->integer || *shift->integer < 10 || *shift->integer > 30) refuse(name, ": page_shift must be from 10 to 30 in '", *text, "'");
  out.page_shift = static_cast<std::uint32_t>(*shift->integer);
  return out;
}

constexpr const char* own_options[] = {option::secret, option::transports, option::attach, option::rendezvous_port};

// The vendor passes over options that it does not know. Of ours a misspelt one could leave an instance without its secret.
void check_own(const Options& options) {
  for (const auto& [name, value] : options) {
    if (!name.starts_with("kvferry.") || std::find(std::begin(own_options), std::end(own_options), name) != std::end(own_options)) continue;
    std::string known;
    for (const char* own : own_options) known += said(known.empty() ? "" : ", ", own);
    refuse("'", name, "' is no option: there are ", known);
  }
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (true) {
    const auto comma = text.find(',');
    auto part = text.substr(0, comma);
    const auto first = part.find_first_not_of(' ');
    part = first == part.npos ? "" : part.substr(first, part.find_last_not_of(' ') - first + 1);
    parts.emplace_back(part);
    if (comma == text.npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace

Options with_environment(Options options, const Options& environment) {
  for (const char* name : own_options) {
    std::string variable = name;
    for (char& c : variable) c = c == '.' ? '_' : c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    const auto* value = find(environment, variable.c_str());
    if (value != nullptr && !value->empty()) options.emplace(name, *value);  // what the program says counts more
  }
  return options;
}

bool is_cache_manager_mode(const Options& options) {
  const auto* mode = find(options, option::cache_manager);
  return mode != nullptr && *mode == "1";
}

Options completed(Options options, const std::string& role) {
  if (const auto* memory = find(options, option::graph_memory); memory != nullptr && !all_digits(*memory))
    refuse(option::graph_memory, " must be one number of bytes, not '", *memory, "'");
  options[option::role] = role;
  if (find(options, option::local_comm_res) != nullptr) {
    options.emplace(option::remote_accessible, "1");
    if (options.emplace(option::cache_manager, "1").first->second == "0")
      refuse("local_comm_res needs the cache manager: ", option::cache_manager, " is 0");
  }
  if (find(options, option::transfer_backend) != nullptr) {
    if (!is_cache_manager_mode(options)) refuse("transfer_backend needs ", option::cache_manager, "=1");
    if (options.emplace(option::remote_accessible, "1").first->second == "0")
      refuse("transfer_backend needs ", option::remote_accessible, "=1");
    if (find(options, option::listen) == nullptr && find(options, option::listen_ip) == nullptr) refuse("transfer_backend needs ", option::listen);
  }
  if (const auto* listen = find(options, option::listen); listen != nullptr && is_cache_manager_mode(options)) {
    const auto [ip, port] = parse_listen(*listen);
    options[option::listen_ip] = ip;
    options[option::listen_port] = std::to_string(port);
  }
  return options;
}

EngineOptions parse_options(const Options& options) {
  EngineOptions out;
  check_own(options);
  if (const auto* device = find(options, option::device_id); device != nullptr && !names_one_device(*device))
    refuse(option::device_id, " must name one device here, not '", *device, "'");
  if (const auto* backend = find(options, option::transfer_backend)) {
    if (*backend != "hixl") refuse(option::transfer_backend, " can only be 'hixl', not '", *backend, "'");
    out.hixl = true;
    if (const auto* resource = find(options, option::global_resource); resource != nullptr && !resource->empty())
      json_object(option::global_resource, *resource);
  }
  if (const auto* attach = find(options, option::attach)) {
    if (*attach != "same" && *attach != "any") refuse(option::attach, " can be 'same' or 'any', not '", *attach, "'");
    out.attach = *attach;
  }
  const auto* remote = find(options, option::remote_accessible);
  out.remote = remote != nullptr && *remote == "1";
  if (const auto* ip = find(options, option::listen_ip))
    out.listen = {*ip, static_cast<std::uint32_t>(number(options, option::listen_port, 0, 0, std::numeric_limits<std::uint32_t>::max()))};
  out.timeout_ms = number(options, option::sync_timeout, out.timeout_ms, 1, std::numeric_limits<std::int32_t>::max());
  const auto total_s = number(options, option::link_total_time, 0, 0, std::numeric_limits<std::uint32_t>::max());
  if (total_s != 0) out.link_total_time_s = total_s;
  out.link_retry_count = number(options, option::link_retry_count, out.link_retry_count, 1, 100);
  out.rendezvous_port = static_cast<std::uint32_t>(number(options, option::rendezvous_port, out.rendezvous_port, 1, 65535));
  if (const auto* resources = find(options, option::local_comm_res)) out.local_comm_res = *resources;
  out.device_pool = pool(options, option::device_pool);
  out.host_pool = pool(options, option::host_pool);
  if (const auto* secret = find(options, option::secret)) out.secret = *secret;
  if (const auto* transports = find(options, option::transports); transports != nullptr && !transports->empty()) out.transports = split(*transports);
  return out;
}

std::optional<std::pair<std::string, std::uint16_t>> cpp_listen(const Options& given) {
  const auto* listen = find(given, cpp_option::listen);
  if (listen == nullptr) return std::nullopt;
  try {
    const auto [host, port] = parse_place(*listen);
    return std::pair(numeric_host(host), port);
  } catch (const RuleError& error) {
    refuse(cpp_option::listen, ": ", error.what());
  }
}

Options from_cpp(const Options& given) {
  check_own(given);
  // Its other keys mean nothing there, such as those that the other doors spell in another way.
  constexpr const char* as_they_are[] = {option::sync_timeout, option::local_comm_res, option::transfer_backend, option::global_resource,
                                         option::device_pool,  option::host_pool,      option::secret,           option::transports,
                                         option::attach};
  Options out{{option::cache_manager, "1"}, {option::remote_accessible, "1"}};
  for (const char* name : as_they_are)
    if (const auto* value = find(given, name)) out[name] = *value;
  const auto* device = find(given, cpp_option::device_id);
  if (device == nullptr) refuse(cpp_option::device_id, " is required");
  if (!names_one_device(*device)) refuse(cpp_option::device_id, " must name one device, not '", *device, "'");
  out[option::device_id] = *device;
  const auto place = cpp_listen(given);
  if (!place && find(given, option::transfer_backend) != nullptr) refuse(option::transfer_backend, " needs ", cpp_option::listen);
  if (place) {
    out[option::listen_ip] = place->first;
    out[option::listen_port] = std::to_string(place->second);
  }
  return out;
}

const char* role_name(std::int64_t role) {
  switch (role) {
    case 1: return "Prompt";
    case 2: return "Decoder";
    case 3: return "Mix";
    default: throw RuleError(said(role, " is no role"));
  }
}

}  // namespace llm_datadist::rules
