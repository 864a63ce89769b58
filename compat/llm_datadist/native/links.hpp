// Which of a node's links belongs to which cluster, and what calls that link, unlink and transfer answer. A state machine: it
// dials nobody and closes nothing, and is not for several threads at once; who drives it does what it says, and tells it.
//
// A cluster has no link, one that a peer has opened (any door that links to it), or one that this side has opened. The link
// bears the id that the peer reports, not the one that was asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {

struct Answer {
  std::uint32_t status = status::success;
  std::string why;  // a sentence, unless it is a success
  bool ok() const noexcept { return status == status::success; }
};

// `Link` is a handle that can be copied and compared; `Facts` has alive(link), peer_id(link) and program(link).
template <class Link, class Facts>
class LinkBook {
 public:
  using Links = std::vector<Link>;  // those of the node, in the order in which they came up

  struct Found {
    Answer answer;
    std::optional<Link> link;
  };
  struct Parting {
    Answer answer;
    Links links;                 // to be ended
    bool tell_if_lost = false;   // a peer that took no leave must be told, or the entry stays
  };

  LinkBook(std::uint64_t cluster_id, const EngineOptions& options, bool needs_local_address)
      : cluster_id_(cluster_id), hixl_(options.hixl), program_(program_of(options.remote)), listen_(options.listen),
        needs_local_address_(needs_local_address && options.local_comm_res.empty()) {}

  const std::string& program() const noexcept { return program_; }
  void listens(std::optional<std::pair<std::string, std::uint32_t>> listen) { listen_ = std::move(listen); }

  // --- transfers

  // A link to the cluster that a transfer may take.
  Found to(std::uint64_t cluster, const Links& links) {
    auto link = alive(cluster, links);
    // Two processes of one cluster id may share caches, one process with itself may not.
    if (cluster == cluster_id_ && (!link || linked_to_itself_)) return {{status::param_invalid, said("cluster ", cluster, " is this one")}, {}};
    if (!link) return {{status::not_yet_link, said("there is no link to cluster ", cluster)}, {}};
    links_.insert_or_assign(cluster, *link);
    return {{}, link};
  }
  // The same, as long as nothing has changed since: what to() has found, or nothing.
  std::optional<Link> known(std::uint64_t cluster) const {
    const auto found = links_.find(cluster);
    if (cluster == cluster_id_ || found == links_.end() || !Facts::alive(found->second)) return std::nullopt;
    return found->second;
  }
  std::optional<Link> alive(std::uint64_t cluster, const Links& links) const {
    if (const auto ours = links_.find(cluster); ours != links_.end() && Facts::alive(ours->second)) return ours->second;
    std::optional<Link> newest;
    for (const auto& link : links)
      if (Facts::peer_id(link) == cluster && Facts::alive(link) && !is_of_the_other_mode(link)) newest = link;
    return newest;
  }
  // Whether the peer addresses caches differently. Such links are ended by whoever asked for them.
  bool is_of_the_other_mode(const Link& link) const {
    const std::string program = Facts::program(link);
    return program.starts_with(program_name) && program != program_;
  }

  // --- linking

  // Before the cluster is dialled.
  Answer may_dial(std::uint64_t cluster, std::size_t local_addresses, std::size_t remote_addresses, const Links& links) {
    if (remote_addresses != 1) return {status::param_invalid, said(remote_addresses, " remote addresses are given, not 1")};
    if (needs_local_address_ && local_addresses != 1) return {status::param_invalid, said(local_addresses, " local addresses are given, not 1")};
    needs_local_address_ = false;
    if (is_linked(cluster, links)) return {status::already_link, said("cluster ", cluster, " is linked already")};
    return {};
  }
  // A link has come up at that address. Not a success: it is to be closed.
  Answer dialled(const Link& link, const std::string& host, std::uint32_t port) {
    if (is_of_the_other_mode(link))
      return {status::param_invalid, said("this side has ", program_, ", the other ", Facts::program(link), ": configure both alike")};
    const auto peer = Facts::peer_id(link);
    if (const auto before = opened_.find(peer); before != opened_.end() && Facts::alive(before->second))
      return {status::already_link, said("cluster ", peer, " is linked already")};
    opened_.insert_or_assign(peer, link);
    links_.insert_or_assign(peer, link);
    linked_to_itself_ |= peer == cluster_id_ && is_own_address(host, port);
    return {};
  }
  // With the hixl backend each side links for itself; a link that the peer opened serves both.
  bool adopt(std::uint64_t cluster, const Links& links) {
    const auto link = hixl_ ? alive(cluster, links) : std::nullopt;
    if (!link) return false;
    opened_.insert_or_assign(cluster, *link);
    links_.insert_or_assign(cluster, *link);
    return true;
  }
  void keep(std::uint64_t cluster, const Link& link) { links_.insert_or_assign(cluster, link); }
  bool has_opened(std::uint64_t cluster) const { return opened_.contains(cluster); }

  // --- unlinking

  Parting parting(std::uint64_t cluster, std::size_t remote_addresses, bool force, const Links& links) const {
    Parting out;
    for (const auto& link : links)
      if (Facts::peer_id(link) == cluster) out.links.push_back(link);
    if (const auto known = links_.find(cluster); known != links_.end() && std::find(out.links.begin(), out.links.end(), known->second) == out.links.end())
      out.links.push_back(known->second);
    out.tell_if_lost = !force && !hixl_ && !out.links.empty();
    if (out.tell_if_lost && remote_addresses != 1) {
      out.answer = {status::param_invalid, said(remote_addresses, " remote addresses are given, not 1")};
      out.links.clear();
    }
    return out;
  }
  // All that parting() named has been ended.
  void parted(std::uint64_t cluster) {
    forget(cluster);
    opened_.erase(cluster);
    linked_to_itself_ &= cluster != cluster_id_;
  }
  void forget(std::uint64_t cluster) { links_.erase(cluster); }
  void clear() {
    links_.clear();
    opened_.clear();
  }

 private:
  // With the hixl backend a link counts for the side that opened it alone.
  bool is_linked(std::uint64_t cluster, const Links& links) const {
    if (!hixl_) return alive(cluster, links).has_value();
    const auto opened = opened_.find(cluster);
    return opened != opened_.end() && Facts::alive(opened->second);
  }
  bool is_own_address(const std::string& host, std::uint32_t port) const {
    const auto here = [](const std::string& address) { return address.starts_with("127.") || address.starts_with("0.0.0.0") || address == "::1" || address == "::"; };
    return listen_ && listen_->second == port && (host == listen_->first || (here(host) && here(listen_->first)));
  }

  std::uint64_t cluster_id_;
  bool hixl_;
  std::string program_;
  std::optional<std::pair<std::string, std::uint32_t>> listen_;
  bool needs_local_address_;
  bool linked_to_itself_ = false;
  std::map<std::uint64_t, Link> links_;   // the newest that was seen alive, whoever opened it
  std::map<std::uint64_t, Link> opened_;  // opened by this side
};

}  // namespace llm_datadist::rules
