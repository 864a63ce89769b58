// Who is where, according to a rank table. The table names addresses and no port: how members meet is for the doors.
#include <algorithm>
#include <charconv>
#include <set>

#include "json.hpp"
#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {
namespace {

template <class... Words>
[[noreturn]] void broken(const Words&... words) {
  throw RuleError(said(words...));
}

const std::vector<Json>& objects(const Json& parent, const char* name) {
  static const std::vector<Json> none;
  const auto* listed = parent.find(name);
  if (listed == nullptr) return none;
  const auto is_object = [](const Json& item) { return item.kind == Json::Kind::object; };
  if (listed->kind != Json::Kind::list || !std::all_of(listed->items.begin(), listed->items.end(), is_object))
    broken("rank_table's ", name, " must be a list of objects");
  return listed->items;
}

std::int64_t rank_of(const Json& value) {
  if (value.integer) return *value.integer;
  std::int64_t rank = -1;
  const auto* end = value.text.data() + value.text.size();
  const auto [at, error] = std::from_chars(value.text.data(), end, rank);
  if (value.kind != Json::Kind::text || error != std::errc{} || at != end) broken("rank_table has rank_id '", value.text, "', which is no number");
  return rank;
}

std::string host_of(const Json& server) {  // host_ip, else server_id
  for (const char* name : {"host_ip", "server_id"}) {
    const auto* host = server.find(name);
    if (host == nullptr || host->kind == Json::Kind::null || (host->kind == Json::Kind::text && host->text.empty())) continue;
    if (host->kind != Json::Kind::text) broken("rank_table has a server whose ", name, " is no string");
    return host->text;
  }
  return "";
}

std::map<std::int64_t, std::string> hosts_of(const std::string& rank_table) {
  Json table;
  try {
    table = read_json(rank_table);
  } catch (const std::invalid_argument& error) {
    broken("rank_table is ", error.what());
  }
  if (table.kind != Json::Kind::object) broken("rank_table must be a JSON object");
  std::map<std::int64_t, std::string> hosts;
  for (const Json& server : objects(table, "server_list")) {
    const auto host = host_of(server);
    for (const Json& device : objects(server, "device"))
      if (const auto* rank = device.find("rank_id"); rank != nullptr && rank->kind != Json::Kind::null) hosts[rank_of(*rank)] = host;
  }
  return hosts;
}

}  // namespace

std::vector<Member> members_of(const std::string& rank_table, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& ranks) {
  const auto hosts = hosts_of(rank_table);
  std::vector<Member> members;
  std::set<std::string> servers;
  for (const auto& [cluster_id, rank] : ranks) {
    const auto found = hosts.find(rank);
    if (!hosts.empty() && found == hosts.end()) broken("rank ", rank, " of cluster ", cluster_id, " is not in rank_table");
    members.push_back({cluster_id, rank, hosts.empty() ? "" : found->second});
    servers.insert(members.back().host);
  }
  if (servers.size() > 1 && servers.contains("")) broken("rank_table has several servers, and one of them has neither host_ip nor server_id");
  for (Member& member : members)
    if (servers.size() == 1) member.host.clear();
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return std::pair(a.rank, a.cluster_id) < std::pair(b.rank, b.cluster_id); });
  return members;
}

}  // namespace llm_datadist::rules
