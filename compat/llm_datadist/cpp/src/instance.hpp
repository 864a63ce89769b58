// One initialised instance: a node of kvferry, and the book of its links. Does what the API's calls say, once their arguments
// are values of the standard library; what cannot be is an exception (see guarded() in llm_datadist.cpp).
//
// Life: made by Initialize, node open; ended by Finalize, which no other call is inside of.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "links.hpp"
#include "llm_datadist/llm_engine_types.h"
#include "node.hpp"
#include "rules.hpp"

namespace llm_datadist {

struct Refused : std::runtime_error {  // a call is answered with this status
  Refused(Status with, const std::string& why) : runtime_error(why), status(with) {}
  Status status;
};

// The status of an error of the core in a call of that sort (rules::status_of).
Status status_of(const kvferry::Error& error, std::string_view call);
// Its sentence, with what the core knows of peer, cache and operation.
std::string sentence_of(const kvferry::Error& error);

// A cluster of a call that links or unlinks.
struct Cluster {
  std::uint64_t id = 0;
  std::size_t local_addresses = 0;
  std::vector<std::pair<std::string, std::uint16_t>> remote;
};

class Instance {
 public:
  // Throws kvferry::Error and Refused.
  Instance(std::uint64_t cluster_id, const rules::EngineOptions& options);
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;
  // Also beside other calls, which are Kind::closed from then on. The destructor, which nothing runs beside, ends the rest.
  void end_transfers() noexcept;

  // The outcome of each cluster, in order; several are worked on at a time.
  std::vector<rules::Answer> link(const std::vector<Cluster>& clusters, std::int64_t timeout_ms);
  std::vector<rules::Answer> unlink(const std::vector<Cluster>& clusters, std::int64_t timeout_ms, bool force);
  void move_listener(const std::optional<rules::ListenAt>& wanted);

  std::int64_t register_cache(const CacheDesc& desc, const std::vector<std::uint64_t>& addresses);
  void unregister_cache(std::int64_t cache_id);
  Cache allocate(const CacheDesc& desc);
  void deallocate(std::int64_t cache_id);

  void pull_row(const CacheIndex& source, std::int64_t into, std::uint32_t row, std::int64_t size_bytes, const KvCacheExtParam& layers);
  void pull_blocks(const CacheIndex& source, std::int64_t into, const std::vector<std::uint64_t>& from, const std::vector<std::uint64_t>& to,
                   const KvCacheExtParam& layers);
  void push_row(const Cache& source, const CacheIndex& into, std::uint32_t row, const KvCacheExtParam& layers);
  void push_blocks(const Cache& source, const CacheIndex& into, const std::vector<std::uint64_t>& from, const std::vector<std::uint64_t>& to,
                   const KvCacheExtParam& layers);
  void copy_row(std::int64_t source, std::int64_t into, std::uint32_t source_row, std::uint32_t row, std::uint64_t offset, std::int64_t size);
  void copy_blocks(std::int64_t source, std::int64_t into, const std::vector<std::uint64_t>& from, const std::vector<std::vector<std::uint64_t>>& to);

 private:
  using Link = std::shared_ptr<kvferry::Link>;
  struct Facts {
    static bool alive(const Link& link) { return link->alive(); }
    static std::uint64_t peer_id(const Link& link) { return link->peer.node_id; }
    static const std::string& program(const Link& link) { return link->peer.program; }
  };

  Link link_to(std::uint64_t cluster_id);
  rules::Answer link_one(const Cluster& cluster, std::int64_t timeout_ms);
  rules::Answer unlink_one(const Cluster& cluster, std::int64_t timeout_ms, bool force);
  std::shared_ptr<std::mutex> dial_lock(std::uint64_t cluster_id);
  std::shared_ptr<kvferry::Cache> own(std::int64_t cache_id);
  kvferry::Target target(const Link& link, const CacheIndex& index, bool pushing);
  rules::Share* share_of(CachePlacement placement);
  void forget(std::int64_t cache_id);
  kvferry::Deadline deadline() const noexcept { return kvferry::Deadline::after_ms(options_.timeout_ms); }
  void listen(const rules::ListenAt& place);
  // `make_moves` is asked once there is a link.
  template <class MakeMoves>
  void pull(const CacheIndex& source, const kvferry::Cache& into, MakeMoves&& make_moves);
  template <class MakeMoves>
  void push(const Cache& source, const CacheIndex& into, MakeMoves&& make_moves);

  const rules::EngineOptions options_;
  kvferry::Node node_;
  std::mutex mutex_;  // of the next
  rules::LinkBook<Link, Facts> book_;
  std::optional<rules::ListenAt> listens_;
  std::map<std::uint64_t, std::shared_ptr<std::mutex>> dialling_;  // by cluster: a second call is told that it is linked
  std::mutex shares_mutex_;  // of the next
  std::optional<rules::Share> device_share_, host_share_;
  std::thread log_;
};

}  // namespace llm_datadist
