// Pushes, seen from the pusher: a request to the receiver to pull, which it carries out while the push's guard slot stands.
//
// Push sends one request. LayerPush sends one for each layer, in the order of its list, when that layer is declared ready.
// Ending a push, in whatever way, ends its guard slot first: later reads on its behalf fail.
#pragma once

#include <set>

#include "link.hpp"

namespace kvferry {

struct PushAsk {
  std::shared_ptr<Cache> source;
  Target target;
  std::shared_ptr<const Moves> moves;
  unsigned transports = 7;
};

class Push : public Operation {
 public:
  Push(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, PushAsk ask);
  ~Push() override;
  std::string subject() const override { return ask_.source->geometry.label(); }

 protected:
  Need step() override;
  void ended() noexcept override;

  // One request over a lane and its answer, before the deadline. Done: the receiver has carried it out.
  Need converse(const Target& target, const TensorRange& source, const TensorRange& destination);
  bool before_request() override;
  void end_guard() noexcept;
  bool of_memory() const noexcept { return ask_.source->geometry.layout == Layout::memory; }
  [[noreturn]] void give_up(Outcome why);  // the receiver may still be writing, unless it is known to be dead

  PushAsk ask_;
  Guard guard_;  // from the first request on
  std::vector<std::uint64_t> check_too_;  // addresses that later requests will name: checked with the first
  std::uint64_t bytes_ = 0;
  Transport transport_ = Transport::none;
  bool asked_ = false;  // the receiver may have begun
  std::optional<FrameBuffer> in_;
};

class LayerPush : public Push {
 public:
  // layers[i] of the source to destination_layers[i]; by addresses: `tensors_per_layer` addresses for each listed layer.
  LayerPush(Engine& engine, std::shared_ptr<Link> link, PushAsk ask, std::vector<std::uint32_t> layers,
            std::vector<std::uint32_t> destination_layers, std::uint32_t tensors_per_layer, std::int64_t timeout_ms);
  void layer_ready(std::uint32_t layer);  // throws Error(invalid_argument) for a layer that is not in the list

 protected:
  Need step() override;
  bool goes_on_alone() const noexcept override { return false; }  // nobody could declare its layers ready

 private:
  std::vector<std::uint32_t> layers_, destination_layers_;
  std::uint32_t tensors_per_layer_;
  std::int64_t timeout_ms_;
  std::mutex ready_mutex_;
  std::vector<std::int64_t> ready_ns_;  // per listed layer; 0: not yet
  std::size_t next_ = 0;
};

}  // namespace kvferry
