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
  if (value.kind != Json::Kind::text || error != std::errc{} || at != end) broken("rank_table has a rank_id that is no whole number", value.kind == Json::Kind::text ? ": '" + value.text + "'" : "");
  return rank;
}

std::string text_of(const Json& object, const char* name) {  // "" without it
  const auto* text = object.find(name);
  if (text == nullptr || text->kind == Json::Kind::null) return "";
  if (text->kind != Json::Kind::text) broken("rank_table has a ", name, " that is no string");
  return text->text;
}

bool is_number(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return '0' <= c && c <= '9'; });
}

struct Place {
  std::string server;  // what tells servers apart
  std::string host;    // "" if it is not known
};

std::map<std::int64_t, Place> places_of(const std::string& rank_table) {
  Json table;
  try {
    table = read_json(rank_table);
  } catch (const std::invalid_argument& error) {
    broken("rank_table is ", error.what());
  }
  if (table.kind != Json::Kind::object) broken("rank_table must be a JSON object");
  std::map<std::int64_t, Place> places;
  for (const Json& server : objects(table, "server_list")) {
    const auto id = text_of(server, "server_id"), ip = text_of(server, "host_ip");
    const auto host = !ip.empty() ? ip : is_number(id) ? "" : id;  // a mere number leads nowhere
    for (const Json& device : objects(server, "device"))
      if (const auto* rank = device.find("rank_id"); rank != nullptr && rank->kind != Json::Kind::null)
        places[rank_of(*rank)] = {host.empty() ? id : host, host.empty() ? text_of(device, "device_ip") : host};
  }
  return places;
}

}  // namespace

std::vector<Member> members_of(const std::string& rank_table, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& ranks) {
  const auto places = places_of(rank_table);
  std::vector<Member> members;
  std::set<std::string> servers;
  bool all_known = true;
  for (const auto& [cluster_id, rank] : ranks) {
    const auto found = places.find(rank);
    if (!places.empty() && found == places.end()) broken("rank ", rank, " of cluster ", cluster_id, " is not in rank_table");
    const auto place = places.empty() ? Place{} : found->second;
    members.push_back({cluster_id, rank, place.host});
    servers.insert(place.server);
    all_known = all_known && !place.host.empty();
  }
  if (servers.size() > 1 && !all_known) broken("rank_table has several servers, and one of them has no host_ip, no server_id that is an address, and no device_ip");
  for (Member& member : members)
    if (servers.size() == 1) member.host.clear();
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return std::pair(a.rank, a.cluster_id) < std::pair(b.rank, b.cluster_id); });
  return members;
}

}  // namespace llm_datadist::rules
