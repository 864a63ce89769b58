// Which status a vendor's caller sees for each kind of kvferry error. The numbers are the vendor's.
#include "rules.hpp"

namespace llm_datadist::rules {
namespace {

struct Row {
  std::string_view call, kind;
  std::uint32_t status;
};

constexpr Row by_kind[] = {
    {"", "invalid_argument", status::param_invalid},
    {"", "not_found", status::kv_cache_not_exist},
    {"", "not_linked", status::not_yet_link},
    {"", "already_linked", status::already_link},
    {"", "link_failed", status::link_failed},
    {"", "refused", status::link_failed},
    {"", "peer_lost", status::failed},
    {"", "deadline", status::timeout},
    {"", "cancelled", status::failed},
    {"", "closed", status::failed},
    {"", "busy", status::link_busy},
    {"", "out_of_memory", status::out_of_memory},
    {"", "address_in_use", status::failed},
    {"", "unsupported", status::feature_not_enabled},
    {"", "exists", status::param_invalid},
    {"", "internal", status::failed},
};

// The same kind means something else in some calls. On a finalized engine the vendor answers PARAM_INVALID for whatever
// names a cache and moves its bytes, FAILED for the rest.
constexpr Row by_call[] = {
    {"transfer", "closed", status::param_invalid},
    {"link", "peer_lost", status::link_failed},
    {"link", "not_found", status::link_failed},
    {"link", "busy", status::link_failed},  // no descriptors left; LINK_BUSY is about transfers
    {"unlink", "peer_lost", status::unlink_failed},
    {"unlink", "link_failed", status::unlink_failed},
    {"unlink", "not_linked", status::success},
    {"unlink", "busy", status::unlink_failed},
    {"listen", "invalid_argument", status::failed},  // an address that is not this machine's own
    {"listen", "link_failed", status::failed},
    {"listen", "busy", status::failed},  // no descriptors or threads left; LINK_BUSY is about transfers
    {"init", "busy", status::failed},
};

}  // namespace

std::uint32_t status_of(std::string_view kind, std::string_view call) {
  for (const Row& row : by_call)
    if (row.call == call && row.kind == kind) return row.status;
  for (const Row& row : by_kind)
    if (row.kind == kind) return row.status;
  return status::failed;
}

std::uint32_t overall(const std::vector<std::uint32_t>& statuses) {
  std::uint32_t last = statuses.empty() ? status::param_invalid : status::success;
  for (const auto one : statuses)
    if (one != status::success) last = one;
  return last;
}

std::vector<std::string_view> known_kinds() {
  std::vector<std::string_view> kinds;
  for (const Row& row : by_kind) kinds.push_back(row.kind);
  return kinds;
}

}  // namespace llm_datadist::rules
