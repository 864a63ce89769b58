#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>
#include <thread>

#include "alone.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static std::unique_ptr<Lane> taken(Alone& alone, LaneUse use, const std::shared_ptr<Scripted>& by) { return alone.link->lanes.take(use, *by); }
static std::shared_ptr<Scripted> somebody(Alone& alone) {
  return script(alone, [](Scripted&) { return Need::nothing_yet; });
}

static void each_use_has_its_lanes() {
  Alone alone(3);
  auto& pool = alone.link->lanes;
  CHECK(pool.open_lanes() == 0);
  const auto a = somebody(alone), b = somebody(alone), c = somebody(alone), d = somebody(alone);
  auto small = taken(alone, LaneUse::small, a);
  CHECK(small && small->use == LaneUse::small && pool.open_lanes() == 3 && alone.dialled == 3);
  auto bulk = taken(alone, LaneUse::bulk, a);
  CHECK(bulk && bulk->use == LaneUse::bulk);
  auto borrowed = taken(alone, LaneUse::small, b);  // small ones may use a bulk lane
  CHECK(borrowed && borrowed->use == LaneUse::bulk);
  CHECK(!taken(alone, LaneUse::bulk, c) && !taken(alone, LaneUse::bulk, c));
  auto push = taken(alone, LaneUse::push, d);  // and nothing of that concerns a push
  CHECK(push && push->use == LaneUse::push && pool.open_lanes() == 3 && alone.dialled == 4);
  CHECK(!taken(alone, LaneUse::push, b));
  pool.give(std::move(small));
  CHECK(!taken(alone, LaneUse::bulk, c));  // a big one does not take a small lane
  pool.give(std::move(push));
  CHECK((push = taken(alone, LaneUse::push, b)) != nullptr);
  const auto* given = bulk.get();
  pool.give(std::move(bulk));
  bulk = taken(alone, LaneUse::bulk, c);
  CHECK(bulk.get() == given);  // it was waiting for that
  CHECK((small = taken(alone, LaneUse::small, a)) != nullptr && small->use == LaneUse::small);
  pool.lost(std::move(small)), pool.lost(std::move(push));
  CHECK(pool.open_lanes() == 3 && alone.dialled == 6 && pool.resets() == 2);
  CHECK((small = taken(alone, LaneUse::small, a)) != nullptr && small->use == LaneUse::small);
  pool.give(std::move(small)), pool.give(std::move(bulk)), pool.give(std::move(borrowed));
}

// Calls have lanes of their own, opened one at a time when none is idle.
static void lanes_for_calls_are_opened_when_they_are_needed() {
  Alone alone(2);
  auto& pool = alone.link->lanes;
  const auto a = somebody(alone), b = somebody(alone), c = somebody(alone);
  auto first = taken(alone, LaneUse::call, a);
  CHECK(first && first->use == LaneUse::call && alone.dialled == 1 && pool.open_lanes() == 0);
  auto second = taken(alone, LaneUse::call, b);
  CHECK(second && second->use == LaneUse::call && alone.dialled == 2);
  CHECK(!taken(alone, LaneUse::call, c) && alone.dialled == 2);
  auto small = taken(alone, LaneUse::small, a);
  CHECK(small && small->use == LaneUse::small && pool.open_lanes() == 2);
  pool.give(std::move(first));
  first = taken(alone, LaneUse::call, c);
  CHECK(first != nullptr && alone.dialled == 4);
  pool.lost(std::move(first));
  pool.give(std::move(second));
  second = taken(alone, LaneUse::call, b);
  CHECK(second && alone.dialled == 5);
  pool.give(std::move(second)), pool.give(std::move(small));
}

static void one_lane_is_for_big_and_small() {
  Alone alone(1);
  const auto a = somebody(alone), b = somebody(alone);
  auto lane = taken(alone, LaneUse::bulk, a);
  CHECK(lane && alone.link->lanes.open_lanes() == 1 && !taken(alone, LaneUse::small, b));
  alone.link->lanes.give(std::move(lane));
  lane = taken(alone, LaneUse::small, b);
  CHECK(lane != nullptr);
  alone.link->lanes.give(std::move(lane));
}

static void lanes_that_cannot_be_had_are_asked_for_again() {
  Alone alone;
  const auto a = somebody(alone);
  alone.unreachable = true;
  CHECK(!taken(alone, LaneUse::small, a) && alone.link->lanes.open_lanes() == 0);
  alone.unreachable = false;
  auto lane = taken(alone, LaneUse::small, a);
  CHECK(lane != nullptr && alone.link->lanes.open_lanes() == 2);
  alone.unreachable = true;
  alone.link->lanes.lost(std::move(lane));
  CHECK(alone.link->lanes.open_lanes() == 1);
  alone.unreachable = false;
  CHECK((lane = taken(alone, LaneUse::small, a)) != nullptr && lane->use == LaneUse::small);
  alone.link->lanes.give(std::move(lane));
}

static void who_leaves_passes_on_what_was_granted() {
  Alone alone(1);
  auto& pool = alone.link->lanes;
  const auto a = somebody(alone), b = somebody(alone), c = somebody(alone);
  auto lane = taken(alone, LaneUse::small, a);
  CHECK(!taken(alone, LaneUse::small, b) && !taken(alone, LaneUse::small, c));
  pool.give(std::move(lane));  // granted to b, who does not want it any more
  pool.leave(*b);
  CHECK((lane = taken(alone, LaneUse::small, c)) != nullptr);
  pool.give(std::move(lane));
  CHECK((lane = taken(alone, LaneUse::small, a)) != nullptr);
  CHECK(!taken(alone, LaneUse::small, b));
  pool.leave(*b);  // out of the queue
  pool.give(std::move(lane));
  CHECK((lane = taken(alone, LaneUse::small, a)) != nullptr);
  pool.give(std::move(lane));
}

static void a_closed_pool_keeps_nothing() {
  Alone alone;
  auto& pool = alone.link->lanes;
  const auto a = somebody(alone), b = somebody(alone);
  auto lane = taken(alone, LaneUse::small, a);
  const int fd = lane->descriptor.get();
  pool.close();
  pool.close();
  char byte;
  CHECK(::recv(fd, &byte, 1, MSG_DONTWAIT) == 0);  // whoever waits for it hears
  CHECK(!taken(alone, LaneUse::small, b));
  pool.give(std::move(lane));
  CHECK(pool.open_lanes() == 0);
  pool.add(alone.dial(LaneUse::bulk));
  CHECK(pool.open_lanes() == 0 && !taken(alone, LaneUse::bulk, b));
}

static Descriptor duplicate(int fd) { return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

static std::size_t blocks_of(int fd) {
  struct stat st{};
  fstat(fd, &st);
  return static_cast<std::size_t>(st.st_blocks);
}

static void a_peers_segment_is_read_without_touching_it() {
  const std::size_t bytes = 4 << 20;
  const Segment owner(1, bytes);
  std::memset(owner.data() + 300'000, 7, 5000);
  const auto pages = blocks_of(owner.descriptor());
  PeerSegment segment(duplicate(owner.descriptor()));
  CHECK(segment.bytes() == bytes);
  std::vector<std::byte> out(bytes, std::byte{1});
  constexpr auto all_of_it = PeerSegment::Copied::all, outside = PeerSegment::Copied::outside;
  CHECK(segment.copy(out.data(), 0, bytes, false) == all_of_it);
  CHECK(std::memcmp(out.data(), owner.data(), 299'000) == 0 && blocks_of(owner.descriptor()) >= pages);
  PeerSegment other(duplicate(owner.descriptor()));
  std::memset(out.data(), 1, bytes);
  const Segment fresh(2, bytes);
  PeerSegment holes(duplicate(fresh.descriptor()));
  CHECK(holes.copy(out.data(), 0, bytes, true) == all_of_it && blocks_of(fresh.descriptor()) == 0);
  for (const auto byte : out) CHECK(byte == std::byte{0});
  PeerSegment::Populated none, all;
  while (holes.populate_some(none)) {
  }
  CHECK(blocks_of(fresh.descriptor()) == 0);
  while (other.populate_some(all)) {
  }
  CHECK(other.copy(out.data(), 299'990, 6000, true) == all_of_it && std::memcmp(out.data(), owner.data() + 299'990, 6000) == 0);
  // Everything at its edges.
  CHECK(other.copy(out.data(), bytes, 0, false) == all_of_it && other.copy(out.data(), bytes - 1, 1, false) == all_of_it);
  CHECK(other.copy(out.data(), bytes, 1, false) == outside && other.copy(out.data(), 0, bytes + 1, false) == outside);
  CHECK(other.copy(out.data(), ~0ull, 2, false) == outside && other.copy(out.data(), 1, ~0ull, false) == outside);
  // By the kernel it is the same, and a destination that is not memory is an answer.
  std::memset(out.data(), 1, bytes);
  CHECK(other.copy(out.data(), 299'990, 6000, true, true) == all_of_it && std::memcmp(out.data(), owner.data() + 299'990, 6000) == 0);
  CHECK(other.copy(reinterpret_cast<void*>(4096), 299'990, 6000, true, true) == PeerSegment::Copied::not_there);
}

static void what_is_no_sealed_memory_is_refused() {
  const Descriptor plain(memfd_create("kvferry-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_FAILS(Kind::refused, "sealed", PeerSegment(duplicate(plain.get())));
  CHECK(ftruncate(plain.get(), 4096) == 0);
  CHECK_FAILS(Kind::refused, "sealed", PeerSegment(duplicate(plain.get())));
  CHECK_FAILS(Kind::refused, "sealed", PeerSegment(Descriptor(open("/dev/zero", O_RDONLY | O_CLOEXEC))));
}

static void a_segment_comes_once() {
  Alone alone;
  const Segment owner(1, 4096);
  const auto first = alone.link->add_segment(9, duplicate(owner.descriptor()));
  CHECK(alone.link->add_segment(9, duplicate(owner.descriptor())) == first && alone.link->segment(9) == first && !alone.link->segment(8));
  CHECK_FAILS(Kind::refused, "", alone.link->add_segment(10, Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC))));
  CHECK(!alone.link->segment(10));
  alone.link->announce(3);  // an answer that may still be on its way: a push on another lane does not rely on it
  CHECK(alone.link->announce_ahead(3) && !alone.link->announce_ahead(3));
  alone.link->announce(3);
  CHECK(!alone.link->announce_ahead(3) && alone.link->announced() == std::vector<std::uint32_t>{3});
  alone.link->forget_announcement(3);
  CHECK(alone.link->announced().empty() && alone.link->announce_ahead(3));
}

// Its owner has released it: unmapped as soon as nobody copies from it, and not taken again if its descriptor comes late.
static void a_segment_that_is_gone_is_let_go() {
  Alone alone;
  const Segment owner(1, 4096), other(2, 4096);
  std::weak_ptr<PeerSegment> gone = alone.link->add_segment(1, duplicate(owner.descriptor()));
  const std::weak_ptr<PeerSegment> stays = alone.link->add_segment(2, duplicate(other.descriptor()));
  GuardTable guards(8);
  alone.link->peer.page = std::make_unique<PeerPage>(guards.page_descriptor(), guards.page().nonce);
  auto source = std::make_shared<Source>();
  source->guards = {guards.open()};
  source->geometry.tensors = {{4096, 2, 0}, {4096, 1, 0}};
  source->segments = {alone.link->segment(2), alone.link->segment(1)};
  alone.link->keep(by_id(1), source);
  alone.link->forget_segment(1);
  alone.link->forget_segment(7);
  CHECK(!alone.link->segment(1) && alone.link->segment(2) && !alone.link->kept(by_id(1)));
  sleep_ms(5);
  CHECK(!gone.expired());  // a copy is going on
  source.reset();
  CHECK(eventually([&] { return gone.expired(); }) && !stays.expired());
  alone.link->add_segment(1, duplicate(owner.descriptor()));
  CHECK(!alone.link->segment(1));
  // A pull that began before all that may come to keep its resolution now: not what lies in a segment that is gone.
  const auto late = [&](const std::shared_ptr<PeerSegment>& segment, std::uint32_t id) {
    auto made = std::make_shared<Source>();
    made->guards = {guards.open()};
    made->geometry.tensors = {{4096, id, 0}};
    made->segments = {segment};
    return made;
  };
  alone.link->keep(by_id(2), late(std::make_shared<PeerSegment>(duplicate(owner.descriptor())), 1));
  alone.link->keep(by_id(3), late(alone.link->segment(2), 2));
  CHECK(!alone.link->kept(by_id(2)) && alone.link->kept(by_id(3)));
  auto of_the_other = late(alone.link->segment(2), 2);
  alone.link->take_down({Kind::peer_lost, "gone", false, true});
  alone.link->keep(by_id(4), of_the_other);
  of_the_other.reset();
  CHECK(eventually([&] { return stays.expired(); }));  // whoever keeps the link does not keep its peer's memory
}

// What is kept stands as long as its guards, and, if it was named by name or key, as long as the table's epoch.
static void a_kept_resolution_goes_with_its_guard_or_epoch() {
  GuardTable owner(8);
  Alone alone;
  alone.link->peer.page = std::make_unique<PeerPage>(owner.page_descriptor(), owner.page().nonce);
  const auto source = [&](bool by_epoch) {
    auto made = std::make_shared<Source>();
    made->guards = {owner.open()};
    made->epoch = owner.epoch();
    made->by_epoch = by_epoch;
    return made;
  };
  const auto numbered = source(false), named = source(true);
  alone.link->keep(by_id(1), numbered);
  alone.link->keep(by_name("kv"), named);
  CHECK(alone.link->kept(by_id(1)) == numbered && alone.link->kept(by_name("kv")) == named);
  CHECK(!alone.link->kept(by_id(2)) && !alone.link->kept(by_window("kv")));
  owner.bump_epoch();
  CHECK(alone.link->kept(by_id(1)) == numbered && !alone.link->kept(by_name("kv")));
  owner.end(numbered->guards[0]);
  CHECK(!alone.link->kept(by_id(1)) && !alone.link->stands(*numbered));
  for (std::uint64_t i = 0; i < 10'000; ++i) alone.link->keep(by_id(i), named);  // bounded
  CHECK(!alone.link->kept(by_id(0)));
}

static void transports_are_given_up_one_by_one() {
  Alone alone;
  CHECK(alone.link->transports(any_transport) == by_socket && alone.link->reasons().first == "not on this host");
  PeerFacts facts;
  facts.map_ok = facts.cma_ok = true;
  const auto link = std::make_shared<Link>(alone.engine, 2, std::move(facts), false, std::array<std::uint8_t, 16>{}, nullptr);
  CHECK(link->transports(any_transport) == any_transport && link->transports(by_map) == by_map && link->reasons().second.empty());
  link->give_up_cma("no longer permitted");
  link->give_up_cma("again");
  CHECK(link->transports(any_transport) == (by_map | by_socket) && link->reasons().second == "no longer permitted");
  link->give_up_map("x");
  CHECK(link->transports(any_transport) == by_socket && link->transports(by_map) == 0);
}

// While somebody waits for the operations of a link to end none begins, but for parts of those that have. Then all is as before.
static void a_link_that_is_being_unlinked_takes_no_operations() {
  Alone alone;
  const auto at_once = [](Scripted& self) { return self.end(), Need::done; };
  const auto running = script(alone, [](Scripted& self) { return self.flag ? (self.end(), Need::done) : Need::nothing_yet; });
  running->start();
  {
    const Link::Parting first(*alone.link);
    std::optional<Link::Parting> second(std::in_place, *alone.link);
    CHECK(alone.link->alive() && !Link::Brief(*alone.link));
    second.reset();
    CHECK(!Link::Brief(*alone.link));
    CHECK_FAILS(Kind::not_linked, "this link is being unlinked", script(alone, at_once)->run_here());
    CHECK_FAILS(Kind::not_linked, "this link is being unlinked", script(alone, at_once)->start());
    CHECK_FAILS(Kind::not_linked, "this link is being unlinked", script(alone, at_once)->start_here());
    const auto part = script(alone, at_once);
    part->of_another = true;
    CHECK(part->run_here().outcome.ok() && alone.link->operations() == 1);
    CHECK(!alone.link->wait_until_quiet(Deadline::after_ms(5)));
  }
  CHECK(Link::Brief(*alone.link) && script(alone, at_once)->run_here().outcome.ok());
  const Link::Parting parting(*alone.link);
  running->flag = true;
  running->schedule();
  CHECK(alone.link->wait_until_quiet(Deadline::after_ms(5000)) && running->result().outcome.ok());
  alone.link->take_down({Kind::peer_lost, "gone", false, true});
  CHECK(!alone.link->alive());
  CHECK_FAILS(Kind::peer_lost, "gone", script(alone, at_once)->run_here());
}

int main() {
  each_use_has_its_lanes();
  lanes_for_calls_are_opened_when_they_are_needed();
  one_lane_is_for_big_and_small();
  lanes_that_cannot_be_had_are_asked_for_again();
  who_leaves_passes_on_what_was_granted();
  a_closed_pool_keeps_nothing();
  a_peers_segment_is_read_without_touching_it();
  what_is_no_sealed_memory_is_refused();
  a_segment_comes_once();
  a_segment_that_is_gone_is_let_go();
  a_kept_resolution_goes_with_its_guard_or_epoch();
  transports_are_given_up_one_by_one();
  a_link_that_is_being_unlinked_takes_no_operations();
  return TEST_RESULT();
}
