// A link without a peer: an engine, a link whose lanes are socket pairs that end in the test, and operations whose steps
// the test writes.
#pragma once

#include <functional>

#include "ends.hpp"
#include "nodes.hpp"

namespace kvferry::testing {

struct Alone {
  Engine engine;
  std::mutex mutex;
  std::vector<Descriptor> far_ends;  // of the lanes that were dialled
  std::atomic<int> dialled{0};
  std::atomic<bool> unreachable{false};
  std::shared_ptr<Link> link;

  explicit Alone(unsigned lanes = 2, unsigned threads = 2)
      : engine(options(1, any_transport, lanes), threads, threads, [this](std::int64_t now) { return tick(now); }) {
    link = new_link();
    engine.crew.start();
    engine.reactor.start();
  }
  ~Alone() {
    link->take_down({Kind::closed, "the test is over", false, true});
    CHECK(link->wait_until_quiet(Deadline::after_ms(2000)));
    engine.reactor.stop();
    engine.crew.stop();
  }
  std::shared_ptr<Link> new_link() {
    PeerFacts nobody;
    return std::make_shared<Link>(engine, 1, std::move(nobody), true, std::array<std::uint8_t, 16>{}, [this](LaneUse use) { return dial(use); });
  }
  std::unique_ptr<Lane> dial(LaneUse use) {
    if (unreachable) return nullptr;
    Ends ends;
    auto lane = std::make_unique<Lane>();
    lane->descriptor = std::move(ends.here);
    lane->use = use;
    const std::lock_guard lock(mutex);
    far_ends.push_back(std::move(ends.there));
    ++dialled;
    return lane;
  }
  std::int64_t tick(std::int64_t now) {
    std::int64_t next = INT64_MAX;
    for (const auto& operation : engine.timers.due(now, next)) operation->schedule();
    return next;
  }
};

class Scripted : public Operation {
 public:
  using Script = std::function<Need(Scripted&)>;
  Scripted(Alone& alone, Script script, std::int64_t timeout_ms = 5000)
      : Operation(alone.engine, alone.link, Deadline::after_ms(timeout_ms), "script"), script_(std::move(script)) {}

  using Operation::break_lane;
  using Operation::give_lane;
  using Operation::must_stop;
  using Operation::stop_reason;
  using Operation::take_lane;
  void end(Outcome outcome = {}, std::uint64_t bytes = 0) { finish(std::move(outcome), bytes, Transport::local); }
  Lane* lane() { return lane_.get(); }
  std::atomic<int> steps{0}, ends{0}, drivers{0};
  std::atomic<bool> flag{false}, of_another{false};

 protected:
  bool part_of_another() const noexcept override { return of_another; }
  Need step() override {
    CHECK(++drivers == 1);
    struct Leave {
      Scripted& self;
      ~Leave() { --self.drivers; }
    } leave{*this};
    ++steps;
    if (must_stop()) throw Error(stop_reason());
    return script_(*this);
  }
  void ended() noexcept override {
    CHECK(!done());
    ++ends;
  }

 private:
  Script script_;
};

inline std::shared_ptr<Scripted> script(Alone& alone, Scripted::Script steps, std::int64_t timeout_ms = 60'000) {
  return std::make_shared<Scripted>(alone, std::move(steps), timeout_ms);
}

}  // namespace kvferry::testing
