// IPv4 addresses as little-endian numbers, and "ip:port".
#include <arpa/inet.h>

#include <charconv>

#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {

std::uint32_t ip_to_int(const std::string& ip) {
  in_addr address{};
  if (ip.find('\0') != std::string::npos || ::inet_aton(ip.c_str(), &address) == 0)
    throw std::runtime_error(said("Can not parse ip str:", ip));
  const std::uint32_t big = ntohl(address.s_addr);
  return big >> 24 | (big >> 8 & 0xFF00) | (big << 8 & 0xFF0000) | big << 24;
}

std::string int_to_ip(std::int64_t number) {
  if (number < 0 || number > 0xFFFFFFFF) throw std::invalid_argument(said(number, " is not an IPv4 address"));
  return said(number & 0xFF, ".", number >> 8 & 0xFF, ".", number >> 16 & 0xFF, ".", number >> 24);
}

std::pair<std::string, std::uint32_t> parse_listen(std::string_view text) {
  const auto colon = text.find(':');
  if (colon == text.npos || text.find(':', colon + 1) != text.npos)
    throw OptionError(said("listenIpInfo is invalid: '", text, "' is not ip:port"));
  const auto digits = text.substr(colon + 1);
  std::uint32_t port = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), port);
  if (error != std::errc{} || end != digits.end()) throw NoNumber(said("'", digits, "' of listenIpInfo is no port"));
  return {std::string(text.substr(0, colon)), port};
}

std::pair<std::string, std::uint16_t> parse_place(std::string_view text) {
  const auto refuse = [&] { throw OptionError(said("'", text, "' is not ip:port, nor [ipv6]:port")); };
  const auto colon = text.rfind(':');
  if (colon == text.npos) refuse();
  auto host = text.substr(0, colon);
  const auto digits = text.substr(colon + 1);
  const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), port);
  if (host.empty() || (host.find(':') != host.npos) != bracketed || error != std::errc{} || end != digits.end()) refuse();
  return {std::string(host), port};
}

std::string numeric_host(const std::string& ip) {
  in6_addr six{};
  if (ip.find('\0') == std::string::npos && ::inet_pton(AF_INET6, ip.c_str(), &six) == 1) return ip;
  try {
    return int_to_ip(ip_to_int(ip));
  } catch (const std::runtime_error&) {
    throw RuleError(said("'", ip, "' is no IP address"));
  }
}

}  // namespace llm_datadist::rules
