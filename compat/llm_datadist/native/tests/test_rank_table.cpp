#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

static const std::vector<std::pair<std::uint64_t, std::uint32_t>> ranks{{8, 0}, {7, 1}};

static void members_of_one_server_are_on_this_host() {
  const std::vector<Member> here{{8, 0, ""}, {7, 1, ""}};
  for (const char* table : {"{}", R"({"server_list":[{"device":[{}]}]})", R"({"server_list":[{"server_id":"10.1.1.1","device":[{"rank_id":"1"},{"rank_id":0}]}]})"})
    CHECK(members_of(table, ranks) == here);
  CHECK(members_of("{}", {{8, 3}, {7, 2}}) == (std::vector<Member>{{7, 2, ""}, {8, 3, ""}}));
}

static void members_of_several_servers_have_their_servers_address() {
  const char* table = R"({"server_list":[{"server_id":"b","device":[{"rank_id":"1"}]},{"server_id":"x","host_ip":"a","device":[{"rank_id":"0"}]}]})";
  CHECK(members_of(table, ranks) == (std::vector<Member>{{8, 0, "a"}, {7, 1, "b"}}));
}

static void a_server_that_is_a_mere_number_has_the_address_of_its_device() {
  const char* two = R"({"server_list":[{"server_id":"1","device":[{"rank_id":"0","device_ip":"a"}]},{"server_id":"2","device":[{"rank_id":"1","device_ip":"b"}]}]})";
  CHECK(members_of(two, ranks) == (std::vector<Member>{{8, 0, "a"}, {7, 1, "b"}}));
  const char* unnamed = R"({"server_list":[{"device":[{"rank_id":"0","device_ip":"a"}]},{"server_id":"c","device":[{"rank_id":"1","device_ip":"b"}]}]})";
  CHECK(members_of(unnamed, ranks) == (std::vector<Member>{{8, 0, "a"}, {7, 1, "c"}}));
  const char* one = R"({"server_list":[{"server_id":"1","device":[{"rank_id":"0","device_ip":"a"},{"rank_id":"1","device_ip":"b"}]}]})";
  CHECK(members_of(one, ranks) == (std::vector<Member>{{8, 0, ""}, {7, 1, ""}}));
  const char* given = R"({"server_list":[{"server_id":"1","host_ip":"x","device":[{"rank_id":"0","device_ip":"a"}]},{"server_id":"2","host_ip":"y","device":[{"rank_id":"1"}]}]})";
  CHECK(members_of(given, ranks) == (std::vector<Member>{{8, 0, "x"}, {7, 1, "y"}}));
}

static void tables_that_cannot_be_are_refused() {
  for (const char* table : {"", "[]", R"({"server_list":{}})", R"({"server_list":[1]})", R"({"server_list":[{"device":{}}]})",
                            R"({"server_list":[{"server_id":"a","device":[{"rank_id":"0"}]}]})", R"({"server_list":[{"device":[{"rank_id":"one"}]}]})",
                            R"({"server_list":[{"device":[{"rank_id":[]}]}]})", R"({"server_list":[{"server_id":5,"device":[{"rank_id":0},{"rank_id":1}]}]})",
                            R"({"server_list":[{"server_id":"a","device":[{"rank_id":0}]},{"device":[{"rank_id":1}]}]})",
                            R"({"server_list":[{"server_id":"a","device":[{"rank_id":0}]},{"server_id":"2","device":[{"rank_id":1}]}]})",
                            R"({"server_list":[{"server_id":"1","device":[{"rank_id":0,"device_ip":5}]},{"server_id":"b","device":[{"rank_id":1}]}]})"})
    CHECK_FAILS(RuleError, "rank", members_of(table, ranks));
}

int main() {
  members_of_one_server_are_on_this_host();
  members_of_several_servers_have_their_servers_address();
  a_server_that_is_a_mere_number_has_the_address_of_its_device();
  tables_that_cannot_be_are_refused();
  return TEST_RESULT();
}
