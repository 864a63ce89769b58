// Serving a peer's requests: a server lane reads them one after the other; what takes longer than an answer is an
// operation of its own (Send for a stream, Receive for a push), during which nothing more is read from that lane.
#pragma once

#include "pull.hpp"

namespace kvferry {

class ServerLane : public Watcher, public std::enable_shared_from_this<ServerLane> {
 public:
  // Opened by the peer; `read` is what came with its lane hello.
  ServerLane(Engine& engine, std::shared_ptr<Link> link, Descriptor descriptor, FrameBuffer read);
  // Opened by this side for the peer to ask on: `first` goes out before anything else; `lost` is called once, on the
  // control thread, when the lane is gone, and hears whether anything was ever asked on it.
  ServerLane(Engine& engine, std::shared_ptr<Link> link, Descriptor descriptor, std::vector<std::uint8_t> first,
             std::function<void(bool used)> lost);
  void start();
  void close() noexcept;  // from any thread: shuts the socket; the rest happens on the control thread
  void ready(std::uint32_t events) override;

  int descriptor() const noexcept { return descriptor_.get(); }
  void watch_for(std::uint32_t events);           // for the operation in hand
  void answer(std::vector<std::uint8_t> frame, int attached = -1);
  void operation_ended(bool whole) noexcept;      // whole: the lane is at a frame's end and goes on

 private:
  void handle(Frame& frame);
  void on_resolve(const Frame& frame);
  void on_pull(const Frame& frame);
  Resolved offered(const Target& target) const;  // what a push of this process's memory has to give
  void on_push(const Frame& frame);
  void on_consume(const Frame& frame);
  void on_fetch_segment(const Frame& frame);
  void on_segment_made(Frame& frame);
  void run(const std::shared_ptr<Operation>& operation, bool here);
  void answer_ended(std::uint64_t operation, const Outcome& outcome, std::uint64_t bytes = 0, Transport transport = Transport::none);
  bool flush();
  void drop() noexcept;

  Engine& engine_;
  const std::shared_ptr<Link> link_;
  Descriptor descriptor_;
  Reactor::Token token_ = 0;
  FrameBuffer in_;
  std::vector<std::uint8_t> out_;
  std::size_t out_sent_ = 0;
  std::function<void(bool used)> lost_;
  std::mutex mutex_;
  std::shared_ptr<Operation> operation_;  // in hand; mutex_
  bool starting_ = false;
  bool receiving_ = false;  // it is a push: only the peer's going away matters
  std::atomic<bool> armed_for_reading_{false};
  bool went_on_ = false;    // control thread: the request in hand left an operation running
  bool used_ = false;       // control thread: something was asked
  bool dropped_ = false;
};

// Frames that both directions use.
std::vector<std::uint8_t> ended_frame(std::uint64_t operation, const Outcome& outcome, std::uint64_t bytes, Transport transport,
                                      std::uint16_t flags = 0, const std::vector<std::uint64_t>& checksums = {});
// What a target stands for, as its owner says it: the body of a GEOMETRY.
void put_resolved(wire::Writer& out, const Resolved& resolved);
std::shared_ptr<Source> get_resolved(wire::Reader& in, const Target& target);
struct Ended {
  Outcome outcome;
  std::uint64_t bytes = 0;
  Transport transport = Transport::none;
  std::vector<std::uint64_t> checksums{};
};
Ended read_ended(const Frame& frame);

}  // namespace kvferry
