#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

static Options with(Options more) {
  more.emplace(option::cache_manager, "1");
  return more;
}
static EngineOptions parsed(Options given) { return parse_options(completed(with(std::move(given)), "Prompt")); }

static void what_one_option_implies_is_added() {
  const auto listening = completed(with({{option::listen, "127.0.0.1:7000"}}), "Mix");
  CHECK(listening.at(option::role) == "Mix" && listening.at(option::listen_ip) == "127.0.0.1" && listening.at(option::listen_port) == "7000");
  const auto local = completed({{option::local_comm_res, ""}}, "Mix");
  CHECK(is_cache_manager_mode(local) && parse_options(local).remote);
  CHECK(!parse_options(completed({{option::local_comm_res, ""}, {option::remote_accessible, "0"}}, "Mix")).remote);
  const auto hixl = parsed({{option::transfer_backend, "hixl"}, {option::listen, "1.2.3.4:5"}});
  CHECK(hixl.hixl && hixl.remote && hixl.listen == std::pair(std::string("1.2.3.4"), 5u));
  CHECK(!is_cache_manager_mode({}) && completed({{option::listen, "nonsense"}}, "Mix").size() == 2);  // the older mode's affair
}

static void options_that_contradict_each_other_are_refused() {
  const Options hixl{{option::transfer_backend, "hixl"}};
  CHECK_FAILS(OptionError, "EnableCacheManager", completed({{option::local_comm_res, ""}, {option::cache_manager, "0"}}, "Mix"));
  CHECK_FAILS(OptionError, "EnableCacheManager", completed(hixl, "Mix"));
  CHECK_FAILS(OptionError, "listenIpInfo", completed(with(hixl), "Mix"));
  CHECK_FAILS(OptionError, "EnableRemoteCacheAccessible", completed(with({{option::transfer_backend, "hixl"}, {option::remote_accessible, "0"}}), "Mix"));
  CHECK_FAILS(NoNumber, "no port", completed(with({{option::listen, "1.2.3.4:http"}}), "Mix"));
  for (const char* listen : {"127.0.0.1", "::1:7000"}) CHECK_FAILS(OptionError, "listenIpInfo", completed(with({{option::listen, listen}}), "Mix"));
  for (const char* memory : {"", "1.23", "-1", "1,2"}) CHECK_FAILS(OptionError, "flowGraphMemMaxSize", completed({{option::graph_memory, memory}}, "Mix"));
}

static void values_have_defaults_and_bounds() {
  const auto plain = parsed({});
  CHECK(!plain.remote && !plain.hixl && !plain.listen && plain.timeout_ms == 1000 && plain.link_total_time_s == 120 && plain.link_retry_count == 1);
  CHECK(!plain.device_pool && !plain.secret && !plain.transports && plain.attach == "same" && plain.rendezvous_port == 18517);
  const auto full = parsed({{option::sync_timeout, "5000"}, {option::link_total_time, "7"}, {option::link_retry_count, "3"},
                            {option::device_pool, R"({"memory_size": 1048576})"}, {option::host_pool, R"({"memory_size": 4096, "page_shift": 12})"},
                            {option::secret, "s"}, {option::transports, "map, socket"}, {option::attach, "any"}, {option::rendezvous_port, "99"}});
  CHECK(full.timeout_ms == 5000 && full.link_total_time_s == 7 && full.link_retry_count == 3 && full.rendezvous_port == 99);
  CHECK(full.device_pool == Pool{1048576, 16} && full.host_pool == Pool{4096, 12} && full.secret == "s" && full.attach == "any");
  CHECK(full.transports == std::vector<std::string>{"map", "socket"});
  CHECK(parsed({{option::link_total_time, "0"}}).link_total_time_s == 120);
  const std::pair<const char*, const char*> impossible[] = {
      {option::device_id, "0;1"}, {option::device_id, "2147483648"}, {option::sync_timeout, "0"}, {option::sync_timeout, "soon"}, {option::sync_timeout, "2147483648"},
      {option::link_retry_count, "0"}, {option::link_retry_count, "101"}, {option::link_total_time, "x"}, {option::link_total_time, "99999999999999999999"}, {option::rendezvous_port, "0"},
      {option::device_pool, "{"}, {option::device_pool, "[]"}, {option::device_pool, "{}"}, {option::device_pool, R"({"memory_size": "1"})"}, {option::device_pool, R"({"memory_size": 0})"},
      {option::device_pool, R"({"memory_size": 1.5})"}, {option::host_pool, R"({"memory_size": 1, "page_shift": 9})"}, {option::host_pool, R"({"memory_size": 1, "page_shift": 31})"}, {option::attach, "all"}, {"kvferry.secrets", "s"}};
  for (const auto& [name, text] : impossible) CHECK_FAILS(OptionError, name, parsed({{name, text}}));
  CHECK_FAILS(OptionError, option::global_resource, parsed({{option::transfer_backend, "hixl"}, {option::listen, "1.2.3.4:5"}, {option::global_resource, "{"}}));
  for (const char* backend : {"", "other"}) CHECK_FAILS(OptionError, "hixl", parsed({{option::transfer_backend, backend}, {option::listen, "1.2.3.4:5"}}));
}

static void our_own_options_may_come_from_the_environment() {
  const auto both = with_environment({{option::secret, "mine"}, {"a", "b"}}, {{"KVFERRY_SECRET", "s"}, {"KVFERRY_RENDEZVOUS_PORT", "99"}, {"KVFERRY_ATTACH", ""}, {"KVFERRY_X", "y"}});
  CHECK(both == Options{{option::secret, "mine"}, {"a", "b"}, {option::rendezvous_port, "99"}});
}

static void the_cpp_api_spells_some_in_another_way() {
  const auto given = [](Options more) {
    more.emplace(cpp_option::device_id, "0");
    return parse_options(completed(from_cpp(more), role_name(1)));
  };
  const auto plain = given({{option::listen, "1.2.3.4:5"}, {option::cache_manager, "0"}, {option::remote_accessible, "0"}});  // mean nothing there
  CHECK(plain.remote && !plain.listen && plain.timeout_ms == 1000);
  CHECK(given({{cpp_option::listen, "[::1]:7000"}, {option::sync_timeout, "5"}, {option::secret, "s"}}).listen == std::pair(std::string("::1"), 7000u));
  CHECK(given({{option::transfer_backend, "hixl"}, {cpp_option::listen, "1.2.3.4:5"}}).hixl);
  CHECK_FAILS(OptionError, "llm.DeviceId is required", from_cpp({}));
  for (const char* device : {"", "0;1", "-1", "2147483648"}) CHECK_FAILS(OptionError, "one device", from_cpp({{cpp_option::device_id, device}}));
  for (const char* place : {"1.2.3.4", "999.0.0.1:5", "localhost:5", "[::1::]:5"}) CHECK_FAILS(OptionError, "llm.ListenIpInfo", given({{cpp_option::listen, place}}));
  CHECK_FAILS(OptionError, "llm.ListenIpInfo", given({{option::transfer_backend, "hixl"}}));
  CHECK(role_name(2) == std::string("Decoder") && role_name(3) == std::string("Mix"));
  for (const std::int64_t role : {0, 4}) CHECK_FAILS(RuleError, "no role", role_name(role));
}

int main() {
  the_cpp_api_spells_some_in_another_way();
  what_one_option_implies_is_added();
  options_that_contradict_each_other_are_refused();
  values_have_defaults_and_bounds();
  our_own_options_may_come_from_the_environment();
  return TEST_RESULT();
}
