// What is asked of many threads at once, and what ends while others use it: a success always has the right bytes, and
// nothing is written after an end.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "nodes.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static Shape raced(std::string name, std::size_t tensors = 2, std::size_t count = 8, std::size_t unit_bytes = 4096) {
  return {std::move(name), tensors, count, unit_bytes, 0, Layout::mixed, true};
}

// For a while, and longer where a sanitizer makes everything slow, until both sides have won sometimes.
struct Contest {
  std::atomic<int> good{0}, gone{0};
  bool undecided() const { return !enough.passed() || ((good < 3 || gone < 3) && !latest.passed()); }
  int hold_us(unsigned random, int most) const {  // longer, until some have come in time on however busy a machine
    return static_cast<int>(random % static_cast<unsigned>(good > 3 ? most : enough.passed() ? 200 * most : 20 * most));
  }
  void check(const char* what) const {
    std::printf("%s: %d came in time, %d too late\n", what, good.load(), gone.load());
    CHECK(good >= 3 && gone >= 3);
  }
  const Deadline enough = Deadline::after_ms(250), latest = Deadline::after_ms(60'000);
};

static void many_threads_move_at_once() {
  Pair pair;
  pair.make_pools(32 << 20);
  struct Side {
    Node& node;
    std::shared_ptr<Link> link;
    std::shared_ptr<Cache> source;  // what the other side pulls from
  };
  Side sides[2] = {{*pair.here, pair.link, allocated(pair.here->registry(), {"kv", 4, 64, 8192})},
                   {*pair.there, pair.back, allocated(pair.there->registry(), {"kv", 4, 64, 8192})}};
  fill(*sides[0].source, 1), fill(*sides[1].source, 2);
  std::atomic<int> moved{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      Side &mine = sides[seed % 2], &other = sides[1 - seed % 2];
      const std::uint64_t their_tag = 2 - seed % 2, my_tag = 1 + seed % 2;
      Owned to(mine.node.registry(), {"", 4, 64, 8192}), theirs(other.node.registry(), {"", 4, 64, 8192});
      const std::shared_ptr<PreparedPull> prepared =
          mine.node.prepare(mine.link, by_name("kv"), to.id(), blocks({9}, {1}), Deadline::after_ms(5000), any_transport);
      for (int i = 0; i < 40; ++i) {
        const unsigned transports = 1u << random() % 3;
        const auto deadline = Deadline::after_ms(20'000);
        switch (random() % 6) {
          case 0: {
            const auto result = pulled(mine.node, mine.link, by_name("kv"), *to.cache, whole(), transports, 20'000);
            if (!result.outcome.ok()) CHECK_ENDS(Kind::ok, "", result);
            CHECK(holds_all(*to.cache, their_tag));
            break;
          }
          case 1: {
            const auto result = pushed(mine.node, mine.link, *mine.source, by_id(theirs.id()), whole(), transports, 20'000);
            if (!result.outcome.ok()) CHECK_ENDS(Kind::ok, "", result);
            CHECK(holds_all(*theirs.cache, my_tag));
            break;
          }
          case 2: {
            const auto a = random() % 32, b = 32 + random() % 32;
            const auto pull = mine.node.pull(mine.link, by_id(other.source->geometry.cache_id), to.id(),
                                             blocks({static_cast<std::int64_t>(a)}, {static_cast<std::int64_t>(b)}), deadline, transports);
            pull->start();
            CHECK(pull->wait(deadline) && pull->result().outcome.ok());
            CHECK(holds(*to.cache, 3, b, their_tag, 3, a));
            break;
          }
          case 3: {
            const auto push = mine.node.push_layers(mine.link, mine.source->geometry.cache_id, by_id(theirs.id()), blocks({5, 6}, {7, 8}),
                                                    {1, 0}, {0, 1}, 2, 20'000, transports);
            push->start();
            push->layer_ready(0), push->layer_ready(1);
            CHECK(push->wait(deadline));
            CHECK_ENDS(Kind::ok, "", push->result());
            CHECK(holds(*theirs.cache, 0, 8, my_tag, 2, 6) && holds(*theirs.cache, 3, 7, my_tag, 1, 5));
            break;
          }
          case 4:
            CHECK(prepared->operation(deadline)->run_here().outcome.ok() && holds(*to.cache, 2, 1, their_tag, 2, 9));
            break;
          default:
            CHECK_ENDS(Kind::not_found, "nothing", pulled(mine.node, mine.link, by_name("nothing"), *to.cache, whole(), transports));
        }
        ++moved;
      }
      mine.node.registry().remove(to.id());
      other.node.registry().remove(theirs.id());
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(moved == 320);
  CHECK(eventually([&] { return pair.link->operations() == 0 && pair.back->operations() == 0; }));
  CHECK(pair.here->statistics(*pair.link).resets == 0 && pair.there->statistics(*pair.back).resets == 0);
  CHECK(pair.here->statistics().slots_open == 1 && pair.there->statistics().slots_open == 1);
}

// The owner fills a block, opens a window, closes it and fills the block with something else, while others pull through
// it: whoever succeeds has the window's bytes.
static void a_pull_through_a_closing_window_gets_its_bytes_or_an_error() {
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    Pair pair;
    pair.make_pools();
    auto& registry = pair.there->registry();
    Owned owned(registry, raced("kv", 2, 6, 64 << 10));
    const auto pool = allocated(registry, {"pool", 2, 6, 64 << 10});
    const Cache& source = transports == by_map ? *pool : *owned.cache;  // a socket's thread reads what the test writes
    std::mutex mutex;
    std::string name;
    std::uint64_t tag = 0;
    std::atomic<bool> stop{false};
    Contest contest;
    std::vector<std::thread> pullers;
    for (int i = 0; i < 2; ++i) {
      pullers.emplace_back([&] {
        Owned into(pair.here->registry(), {"", 2, 6, 64 << 10});
        while (!stop) {
          Target target;
          std::uint64_t expected;
          {
            const std::lock_guard lock(mutex);
            target = by_window(name);
            expected = tag;
          }
          const auto result = pulled(*pair.here, pair.link, target, *into.cache, blocks({1, 2, 3, 4}, {4, 3, 2, 1}), transports);
          if (result.outcome.ok()) {
            ++contest.good;
            for (std::size_t unit = 1; unit < 5; ++unit) CHECK(holds(*into.cache, 1, unit, expected, 1, 5 - unit));
          } else {
            ++contest.gone;
            if (result.outcome.kind != Kind::not_found) CHECK_ENDS(Kind::not_found, "", result);
          }
        }
        pair.here->registry().remove(into.id());
      });
    }
    std::mt19937 random(3);
    for (std::uint64_t round = 0; contest.undecided(); ++round) {
      fill(source, 1 + round % 100);
      const Numbers units{1, 2, 3, 4};
      const auto window = registry.open_window(source.geometry.cache_id, units.data(), 4, Access::read, 10'000);
      {
        const std::lock_guard lock(mutex);
        name = window->name;
        tag = 1 + round % 100;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(contest.hold_us(random(), 1500)));
      CHECK(registry.close_window(window->name));
    }
    stop = true;
    for (auto& thread : pullers) thread.join();
    contest.check("pulls through windows");
    CHECK(pair.here->statistics(*pair.link).map == "ok" && pair.here->statistics(*pair.link).cma == "ok");
  }
}

// The same of pulls that go at once, from blocks whose owner fills them with something else when it has closed the window, or has
// unregistered the cache.
static void small_pulls_at_once_get_what_stood_or_an_error() {
  for (const unsigned transports : {by_map, by_cma}) {
    for (const bool whole_cache : {false, true}) {
      Pair pair;
      pair.make_pools();
      auto& registry = pair.there->registry();
      std::mutex mutex;
      Target target = by_id(77);  // none yet
      std::uint64_t tag = 0;
      std::atomic<bool> stop{false};
      Contest contest;
      std::vector<std::thread> pullers;
      for (const bool prepared : {false, true}) {
        pullers.emplace_back([&, prepared] {
          Owned into(pair.here->registry(), {"", 2, 6, 4096});
          while (!stop) {
            Target now;
            std::uint64_t expected;
            {
              const std::lock_guard lock(mutex);
              now = target;
              expected = tag;
            }
            const auto moves = blocks({1, 2, 3, 4}, {4, 3, 2, 1});
            const auto deadline = Deadline::after_ms(20'000);
            const auto kind = kind_of([&] {
              const auto again = prepared ? pair.here->prepare(pair.link, now, into.id(), moves, deadline, transports) : nullptr;
              for (int i = 0; i < 20; ++i) {
                if (!again) pair.here->pull_now(pair.link, now, into.id(), moves, deadline, transports);
                else if (const auto result = again->run_here(deadline); !result.outcome.ok()) throw Error(result.outcome);
                ++contest.good;
                for (std::size_t unit = 1; unit < 5; ++unit) CHECK(holds(*into.cache, 1, unit, expected, 1, 5 - unit));
              }
            });
            if (kind == Kind::ok) continue;
            ++contest.gone;
            CHECK(kind == Kind::not_found);
          }
        });
      }
      std::mt19937 random(9);
      const auto wait = [&] { std::this_thread::sleep_for(std::chrono::microseconds(contest.hold_us(random(), 500))); };
      const auto publish = [&](Target now, std::uint64_t its_tag) {
        const std::lock_guard lock(mutex);
        target = std::move(now), tag = its_tag;
      };
      // Of memory of its owner's that is unregistered and filled anew, or a part of a cache that stays.
      Owned memory(registry, raced("", 2, 6, 4096));
      const auto pool = allocated(registry, {"pool", 2, 6, 4096});
      const Cache& source = transports == by_map ? *pool : *memory.cache;
      for (std::uint64_t round = 0; contest.undecided(); ++round) {
        const auto its_tag = 1 + round % 100;
        if (whole_cache && transports == by_map) {
          const auto cache = allocated(registry, {"", 2, 6, 4096});
          fill(*cache, its_tag);
          publish(by_id(cache->geometry.cache_id), its_tag);
          wait();
          CHECK(registry.deallocate(cache->geometry.cache_id));  // the next one may lie there
        } else if (whole_cache) {
          fill(source, its_tag);
          auto geometry = source.geometry;
          const auto cache = registry.add(std::move(geometry), host_kind, {});
          publish(by_id(cache->geometry.cache_id), its_tag);
          wait();
          CHECK(registry.remove(cache->geometry.cache_id));
        } else {
          fill(source, its_tag);
          const Numbers units{1, 2, 3, 4};
          const auto window = registry.open_window(source.geometry.cache_id, units.data(), 4, Access::read, 10'000);
          publish(by_window(window->name), its_tag);
          wait();
          CHECK(registry.close_window(window->name));
        }
      }
      stop = true;
      for (auto& thread : pullers) thread.join();
      contest.check("small pulls at once");
      CHECK(pair.here->statistics(*pair.link).map == "ok" && pair.here->statistics(*pair.link).cma == "ok");
    }
  }
}

// Once a window for writing is closed nothing is written through it, however far a push has got.
static void a_push_through_a_closing_window_writes_nothing_after_it() {
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    Pair pair;
    pair.make_pools();
    const auto pool = allocated(pair.here->registry(), {"", 2, 8, 256 << 10});
    Owned owned(pair.here->registry(), {"", 2, 8, 256 << 10});
    const Cache& from = transports == by_map ? *pool : *owned.cache;
    Owned to(pair.there->registry(), raced("kv", 2, 8, 256 << 10));
    fill(from, 5);
    std::mutex mutex;
    std::string name = "none yet";
    std::atomic<bool> stop{false};
    Contest contest;
    std::thread pusher([&] {
      while (!stop) {
        Target target;
        {
          const std::lock_guard lock(mutex);
          target = by_window(name);
        }
        const auto result = pushed(*pair.here, pair.link, from, target, whole(), transports);
        result.outcome.ok() ? ++contest.good : ++contest.gone;
        if (!result.outcome.ok() && result.outcome.kind != Kind::not_found) CHECK_ENDS(Kind::not_found, "", result);
      }
    });
    std::mt19937 random(4);
    while (contest.undecided()) {
      const Numbers units{0, 1, 2, 3, 4, 5, 6, 7};
      const auto window = pair.there->registry().open_window(to.id(), units.data(), 8, Access::write, 10'000);
      {
        const std::lock_guard lock(mutex);
        name = window->name;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(contest.hold_us(random(), 3000)));
      CHECK(pair.there->registry().close_window(window->name));
      for (std::size_t unit = 0; unit < 8; ++unit) write_unit(*to.cache, 1, unit, 9);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      for (std::size_t unit = 0; unit < 8; ++unit) CHECK(holds(*to.cache, 1, unit, 9, 1, unit));
    }
    stop = true;
    pusher.join();
    contest.check("pushes through windows");
  }
}

// Caches are unregistered while two peers pull from them; then their memory holds something else.
static void unregistering_races_with_pulls() {
  for (const unsigned transports : {by_cma, by_socket}) {
    Pair pair;
    Node third(options(3));
    const auto at = pair.link->peer.endpoint;
    const auto third_link = third.connect(at.host, at.port, Deadline::after_ms(5000));
    std::atomic<bool> stop{false};
    Contest contest;
    const auto pull_on = [&](Node& node, const std::shared_ptr<Link>& link) {
      Owned into(node.registry(), {"", 2, 4, 128 << 10});
      while (!stop) {
        const auto result = pulled(node, link, by_name("kv"), *into.cache, whole(), transports);
        if (result.outcome.ok()) {
          ++contest.good;
          CHECK(holds_all(*into.cache, 7));
        } else {
          ++contest.gone;
          if (result.outcome.kind != Kind::not_found) CHECK_ENDS(Kind::not_found, "", result);
        }
      }
      node.registry().remove(into.id());
    };
    std::thread first([&] { pull_on(*pair.here, pair.link); });
    std::thread second([&] { pull_on(third, third_link); });
    std::mt19937 random(5);
    while (contest.undecided()) {
      auto cache = std::make_unique<Owned>(pair.there->registry(), raced("", 2, 4, 128 << 10));
      fill(*cache->cache, 7);
      pair.there->registry().remove(cache->id());
      Geometry geometry = cache->cache->geometry;
      geometry.name = "kv";
      const auto named = pair.there->registry().add(geometry, host_kind, {});  // seen only when it is filled
      std::this_thread::sleep_for(std::chrono::microseconds(contest.hold_us(random(), 2000)));
      CHECK(pair.there->registry().remove(named->geometry.cache_id));
      fill(*named, 8);
      if (random() % 2 == 0) cache.reset();  // and the memory is unmapped
    }
    stop = true;
    first.join();
    second.join();
    contest.check("pulls of what is unregistered");
    CHECK(pair.here->statistics(*pair.link).cma == "ok");
  }
}

// A pull ends (deadline, cancel, destination unregistered) in the middle: from then on its destination is its caller's.
static void nothing_is_written_after_the_end() {
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    Pair pair;
    pair.make_pools();
    const auto pool = allocated(pair.there->registry(), {"pool", 2, 8, 256 << 10});
    Owned owned(pair.there->registry(), {"owned", 2, 8, 256 << 10});
    const auto target = by_name(transports == by_map ? "pool" : "owned");
    std::mt19937 random(6);
    int early = 0;
    for (int round = 0; round < 30; ++round) {
      Owned into(pair.here->registry(), raced("", 2, 8, 256 << 10));
      const bool by_deadline = round % 3 == 0;
      const auto pull = pair.here->pull(pair.link, target, into.id(), whole(), Deadline::after_ms(by_deadline ? random() % 3 : 5000), transports);
      pull->start();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
      if (round % 3 == 1) {
        pull->cancel();
      } else if (round % 3 == 2) {
        pair.here->registry().remove(into.id());
        for (std::size_t unit = 0; unit < 8; ++unit) write_unit(*into.cache, 1, unit, 9);
        for (std::size_t unit = 0; unit < 8; ++unit) CHECK(holds(*into.cache, 1, unit, 9, 1, unit));
      }
      CHECK(pull->wait(Deadline::after_ms(3000)));
      const auto& outcome = pull->result().outcome;
      early += !outcome.ok();
      CHECK(outcome.settled && (outcome.ok() || outcome.kind == (round % 3 == 0   ? Kind::deadline
                                                                 : round % 3 == 1 ? Kind::cancelled
                                                                                  : Kind::not_found)));
      for (std::size_t unit = 0; unit < 8; ++unit) write_unit(*into.cache, 0, unit, 9);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      for (std::size_t unit = 0; unit < 8; ++unit) CHECK(holds(*into.cache, 0, unit, 9, 0, unit));
      if (round % 3 != 2) pair.here->registry().remove(into.id());
    }
    std::printf("ended early: %d of 30\n", early);
    CHECK(pair.link->alive());
  }
}

// Threads of both sides go on all the time, and an unlink that waits for what has begun ends all the same. What it refuses
// meanwhile has touched nothing; the other side hears of the end of the link.
static void an_unlink_ends_under_steady_traffic() {
  for (int round = 0; round < 4; ++round) {
    Pair pair;
    const Shape shape{"kv", 2, 8, 4096};
    Owned ours(pair.here->registry(), shape), theirs(pair.there->registry(), shape);
    fill(*ours.cache, 1), fill(*theirs.cache, 2);
    std::atomic<int> moved[8] = {};
    std::vector<std::thread> threads;
    for (int number = 0; number < 8; ++number) {
      threads.emplace_back([&, number] {
        const bool on_this_side = number < 4;
        Node &mine = on_this_side ? *pair.here : *pair.there, &other = on_this_side ? *pair.there : *pair.here;
        const auto& link = on_this_side ? pair.link : pair.back;
        const auto far = on_this_side ? theirs.id() : ours.id(), mine_id = on_this_side ? ours.id() : theirs.id();
        const std::uint64_t their_tag = on_this_side ? 2 : 1, my_tag = 3 - their_tag;
        Owned into(mine.registry(), {"", 2, 8, 4096}), remote(other.registry(), {"", 2, 8, 4096});
        std::shared_ptr<PreparedPull> prepared;
        std::shared_ptr<LayerPush> layers;
        while (link->alive()) {
          const auto deadline = Deadline::after_ms(20'000);
          Outcome outcome;
          try {
            switch (number % 4) {
              case 0: mine.pull_now(link, by_id(far), into.id(), blocks({1}, {2}), deadline, any_transport); break;
              case 1: {  // the next one begins before the last one ends: there is no moment without one
                const auto last = std::exchange(layers, nullptr);
                try {
                  auto next = mine.push_layers(link, mine_id, by_id(remote.id()), blocks({1}, {2}), {0}, {0}, 2, 20'000, by_socket);
                  next->start();
                  layers = std::move(next);
                } catch (const Error& error) {
                  outcome = error.outcome();
                }
                if (!last) break;
                last->layer_ready(0);
                CHECK(last->wait(Deadline::after_ms(30'000)));
                if (outcome.ok()) outcome = last->result().outcome;
                break;
              }
              case 2:
                outcome = pushed(mine, link, on_this_side ? *ours.cache : *theirs.cache, by_id(remote.id()), blocks({1}, {2}), by_socket, 20'000).outcome;
                break;
              default:
                if (!prepared) prepared = mine.prepare(link, by_id(far), into.id(), blocks({1}, {2}), deadline, any_transport);
                outcome = prepared->run_here(deadline).outcome;
            }
          } catch (const Error& error) {
            outcome = error.outcome();
          }
          if (outcome.ok()) {
            CHECK(number % 4 == 1 ? moved[number] < 1 || holds(*remote.cache, 1, 2, my_tag, 1, 1) : number % 4 == 2 ? holds(*remote.cache, 1, 2, my_tag, 1, 1) : holds(*into.cache, 1, 2, their_tag, 1, 1));
            ++moved[number];
          } else if (outcome.kind != Kind::not_linked && outcome.kind != Kind::peer_lost) {
            CHECK_ENDS(Kind::not_linked, "", Result{outcome});
          }
        }
      });
    }
    CHECK(eventually([&] { return std::all_of(moved, moved + 8, [](const auto& one) { return one > 3; }); }, 20'000));
    CHECK(kind_of([&] {
            if (round % 2 == 0)
              pair.here->unlink(pair.link, Deadline::after_ms(20'000), false);
            else
              pair.there->unlink(pair.back, Deadline::after_ms(20'000), false);
          }) == Kind::ok);
    CHECK(eventually([&] { return !pair.link->alive() && !pair.back->alive(); }));
    for (auto& thread : threads) thread.join();
    CHECK(pair.link->operations() == 0 && pair.back->operations() == 0);
  }
}

// Links go down and come up again, and nodes are closed, while threads move bytes over them.
static void links_go_down_while_threads_move() {
  for (const bool asynchronous : {false, true}) {
    for (int round = 0; round < 12; ++round) {
      Pair pair;
      pair.make_pools();
      const auto pool = allocated(pair.there->registry(), {"pool", 2, 16, 64 << 10});
      Owned owned(pair.there->registry(), {"owned", 2, 16, 64 << 10}), to(pair.there->registry(), {"to", 2, 16, 64 << 10});
      fill(*pool, 4), fill(*owned.cache, 5);
      std::atomic<bool> stop{false};
      std::atomic<int> good{0}, bad{0};
      std::vector<std::thread> threads;
      for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&, seed] {
          std::mt19937 random(seed + 10 * static_cast<unsigned>(round));
          std::optional<Owned> registered;
          while (!stop) {
            const unsigned transports = 1u << random() % 3;
            try {
              if (!registered) {
                registered.emplace(pair.here->registry(), Shape{"", 2, 16, 64 << 10});
                fill(*registered->cache, 6);
              }
              auto& mine = *registered;
              const auto deadline = Deadline::after_ms(5000);
              std::shared_ptr<Operation> operation;
              const bool pull = seed != 0;
              if (pull)
                operation = pair.here->pull(pair.link, by_name(random() % 2 == 0 ? "pool" : "owned"), mine.id(), whole(), deadline, any_transport);
              else
                operation = pair.here->push(pair.link, mine.id(), by_name("to"), whole(), deadline, transports | by_socket);
              if (asynchronous) {
                operation->start();
                CHECK(operation->wait(deadline));
              } else {
                operation->run_here();
              }
              const auto& outcome = operation->result().outcome;
              outcome.ok() ? ++good : ++bad;
              if (outcome.ok() && pull) CHECK(holds_all(*mine.cache, 4) || holds_all(*mine.cache, 5));
              // A closing peer ends its caches, and with them what is being pulled, before the link is known to be down.
              const bool expected = outcome.kind == Kind::not_linked || outcome.kind == Kind::closed || outcome.kind == Kind::peer_lost ||
                                    (outcome.kind == Kind::not_found && round % 4 == 3);
              if (!outcome.ok() && !expected) CHECK_ENDS(Kind::not_linked, "", operation->result());
            } catch (const Error& error) {
              const auto kind = error.outcome().kind;
              CHECK(kind == Kind::not_linked || kind == Kind::closed || kind == Kind::peer_lost);
              break;
            }
          }
        });
      }
      CHECK(eventually([&] { return good >= 4; }));
      std::this_thread::sleep_for(std::chrono::microseconds(round * 377 % 1000));
      switch (round % 4) {
        case 0: pair.here->unlink(pair.link, Deadline::after_ms(3000), true); break;
        case 1: pair.there->unlink(pair.back, Deadline::after_ms(3000), true); break;
        case 2: pair.here->close(); break;
        default: pair.there->close();
      }
      CHECK(eventually([&] { return !pair.link->alive() && !pair.back->alive(); }));
      stop = true;
      for (auto& thread : threads) thread.join();
      // What each served for the other ends by itself.
      CHECK(eventually([&] { return pair.link->operations() == 0 && pair.back->operations() == 0; }));
      if (round == 0) std::printf("%d operations before the end, %d ended by it\n", good.load(), bad.load());
    }
  }
}

// An allocated cache's segment goes with it: that is said, and not that the only transport allowed does not suit.
static void a_segment_that_goes_with_its_cache_is_its_cache_gone() {
  Pair pair;
  pair.there->registry().create_pool(64 << 20, 12, 64 << 10);
  Owned into(pair.here->registry(), {"into", 2, 8, 8192});
  Contest contest{.enough = Deadline::after_ms(500), .latest = Deadline::after_ms(20'000)};
  for (unsigned i = 0; contest.undecided(); ++i) {
    const auto cache = allocated(pair.there->registry(), {"kv", 2, 8, 8192});
    fill(*cache, 7);
    std::thread ending([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(i % 16 * 20));
      pair.there->registry().deallocate(cache->geometry.cache_id);
    });
    Result result;
    try {
      result = i % 2 == 0 ? pulled(*pair.here, pair.link, by_name("kv"), *into.cache, whole(), by_map)
                          : pushed(*pair.there, pair.back, *cache, by_name("into"), whole(), by_map);
    } catch (const Error& error) {  // gone before the push was made
      result.outcome = error.outcome();
    }
    if (!result.outcome.ok()) CHECK_ENDS(Kind::not_found, "", result);
    ++(result.outcome.ok() ? contest.good : contest.gone);
    ending.join();
  }
  contest.check("by map alone, while the cache is deallocated");
}

int main() {
  many_threads_move_at_once();
  a_pull_through_a_closing_window_gets_its_bytes_or_an_error();
  a_push_through_a_closing_window_writes_nothing_after_it();
  small_pulls_at_once_get_what_stood_or_an_error();
  unregistering_races_with_pulls();
  nothing_is_written_after_the_end();
  an_unlink_ends_under_steady_traffic();
  links_go_down_while_threads_move();
  a_segment_that_goes_with_its_cache_is_its_cache_gone();
  return TEST_RESULT();
}
