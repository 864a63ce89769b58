// A node: the core's front. Caches and windows of this process, its listener, its links, and the transfers over them.
//
// Every method may be called from any thread. Once closed (or in a forked child) every method but close() throws
// Error(closed). Operations report by Result or throw Error with peer, cache and operation filled in.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ask.hpp"
#include "calls.hpp"
#include "pull.hpp"
#include "push.hpp"

namespace kvferry {

class NodeInner;

struct LinkStatistics {
  std::string peer, address, map, cma, socket;  // "ok", or why not and what to change
  std::uint64_t peer_id = 0, pulls = 0, pushes = 0, bytes_pulled = 0, bytes_pushed = 0, failures = 0, resets = 0;
  bool alive = false, outgoing = false, same_host = false;
  unsigned lanes = 0;
  std::size_t operations = 0;
};

struct NodeStatistics {
  std::uint64_t node_id = 0, pool_bytes = 0, pool_used_bytes = 0;
  std::size_t threads = 0, caches = 0, windows = 0, links = 0, slots_open = 0;
};

class Node {
 public:
  explicit Node(NodeOptions options);
  ~Node();  // closes
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  std::uint64_t id() const noexcept;
  bool closed() const noexcept;
  // Ends everything, waits for pieces in hand, joins the threads. Error(busy) where the kernel holds a copy in the memory of
  // a cache: all else has ended, and close() again says when that memory is free.
  void close();

  Endpoint listen(const std::string& host, std::uint16_t port);
  Endpoint listen_unix(const std::string& path);  // a socket in the file system, at an absolute path
  void stop_listening();
  std::shared_ptr<Link> connect(const std::string& host, std::uint16_t port, Deadline deadline, bool replace = true);
  std::shared_ptr<Link> connect_unix(const std::string& path, Deadline deadline, bool replace = true);
  std::vector<std::shared_ptr<Link>> links() const;
  // Graceful: waits for this side's operations, asks the peer, drops both sides; Error(deadline | cancelled) leaves the link up
  // on both sides, also if the peer hears of it later. Meanwhile operations that have not begun are refused with Error(not_linked),
  // and those that the peer asks for. Forced: drops this side; operations end after the piece in hand.
  void unlink(const std::shared_ptr<Link>& link, Deadline deadline, bool force);
  std::optional<std::pair<std::string, std::string>> next_event(std::int64_t timeout_ms);

  Registry& registry();  // throws Error(closed)
  Engine& engine();

  // A side without a cache id is this process's memory, by spans.
  std::shared_ptr<Pull> pull(const std::shared_ptr<Link>& link, Target target, std::optional<std::uint64_t> into, std::shared_ptr<const Moves> moves,
                             Deadline deadline, unsigned transports,
                             std::string_view resolution = {});
  // The whole of a pull, which throws if it fails. One that is small and needs no answer from anybody goes without all that an
  // operation takes which others may wait for, cancel or hear of.
  void pull_now(const std::shared_ptr<Link>& link, Target target, std::uint64_t into, std::shared_ptr<const Moves> moves, Deadline deadline,
                unsigned transports);
  // What `window` stands for, in bytes that a peer may be told in any way, and gives to pull() as `resolution`.
  std::string resolution(const std::string& window);
  std::shared_ptr<Push> push(const std::shared_ptr<Link>& link, std::optional<std::uint64_t> source, Target target, std::shared_ptr<const Moves> moves,
                             Deadline deadline, unsigned transports);
  std::shared_ptr<LayerPush> push_layers(const std::shared_ptr<Link>& link, std::uint64_t source, Target target,
                                         std::shared_ptr<const Moves> moves, std::vector<std::uint32_t> layers,
                                         std::vector<std::uint32_t> destination_layers, std::uint32_t tensors_per_layer,
                                         std::int64_t timeout_ms, unsigned transports);
  std::shared_ptr<PreparedPull> prepare(const std::shared_ptr<Link>& link, Target target, std::uint64_t into,
                                        std::shared_ptr<const Moves> moves, Deadline deadline, unsigned transports);
  // A call (ask.hpp) over a link: `message` is the caller's and stays until the operation has ended, or it is its own.
  std::shared_ptr<Ask> ask(const std::shared_ptr<Link>& link, std::span<const std::uint8_t> message, Deadline deadline);
  std::shared_ptr<Ask> ask(const std::shared_ptr<Link>& link, Payload message, Deadline deadline, bool one_way);
  void serve_calls();                        // peers' calls wait for next_call() from now on; until then they hear Unsupported
  CallEvent next_call(const Deadline& until);  // serves; throws Error(closed) when the node is closed meanwhile, too
  // What a target is at the peer, and by which transport a pull of it would go.
  std::pair<std::shared_ptr<const Source>, Transport> describe(const std::shared_ptr<Link>& link, Target target, Deadline deadline);
  // Between two caches of this node. Within one cache unit by unit in the given order.
  // A side is named by id, or by addresses: memory of this process that is not registered, which the caller keeps meanwhile.
  // `offset_bytes`: how far into its row each side begins.
  Result copy(const Target& source, const Target& destination, const Moves& moves, std::uint64_t offset_bytes = 0);
  Result copy(std::uint64_t source, std::uint64_t destination, const Moves& moves);

  LinkStatistics statistics(const Link& link) const;
  NodeStatistics statistics() const;

 private:
  std::unique_ptr<NodeInner> inner_;
  std::uint32_t generation_;
};

// Throws the Error of a result that is not ok, with peer, cache and operation; else returns it.
const Result& checked(const Operation& operation, const Result& result);

}  // namespace kvferry
