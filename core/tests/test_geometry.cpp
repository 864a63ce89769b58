#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "../geometry.hpp"
#include "check.hpp"

using namespace kvferry;

using Numbers = std::vector<std::int64_t>;

static Geometry cache(std::uint64_t id, Layout layout, std::uint64_t unit, std::uint64_t count, std::size_t tensors = 2,
                      std::uint64_t stride = 0) {
  Geometry geometry;
  geometry.cache_id = id;
  geometry.name = "kv";
  geometry.layout = layout;
  geometry.unit_bytes = unit;
  geometry.stride_bytes = stride == 0 ? unit : stride;
  geometry.count = count;
  for (std::size_t i = 0; i < tensors; ++i) geometry.tensors.push_back({0x10000 * (i + 1), 0, 0});
  return geometry;
}

static std::shared_ptr<const Moves> blocks(const Numbers& from, const Numbers& to, bool keep_order = false,
                                           TensorRange source = {}, TensorRange destination = {}) {
  return Moves::make_blocks(from.data(), from.size(), to.data(), to.size(), source, destination, keep_order);
}

static std::shared_ptr<const Moves> spread(std::int64_t row, const Numbers& to) {
  return Moves::make_row_to_blocks(row, to.data(), to.size(), {}, {});
}

static bool same(const std::vector<Run>& runs, const std::vector<Run>& expected) {
  return std::equal(runs.begin(), runs.end(), expected.begin(), expected.end(), [](const Run& a, const Run& b) {
    return a.source == b.source && a.destination == b.destination && a.bytes == b.bytes;
  });
}

// --- the shape of a cache --------------------------------------------------------------------------------------------

static void a_geometry_is_checked_for_what_cannot_be() {
  const auto fails = [](const char* words, const std::function<void(Geometry&)>& change) {
    Geometry geometry = cache(3, Layout::blocks, 100, 10);
    change(geometry);
    CHECK_FAILS(Kind::invalid_argument, words, geometry.check());
  };
  cache(3, Layout::blocks, 100, 10).check();
  cache(3, Layout::blocks, 1, 0xffffffff).check();
  fails("unit of 0 bytes", [](Geometry& g) { g.unit_bytes = 0; });
  fails("0 units", [](Geometry& g) { g.count = 0; });
  fails("at most 4294967295", [](Geometry& g) { g.count = std::uint64_t{1} << 32; });
  fails("stride of 99", [](Geometry& g) { g.stride_bytes = 99; });
  fails("no tensors", [](Geometry& g) { g.tensors.clear(); });
  fails("tensor 1 has address 0", [](Geometry& g) { g.tensors[1].address = 0; });
  fails("more than can be addressed", [](Geometry& g) { g.stride_bytes = ~std::uint64_t{0}; });
  fails("more than can be addressed", [](Geometry& g) { g.stride_bytes = std::uint64_t{1} << 59; });
  fails("past the end", [](Geometry& g) { g.tensors[0].address = ~std::uint64_t{0} - 500; });
  fails("layout 9", [](Geometry& g) { g.layout = static_cast<Layout>(9); });
  fails("cache 3 'kv'", [](Geometry& g) { g.count = 0; });
  CHECK(cache(3, Layout::blocks, 100, 10, 2, 120).tensor_extent() == 9 * 120 + 100);
}

static void a_cache_is_mappable_when_all_its_tensors_lie_in_segments() {
  Geometry geometry = cache(1, Layout::blocks, 8, 1);
  CHECK(!geometry.mappable());
  geometry.tensors[0].segment = 1;
  CHECK(!geometry.mappable());
  geometry.tensors[1].segment = 2;
  CHECK(geometry.mappable());
  geometry.name = "";
  CHECK(geometry.label() == "cache 1");
}

// --- plans -----------------------------------------------------------------------------------------------------------

static void whole_caches_need_equal_units_and_counts() {
  const auto moves = Moves::make_whole({}, {});
  const Geometry a = cache(1, Layout::blocks, 10, 4), b = cache(2, Layout::rows, 10, 4);
  const Plan plan = make_plan(a, b, *moves, -1, true);
  CHECK(same(plan.runs, {{0, 0, 40}}) && plan.tensors == 2 && plan.total() == 80);
  const Plan split = make_plan(a, cache(2, Layout::blocks, 10, 3 + 1, 2, 16), *moves, -1, true);
  CHECK(same(split.runs, {{0, 0, 10}, {10, 16, 10}, {20, 32, 10}, {30, 48, 10}}));
  CHECK_FAILS(Kind::invalid_argument, "has 4 units", make_plan(a, cache(2, Layout::blocks, 10, 5), *moves, -1, true));
  CHECK_FAILS(Kind::invalid_argument, "units of 10 bytes",
              make_plan(a, cache(2, Layout::blocks, 11, 4), *moves, -1, true));
}

static void blocks_are_checked_on_both_sides() {
  const Geometry a = cache(3, Layout::blocks, 10, 10), b = cache(4, Layout::mixed, 10, 8);
  CHECK(same(make_plan(a, b, *blocks({9, 2, 3}, {0, 5, 6}), -1, true).runs, {{90, 0, 10}, {20, 50, 20}}));
  CHECK_FAILS(Kind::invalid_argument, "source block 12 of cache 3 'kv' does not exist: it has 10 blocks",
              make_plan(a, b, *blocks({12}, {0}), -1, true));
  CHECK_FAILS(Kind::invalid_argument, "source block 10 of cache 3", make_plan(a, b, *blocks({9, 10}, {0, 1}), -1, true));
  CHECK_FAILS(Kind::invalid_argument, "destination block 8 of cache 4 'kv' does not exist: it has 8 blocks",
              make_plan(a, b, *blocks({0}, {8}), -1, true));
  CHECK_FAILS(Kind::invalid_argument, "source block 10 of cache 3", make_plan(a, b, *blocks({10, 9}, {5, 5}), -1, true));  // overwritten
  CHECK(same(make_plan(a, b, *blocks({8, 9}, {5, 5}), -1, true).runs, {{90, 50, 10}}));
  CHECK_FAILS(Kind::invalid_argument, "layout rows",
              make_plan(cache(3, Layout::rows, 10, 10), b, *blocks({0}, {0}), -1, true));
  const Plan none = make_plan(a, b, *blocks({}, {}), -1, true);
  CHECK(none.total() == 0 && none.tensors == 2 && PlanCursor(none).done());
}

static void a_row_moves_the_movers_size_unless_told() {
  const Geometry source = cache(3, Layout::rows, 100, 4), destination = cache(4, Layout::rows, 60, 2);
  const auto plan = [&](std::int64_t row, std::uint32_t into, std::int64_t size, bool pull, std::int64_t key_row = -1) {
    return make_plan(source, destination, *Moves::make_row(row, into, size, {}, {}), key_row, pull);
  };
  CHECK(same(plan(3, 1, -1, true).runs, {{300, 60, 60}}));
  CHECK(same(plan(3, 1, 7, false).runs, {{300, 60, 7}}));
  CHECK(same(plan(-1, 0, -1, true, 2).runs, {{200, 0, 60}}));
  CHECK_FAILS(Kind::invalid_argument, "100 bytes do not fit in a row of destination cache 4 'kv', which has 60",
              plan(0, 0, -1, false));
  CHECK_FAILS(Kind::invalid_argument, "do not fit", plan(0, 0, 61, true));
  CHECK_FAILS(Kind::not_found, "row 4 of source cache 3 'kv' does not exist: it has 4 rows", plan(4, 0, -1, true));
  CHECK_FAILS(Kind::not_found, "row 9", plan(-1, 0, -1, true, 9));
  CHECK_FAILS(Kind::invalid_argument, "source row -1", plan(-1, 0, -1, true));
  CHECK_FAILS(Kind::invalid_argument, "destination row 2", plan(0, 2, -1, true));
  CHECK_FAILS(Kind::invalid_argument, "size 0", plan(0, 0, 0, true));
  CHECK_FAILS(Kind::invalid_argument, "size -2", plan(0, 0, -2, true));
  CHECK_FAILS(Kind::invalid_argument, "row -2", plan(-2, 0, -1, true));
  CHECK_FAILS(Kind::invalid_argument, "layout blocks",
              make_plan(cache(3, Layout::blocks, 100, 4), destination, *Moves::make_row(0, 0, -1, {}, {}), -1, true));
}

static void a_row_spreads_over_blocks_and_the_last_listed_gets_what_is_left() {
  const Geometry row = cache(3, Layout::rows, 35, 2), into = cache(4, Layout::blocks, 10, 20);
  const auto plan = [&](const Numbers& to) { return make_plan(row, into, *spread(1, to), -1, true); };
  CHECK(same(plan({4, 5, 9, 2}).runs, {{35, 40, 20}, {55, 90, 10}, {65, 20, 5}}));
  CHECK(plan({4, 5, 9, 2}).bytes_per_tensor == 35);
  CHECK(same(plan({7, 8}).runs, {{35, 70, 20}}));  // fewer: full ones only
  CHECK(same(plan({0, 1, 2, 3}).runs, {{35, 0, 35}}));
  CHECK_FAILS(Kind::invalid_argument, "fills 4 blocks of 10 bytes", plan({0, 1, 2, 3, 4}));
  CHECK_FAILS(Kind::invalid_argument, "destination block 20", plan({20}));
  CHECK_FAILS(Kind::not_found, "row 2", make_plan(row, into, *spread(2, {0}), -1, true));
  CHECK(plan({}).total() == 0);
  const Plan gaps = make_plan(row, cache(4, Layout::blocks, 10, 20, 2, 16), *spread(0, {0, 1, 2, 3}), -1, true);
  CHECK(same(gaps.runs, {{0, 0, 10}, {10, 16, 10}, {20, 32, 10}, {30, 48, 5}}));
}

static void a_block_that_a_row_names_twice_ends_as_if_written_in_order() {
  const Geometry row = cache(3, Layout::rows, 35, 1), into = cache(4, Layout::blocks, 10, 20);
  const Numbers to = {6, 1, 6, 1};
  const Plan plan = make_plan(row, into, *spread(0, to), -1, true);
  std::vector<int> expected(200, -1), got(200, -1), writers(200, 0);
  for (int i = 0; i < 35; ++i) expected[static_cast<std::size_t>(to[static_cast<std::size_t>(i / 10)] * 10 + i % 10)] = i;
  for (const Run& run : plan.runs) {
    for (std::uint64_t i = 0; i < run.bytes; ++i) {
      got[run.destination + i] = static_cast<int>(run.source + i);
      ++writers[run.destination + i];
    }
  }
  CHECK(got == expected);
  CHECK(*std::max_element(writers.begin(), writers.end()) == 1);
}

static void tensor_ranges_must_come_to_the_same_count() {
  const Geometry a = cache(1, Layout::blocks, 10, 4, 6), b = cache(2, Layout::blocks, 10, 4, 4);
  const auto plan = [&](TensorRange from, TensorRange to) {
    return make_plan(a, b, *blocks({0}, {0}, false, from, to), -1, true);
  };
  CHECK(plan({2, -1}, {}).source_first == 2 && plan({2, -1}, {}).tensors == 4);
  CHECK(plan({1, 2}, {2, -1}).destination_first == 2);
  CHECK_FAILS(Kind::invalid_argument, "gives 6 tensors", plan({}, {}));
  CHECK_FAILS(Kind::invalid_argument, "has 6 tensors", plan({5, 2}, {0, 2}));
  CHECK_FAILS(Kind::invalid_argument, "has 6 tensors", plan({6, -1}, {0, 2}));
  CHECK_FAILS(Kind::invalid_argument, "has 4 tensors", plan({0, 2}, {0, 0}));
  CHECK_FAILS(Kind::invalid_argument, "has 4 tensors", plan({0, 2}, {0, -2}));
  CHECK_FAILS(Kind::invalid_argument, "has 4 tensors", plan({0, 2}, {3, std::int64_t{1} << 40}));
}

// The two halves of a socket pull, put together over the stream position, are the plan made from both sides at once.
static void the_two_sides_of_a_stream_meet() {
  const Geometry a = cache(1, Layout::mixed, 10, 30, 2, 12), b = cache(2, Layout::mixed, 10, 30, 2);
  for (const auto& moves : {Moves::make_whole({}, {}), Moves::make_row(3, 7, 6, {}, {}), Moves::make_row(-1, 7, -1, {}, {}),
                            blocks({5, 6, 1, 2, 20}, {0, 1, 9, 10, 3}), blocks({}, {})}) {
    const Plan whole = make_plan(a, b, *moves, 4, true);
    const DestinationPlan to = make_destination_plan(b, *moves);
    const Plan from = make_source_plan(a, to.select, 4);
    CHECK(whole.total() == from.total() && whole.total() == to.plan.total());
    std::map<std::uint64_t, std::uint64_t> sent, expected, got;
    for (const Run& run : from.runs) {
      for (std::uint64_t i = 0; i < run.bytes; ++i) sent[run.destination + i] = run.source + i;
    }
    for (const Run& run : to.plan.runs) {
      for (std::uint64_t i = 0; i < run.bytes; ++i) got[run.destination + i] = sent.at(run.source + i);
    }
    for (const Run& run : whole.runs) {
      for (std::uint64_t i = 0; i < run.bytes; ++i) expected[run.destination + i] = run.source + i;
    }
    CHECK(got == expected && sent.size() == whole.bytes_per_tensor);
  }
}

static void an_owner_checks_what_it_is_asked_for() {
  const Geometry owner = cache(3, Layout::mixed, 10, 30, 4);
  SourceSelect select{.tensor_first = 0, .tensor_count = 4, .all_tensors = true, .unit_bytes = 10, .units = {{29, 1}}};
  const auto plan = [&](auto change) {
    SourceSelect changed = select;
    change(changed);
    return make_source_plan(owner, changed, -1);
  };
  CHECK(same(plan([](auto&) {}).runs, {{290, 0, 10}}));
  CHECK_FAILS(Kind::invalid_argument, "expected to be 2", plan([](auto& s) { s.tensor_count = 2; }));
  CHECK(plan([](auto& s) { s.tensor_count = 2, s.all_tensors = false; }).tensors == 2);
  CHECK_FAILS(Kind::invalid_argument, "has 4 tensors", plan([](auto& s) { s.tensor_count = 0, s.all_tensors = false; }));
  CHECK_FAILS(Kind::invalid_argument, "has 4 tensors", plan([](auto& s) { s.tensor_first = 4; }));
  CHECK_FAILS(Kind::invalid_argument, "source block 30", plan([](auto& s) { s.units = {{29, 2}}; }));
  CHECK_FAILS(Kind::invalid_argument, "does not exist", plan([](auto& s) { s.units = {{~0U, ~0U}}; }));
  CHECK_FAILS(Kind::invalid_argument, "the destination of 11", plan([](auto& s) { s.unit_bytes = 11; }));
  CHECK_FAILS(Kind::invalid_argument, "the destination has 31", plan([](auto& s) { s.whole_count = 31; }));
  CHECK_FAILS(Kind::not_found, "row 30", plan([](auto& s) { s.unit_bytes = 0, s.row = 30, s.row_bytes = 1; }));
  CHECK_FAILS(Kind::invalid_argument, "do not fit", plan([](auto& s) { s.unit_bytes = 0, s.row_bytes = 11; }));
  CHECK_FAILS(Kind::invalid_argument, "0 bytes", plan([](auto& s) { s.unit_bytes = 0; }));
  CHECK_FAILS(Kind::internal, "not planned", make_destination_plan(owner, *spread(0, {1})));
  CHECK_FAILS(Kind::invalid_argument, "3 tensors of the source",
              make_destination_plan(owner, *blocks({0}, {0}, false, {0, 3}, {})));
}

// --- walking ---------------------------------------------------------------------------------------------------------

static void a_cursor_cuts_a_plan_into_pieces_without_loss() {
  const Geometry a = cache(1, Layout::blocks, 10, 30, 3), b = cache(2, Layout::blocks, 10, 30, 3, 16);
  const Plan plan = make_plan(a, b, *blocks({0, 1, 2, 9, 4}, {3, 4, 5, 0, 9}), -1, true);
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> bytes;  // (tensor and source, destination) of each byte
    PlanCursor all(plan);
    std::uint64_t position = 0;
    while (!all.done()) {
      std::uint64_t taken = 0;
      const std::uint64_t most = random() % 40 + 1;
      const std::uint32_t spans = random() % 4 + 1;
      PlanCursor piece = all.split(most, spans, taken);
      CHECK(taken > 0 && taken <= most && all.position() == position + taken);
      CHECK(piece.position() == position);
      std::uint32_t seen = 0;
      for (; piece.position() < position + taken; ++seen) {
        const auto span = piece.next(position + taken - piece.position());
        for (std::uint64_t i = 0; i < span.bytes; ++i) {
          bytes.emplace_back(span.tensor * 1000 + span.source + i, span.tensor * 1000 + span.destination + i);
        }
      }
      CHECK(seen <= spans && piece.position() == position + taken);
      position += taken;
    }
    CHECK(position == plan.total());
    std::size_t at = 0;
    for (std::uint64_t tensor = 0; tensor < 3; ++tensor) {
      for (const Run& run : plan.runs) {
        for (std::uint64_t i = 0; i < run.bytes; ++i, ++at) {
          CHECK(bytes[at].first == tensor * 1000 + run.source + i);
          CHECK(bytes[at].second == tensor * 1000 + run.destination + i);
        }
      }
    }
  }
}

static std::shared_ptr<const Moves> spans(const std::vector<std::uint64_t>& listed) { return Moves::make_spans(listed.data(), listed.size() / 3); }

static void spans_are_of_one_contiguous_tensor_on_each_side() {
  const Geometry a = cache(1, Layout::blocks, 100, 10, 1), b = cache(2, Layout::rows, 30, 10, 1);
  const auto plan = make_plan(a, b, *spans({990, 0, 10, 5, 10, 1, 6, 11, 4, 10, 15, 1, 0, 299, 1}), -1, true);
  CHECK(plan.tensors == 1 && plan.total() == 17);
  CHECK(same(plan.runs, {{990, 0, 10}, {5, 10, 6}, {0, 299, 1}}));  // neighbours are one run
  CHECK(make_plan(a, b, *spans({}), -1, true).total() == 0);
  const auto fails = [&](const char* words, const Geometry& from, const Geometry& to, const std::vector<std::uint64_t>& listed) {
    CHECK_FAILS(Kind::invalid_argument, words, make_plan(from, to, *spans(listed), -1, true));
  };
  fails("span 1 of source cache 1 'kv', 10 bytes from byte 991 on, does not lie inside its 1000 bytes", a, b, {0, 0, 1, 991, 0, 10});
  fails("span 0 of destination cache 2 'kv'", a, b, {0, 300, 1});
  fails("span 0 of destination", a, b, {0, std::uint64_t{1} << 62, 1});
  fails("source cache 1 'kv' has 2 tensors", cache(1, Layout::blocks, 100, 10), b, {0, 0, 1});
  fails("destination cache 2 'kv' has gaps", a, cache(2, Layout::blocks, 30, 10, 1, 40), {0, 0, 1});
}

static void the_memory_of_a_process_is_moved_by_spans_alone() {
  const Geometry memory = Geometry::of_memory(), a = cache(1, Layout::mixed, 100, 10, 1);
  memory.check();
  CHECK(!memory.mappable() && memory.label() == "MEMORY");
  CHECK(same(make_plan(memory, a, *spans({0x7fff'0000'0000, 7, 5}), -1, false).runs, {{0x7fff'0000'0000, 7, 5}}));
  CHECK(same(make_plan(a, memory, *spans({7, 0x7fff'0000'0000, 5}), -1, true).runs, {{7, 0x7fff'0000'0000, 5}}));
  for (const auto& moves : {Moves::make_whole({}, {}), Moves::make_row(0, 0, -1, {}, {}), blocks({0}, {0}), spread(0, {0})}) {
    CHECK_FAILS(Kind::invalid_argument, "source MEMORY has no blocks and no rows", make_plan(memory, a, *moves, -1, false));
    CHECK_FAILS(Kind::invalid_argument, "destination MEMORY has no", make_plan(a, memory, *moves, -1, true));
    CHECK_FAILS(Kind::invalid_argument, "destination MEMORY has no", make_destination_plan(memory, *moves));
  }
  const auto changed = [](const std::function<void(Geometry&)>& change) {
    Geometry other = Geometry::of_memory();
    change(other);
    CHECK_FAILS(Kind::invalid_argument, "neither", other.check());
  };
  changed([](Geometry& g) { g.cache_id = 1; });
  changed([](Geometry& g) { g.unit_bytes = 2; });
  changed([](Geometry& g) { g.count = 5; });
  changed([](Geometry& g) { g.tensors.push_back({}); });
  changed([](Geometry& g) { g.tensors[0].address = 8; });
  changed([](Geometry& g) { g.tensors[0].segment = 1; });
}

// What the puller asks for and what the owner sends are the same bytes in the same order, whatever is listed.
static void the_two_sides_of_a_stream_of_spans_meet() {
  const Geometry a = cache(1, Layout::blocks, 100, 10, 1), b = cache(2, Layout::blocks, 10, 100, 1);
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::uint64_t> listed;
    for (unsigned n = random() % 20; n > 0; --n) {
      const std::uint64_t bytes = random() % 50 + 1;
      listed.insert(listed.end(), {random() % (1000 - bytes), random() % (1000 - bytes), bytes});
      if (random() % 3 == 0) listed.insert(listed.end(), {listed[listed.size() - 3] + bytes, listed[listed.size() - 2] + bytes, 1});
    }
    const auto moves = spans(listed);
    if (testing::kind_of([&] { make_plan(a, b, *moves, -1, true); }) != Kind::ok) continue;
    const auto one_sided = make_plan(a, b, *moves, -1, true);
    const auto here = make_destination_plan(b, *moves);
    const auto there = make_source_plan(a, here.select, -1);
    CHECK(here.plan.total() == one_sided.total() && there.total() == one_sided.total());
    const auto bytes_of = [](const Plan& plan) {
      std::vector<std::pair<std::uint64_t, std::uint64_t>> bytes;
      for (const Run& run : plan.runs)
        for (std::uint64_t i = 0; i < run.bytes; ++i) bytes.emplace_back(run.source + i, run.destination + i);
      return bytes;
    };
    const auto direct = bytes_of(one_sided), sent = bytes_of(there), received = bytes_of(here.plan);
    for (std::size_t i = 0; i < direct.size(); ++i)
      CHECK(sent[i].second == i && received[i].first == i && sent[i].first == direct[i].first && received[i].second == direct[i].second);
  }
}

static void an_owner_checks_the_spans_it_is_asked_for() {
  const Geometry a = cache(1, Layout::blocks, 100, 10, 1);
  SourceSelect select;
  select.tensor_count = 1, select.by_spans = true;
  const auto fails = [&](const char* words, const Geometry& geometry, std::vector<ByteSpan> asked) {
    select.spans = std::move(asked);
    CHECK_FAILS(Kind::invalid_argument, words, make_source_plan(geometry, select, -1));
  };
  fails("span 1 of source", a, {{0, 1}, {999, 2}});
  fails("span 0 of source", a, {{~std::uint64_t{0}, 2}});
  fails("span 0 of source", a, {{2, ~std::uint64_t{0}}});
  fails("gaps", cache(1, Layout::blocks, 100, 10, 1, 128), {{0, 1}});
  fails("2 tensors", cache(1, Layout::blocks, 100, 10, 2), {{0, 1}});
  select.tensor_first = 1;
  fails("1 tensors", a, {{0, 1}});
}

int main() {
  a_geometry_is_checked_for_what_cannot_be();
  a_cache_is_mappable_when_all_its_tensors_lie_in_segments();
  whole_caches_need_equal_units_and_counts();
  blocks_are_checked_on_both_sides();
  a_row_moves_the_movers_size_unless_told();
  a_row_spreads_over_blocks_and_the_last_listed_gets_what_is_left();
  a_block_that_a_row_names_twice_ends_as_if_written_in_order();
  tensor_ranges_must_come_to_the_same_count();
  the_two_sides_of_a_stream_meet();
  an_owner_checks_what_it_is_asked_for();
  a_cursor_cuts_a_plan_into_pieces_without_loss();
  spans_are_of_one_contiguous_tensor_on_each_side();
  the_memory_of_a_process_is_moved_by_spans_alone();
  the_two_sides_of_a_stream_of_spans_meet();
  an_owner_checks_the_spans_it_is_asked_for();
  return TEST_RESULT();
}
