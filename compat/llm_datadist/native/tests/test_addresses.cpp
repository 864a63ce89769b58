#include <utility>

#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

int main() {
  CHECK(ip_to_int("127.0.0.1") == 16777343 && ip_to_int("192.168.1.2") == 33663168 && ip_to_int("127.1") == 16777343);
  for (const char* ip : {"0.0.0.0", "10.1.2.3", "255.255.255.255"}) CHECK(int_to_ip(ip_to_int(ip)) == ip);
  for (const char* ip : {"", "localhost", "::1", "1.2.3.4.5", "256.1.1.1"}) CHECK_FAILS(std::runtime_error, "Can not parse ip str:", ip_to_int(ip));
  CHECK_FAILS(std::runtime_error, "Can not parse", ip_to_int(std::string("1.2.3.4\0x", 9)));
  for (const std::int64_t number : {std::int64_t{-1}, std::int64_t{1} << 32}) CHECK_FAILS(std::invalid_argument, "not an IPv4 address", int_to_ip(number));
  CHECK(parse_listen("127.0.0.1:7000") == std::pair(std::string("127.0.0.1"), 7000u) && parse_listen(":0").first.empty());
  for (const char* text : {"", "127.0.0.1", "::1:7000"}) CHECK_FAILS(OptionError, "listenIpInfo", parse_listen(text));
  for (const char* text : {"a:", "a:http", "a:-1", "a:1x", "a:99999999999"}) CHECK_FAILS(NoNumber, "no port", parse_listen(text));
  CHECK(parse_place("127.0.0.1:7000") == std::pair(std::string("127.0.0.1"), std::uint16_t{7000}) && parse_place("[::1]:0").first == "::1");
  for (const char* text : {"", "127.0.0.1", ":7000", "::1:7000", "[1.2.3.4]:1", "[]:1", "a:", "a:http", "a:-1", "a:1x", "a:65536"})
    CHECK_FAILS(OptionError, "not ip:port", parse_place(text));
  CHECK(numeric_host("127.1") == "127.0.0.1" && numeric_host("::1") == "::1");
  for (const char* ip : {"", "localhost", "::1::", "[::1]"}) CHECK_FAILS(RuleError, "no IP address", numeric_host(ip));
  return TEST_RESULT();
}
