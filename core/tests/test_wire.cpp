#include <cstdio>
#include <functional>
#include <random>
#include <span>

#include "../wire.hpp"
#include "check.hpp"

using namespace kvferry;
using namespace kvferry::wire;

using Bytes = std::vector<std::uint8_t>;

template <class Put>
static Bytes body_of(Put&& put) {
  Writer out(Type::resolve, 0);
  put(out);
  const auto body = out.body();
  return {body.begin(), body.end()};
}

template <class Get>
static bool refused(const Bytes& body, Get&& get) {
  try {
    Reader in(body);
    get(in);
  } catch (const WireError&) {
    return true;
  }
  return false;
}

static Target target() {
  Target made;
  made.by = Target::By::addresses;
  made.id = 1ull << 63, made.model = 5;
  made.name = std::string("with a \0 in it", 14);
  made.addresses = {1, ~0ull, 4096};
  return made;
}

static Geometry geometry() {
  Geometry made;
  made.cache_id = 9;
  made.name = "kv";
  made.layout = Layout::mixed;
  made.kind = "test:0";
  made.unit_bytes = 100, made.stride_bytes = 128, made.count = 0xffffffff;
  made.tensors = {{4096, 0, 0}, {1ull << 40, 3, 65536}};
  return made;
}

static std::shared_ptr<const Moves> moves() {
  const std::int64_t from[] = {1, 2, 3, 9, 0xffffffff}, to[] = {5, 6, 7, 0, 0xfffffffe};
  return Moves::make_blocks(from, 5, to, 5, {1, 4}, {0, -1});
}

static SourceSelect select() {
  SourceSelect made;
  made.tensor_first = 3, made.tensor_count = 7, made.all_tensors = true;
  made.unit_bytes = 4096, made.row = -1, made.row_bytes = 12, made.whole_count = 8;
  made.units = {{0, 3}, {0xffffffff, 1}};
  return made;
}

static std::shared_ptr<const Moves> spans() {
  const std::uint64_t listed[] = {5, 1ull << 47, 3, 8, 0, 1ull << 40};
  return Moves::make_spans(listed, 2);
}

static void a_frame_says_what_it_carries() {
  Writer out(Type::pull, 77, flag_consume);
  out.put(std::uint32_t{5}).put(Layout::blocks).text("abc");
  CHECK(out.body_bytes() == 4 + 1 + 2 + 3);
  const auto frame = out.take();
  Header header;
  std::memcpy(&header, frame.data(), sizeof header);
  CHECK(frame.size() == sizeof header + 10 && header.body_bytes == 10 && header.type == Type::pull);
  CHECK(header.operation == 77 && header.flags == flag_consume && header.offset == 0);
  CHECK(frame[0] == 10 && frame[4] == 34 && frame[24] == 5);  // little-endian
  Reader in(std::span<const std::uint8_t>(frame).subspan(sizeof header));
  CHECK(in.get<std::uint32_t>() == 5 && in.get<Layout>() == Layout::blocks && in.text() == "abc" && in.left() == 0);
  CHECK(refused({}, [](Reader& reader) { reader.get<std::uint8_t>(); }));
}

static void long_texts_are_cut_and_short_ones_refused() {
  const auto body = body_of([](Writer& out) { out.text(std::string(70'000, 'x')); });
  Reader in(body);
  CHECK(in.text().size() == 65'535 && in.left() == 0);
  CHECK(refused({5, 0, 'a'}, [](Reader& reader) { reader.text(); }));
}

static void what_is_put_is_what_is_got() {
  const std::vector<Guard> guards{{1, 3}, {0xffffffff, ~0ull}};
  const std::vector<UnitRun> runs{{7, 1}, {0, 0xffffffff}};
  const Outcome outcome{Kind::deadline, "time was up", true, false};
  const auto body = body_of([&](Writer& out) {
    put_guards(out, guards), put_runs(out, runs), put_target(out, target()), put_geometry(out, geometry());
    put_select(out, select()), put_moves(out, *moves()), put_outcome(out, outcome);
    put_guards(out, {}), put_runs(out, {}), put_target(out, {});
  });
  Reader in(body);
  CHECK(get_guards(in) == guards);
  CHECK(get_runs(in) == runs);
  CHECK(get_target(in) == target());
  const auto g = get_geometry(in);
  CHECK(g.cache_id == 9 && g.name == "kv" && g.layout == Layout::mixed && g.kind == "test:0" && g.unit_bytes == 100);
  CHECK(g.stride_bytes == 128 && g.count == 0xffffffff && g.tensors.size() == 2);
  CHECK(g.tensors[1].address == 1ull << 40 && g.tensors[1].segment == 3 && g.tensors[1].offset == 65536);
  const auto s = get_select(in);
  CHECK(s.tensor_first == 3 && s.tensor_count == 7 && s.all_tensors && s.unit_bytes == 4096 && s.row == -1);
  CHECK(s.row_bytes == 12 && s.whole_count == 8 && s.units == select().units && !s.by_spans && s.spans.empty());
  const auto m = get_moves(in);
  CHECK(m->form == Moves::Form::blocks && m->source == moves()->source && m->destination == moves()->destination);
  CHECK(m->source_tensors == moves()->source_tensors && m->destination_tensors == moves()->destination_tensors);
  CHECK(m->units == moves()->units && m->source_end == moves()->source_end && m->destination_end == moves()->destination_end);
  const auto o = get_outcome(in);
  CHECK(o.kind == Kind::deadline && o.sentence == "time was up" && o.touched && !o.settled);
  CHECK(get_guards(in).empty() && get_runs(in).empty() && get_target(in) == Target{} && in.left() == 0);
}

static void moves_of_every_form_travel() {
  const std::int64_t listed[] = {3, 4, 1};
  for (const auto& given : {Moves::make_whole({}, {2, 1}), Moves::make_row(-1, 7, 100, {}, {}), Moves::make_row_to_blocks(2, listed, 3, {}, {}), moves(), spans()}) {
    const auto body = body_of([&](Writer& out) { put_moves(out, *given); });
    Reader in(body);
    const auto got = get_moves(in);
    CHECK(got->spans == given->spans);
    CHECK(got->form == given->form && got->source_row == given->source_row && got->destination_row == given->destination_row);
    CHECK(got->size_bytes == given->size_bytes && got->last_listed == given->last_listed && got->destination == given->destination);
    const auto again = body_of([&](Writer& out) { put_moves(out, *got); });
    CHECK(again == body && in.left() == 0);
  }
  const auto other = body_of([&](Writer& out) { put_moves(out, *moves(), {8, 2}, {6, 2}); });
  Reader in(other);
  const auto got = get_moves(in);
  CHECK((got->source_tensors == TensorRange{8, 2}) && (got->destination_tensors == TensorRange{6, 2}));
}

static void lists_longer_than_their_frame_are_refused_before_they_are_made() {
  const auto claim = body_of([](Writer& out) { out.put(std::uint32_t{0xffffffff}).put(std::uint64_t{0}).put(std::uint64_t{0}); });
  CHECK(refused(claim, [](Reader& in) { get_guards(in); }));
  CHECK(refused(claim, [](Reader& in) { get_runs(in); }));
  CHECK(refused(body_of([](Writer& out) { out.put(std::uint32_t{3}).put(std::uint64_t{0}).put(std::uint64_t{0}); }),
                [](Reader& in) { in.count(8); }));
  const auto many = body_of([](Writer& out) { put_guards(out, std::vector<Guard>(1025)); });
  CHECK(refused(many, [](Reader& in) { get_guards(in); }));
}

static void values_out_of_their_range_are_refused() {
  const auto run = [](std::uint32_t first, std::uint32_t count) {
    return body_of([&](Writer& out) { out.put(std::uint32_t{1}).put(first).put(count); });
  };
  CHECK(refused(run(0, 0), [](Reader& in) { get_runs(in); }));
  CHECK(refused(run(2, 0xffffffff), [](Reader& in) { get_runs(in); }));
  CHECK(!refused(run(1, 0xffffffff), [](Reader& in) { get_runs(in); }));
  const auto changed = [](const auto& put, std::size_t at, std::uint8_t value) {
    auto body = body_of(put);
    body[at] = value;
    return body;
  };
  CHECK(refused(changed([](Writer& out) { put_target(out, target()); }, 0, 8), [](Reader& in) { get_target(in); }));
  CHECK(refused(changed([](Writer& out) { put_moves(out, *moves()); }, 0, 5), [](Reader& in) { get_moves(in); }));
  CHECK(refused(changed([](Writer& out) { put_geometry(out, geometry()); }, 12, 3), [](Reader& in) { get_geometry(in); }));
  const auto geometries = [](auto change) {
    auto wrong = geometry();
    change(wrong);
    return refused(body_of([&](Writer& out) { put_geometry(out, wrong); }), [](Reader& in) { get_geometry(in); });
  };
  CHECK(geometries([](Geometry& g) { g.unit_bytes = 0; }));
  CHECK(geometries([](Geometry& g) { g.stride_bytes = 99; }));
  CHECK(geometries([](Geometry& g) { g.count = 1ull << 32; }));
  CHECK(geometries([](Geometry& g) { g.stride_bytes = 1ull << 62; }));
  CHECK(geometries([](Geometry& g) { g.tensors.clear(); }));
  CHECK(geometries([](Geometry& g) { g.tensors[0].address = 0; }));
  CHECK(geometries([](Geometry& g) { g.tensors[1].offset = ~0ull; }));
  CHECK(!geometries([](Geometry&) {}));
  const auto pairs = [](std::vector<UnitRun> from, std::vector<UnitRun> to) {
    auto wrong = *moves();
    wrong.source = std::move(from), wrong.destination = std::move(to);
    return refused(body_of([&](Writer& out) { put_moves(out, wrong); }), [](Reader& in) { get_moves(in); });
  };
  CHECK(pairs({{0, 1}}, {}));
  CHECK(pairs({{0, 1}}, {{0, 2}}));
  CHECK(!pairs({{0, 2}}, {{5, 2}}));
  auto range = *moves();
  range.source_tensors.count = -2;
  CHECK(refused(body_of([&](Writer& out) { put_moves(out, range); }), [](Reader& in) { get_moves(in); }));
  const auto kind = body_of([](Writer& out) { put_outcome(out, {static_cast<Kind>(999), "x", false, true}); });
  Reader in(kind);
  CHECK(get_outcome(in).kind == Kind::internal);
  const auto closed = body_of([](Writer& out) { put_outcome(out, {Kind::closed, "this node was closed", true, false}); });
  Reader from_closed(closed);
  const auto lost = get_outcome(from_closed);
  CHECK(lost.kind == Kind::peer_lost && lost.sentence == "the peer's node was closed" && lost.touched && !lost.settled);
}

static void spans_travel_and_are_checked() {
  const auto select_body = [](const SourceSelect& made) { return body_of([&](Writer& out) { put_select(out, made); }); };
  const auto good = select_spans(*spans());
  const auto body = select_body(good);
  Reader in(body);
  const auto got = get_select(in);
  CHECK(got.by_spans && got.spans == good.spans && got.tensor_count == 1 && in.left() == 0);
  const auto selects = [&](auto change) {
    auto wrong = good;
    change(wrong);
    return refused(select_body(wrong), [](Reader& reader) { get_select(reader); });
  };
  CHECK(!selects([](SourceSelect&) {}));
  CHECK(selects([](SourceSelect& s) { s.spans[1].bytes = 0; }));
  CHECK(selects([](SourceSelect& s) { s.spans[1].offset = 1ull << 63; }));
  CHECK(selects([](SourceSelect& s) { s.spans[1] = {(1ull << 63) - 1, 1}; }));
  CHECK(selects([](SourceSelect& s) { s.by_spans = false; }));
  const auto lists = [&](auto change) {
    auto wrong = *spans();
    change(wrong);
    return refused(body_of([&](Writer& out) { put_moves(out, wrong); }), [](Reader& reader) { get_moves(reader); });
  };
  CHECK(!lists([](Moves&) {}));
  CHECK(lists([](Moves& m) { m.spans[0].bytes = 0; }));
  CHECK(lists([](Moves& m) { m.spans[0].source = ~0ull; }));
  CHECK(lists([](Moves& m) { m.spans[0].destination = (1ull << 63) - 2; }));
  CHECK(lists([](Moves& m) { m.spans = {{0, 0, (1ull << 63) - 1}, {0, 0, 1}}; }));
  CHECK(lists([](Moves& m) { m.source = m.destination = {{0, 1}}; }));
  CHECK(lists([](Moves& m) { m.form = Moves::Form::whole; }));
  CHECK(lists([](Moves& m) { m.form = Moves::Form::blocks; }));
}

static void values_to_be_summed_travel_and_are_checked() {
  const auto written = [](const ValueSums* sums) { return body_of([&](Writer& out) { put_sums(out, sums); }); };
  const ValueSums three({5, 1ull << 40, 1}, {7, ~0ull, 0});
  const auto body = written(&three);
  Reader in(body);
  const auto got = get_sums(in);
  CHECK(got && got->sizes() == three.sizes() && got->seeds() == three.seeds() && in.left() == 0);
  const auto none = written(nullptr);
  Reader empty(none);
  CHECK(get_sums(empty) == nullptr && empty.left() == 0);
  const std::vector<std::uint64_t> many(most_sums + 1, 1);
  const ValueSums too_many(many, many);
  CHECK(written(&too_many) == none);
  const auto lists = [](const std::vector<std::uint64_t>& sizes, const std::vector<std::uint64_t>& seeds) {
    return refused(body_of([&](Writer& out) { put_words(out, sizes), put_words(out, seeds); }), [](Reader& reader) { get_sums(reader); });
  };
  CHECK(!lists({1, 2}, {3, 4}) && lists({1, 2}, {3}) && lists({}, {3}) && lists({1, 0}, {3, 4}) && lists({~0ull, 1}, {3, 4}) && lists(many, many));
}

static void only_a_push_describes_the_memory_of_a_process() {
  const auto memory = body_of([](Writer& out) { put_geometry(out, Geometry::of_memory()); });
  CHECK(refused(memory, [](Reader& in) { get_geometry(in); }));
  Reader in(memory);
  CHECK(get_push_source(in).layout == Layout::memory && in.left() == 0);
  auto other = Geometry::of_memory();
  other.tensors[0].segment = 1;
  CHECK(refused(body_of([&](Writer& out) { put_geometry(out, other); }), [](Reader& reader) { get_push_source(reader); }));
  const auto cache = body_of([](Writer& out) { put_geometry(out, geometry()); });
  Reader caches(cache);
  CHECK(get_push_source(caches).cache_id == 9);
}

// Whatever bytes come: a value that passes its own checks, or WireError.
static void mutated_bodies_harm_nobody() {
  struct Codec {
    Bytes good;
    std::function<void(Reader&)> get;
  };
  const std::vector<Codec> codecs = {
      {body_of([](Writer& out) { put_guards(out, {{1, 3}, {2, 5}}); }), [](Reader& in) { CHECK(get_guards(in).size() <= 1024); }},
      {body_of([](Writer& out) { put_runs(out, {{1, 3}, {9, 5}}); }),
       [](Reader& in) {
         for (const auto& run : get_runs(in)) CHECK(run.count > 0 && std::uint64_t{run.first} + run.count <= 1ull << 32);
       }},
      {body_of([](Writer& out) { put_target(out, target()); }), [](Reader& in) { CHECK(!get_target(in).label().empty()); }},
      {body_of([](Writer& out) { put_geometry(out, geometry()); }), [](Reader& in) { get_geometry(in).check(); }},
      {body_of([](Writer& out) { put_select(out, select()); }), [](Reader& in) { get_select(in); }},
      {body_of([](Writer& out) { put_moves(out, *moves()); }),
       [](Reader& in) {
         const auto got = get_moves(in);
         CHECK(got->form != Moves::Form::blocks || got->source.size() == got->destination.size());
       }},
      {body_of([](Writer& out) { put_moves(out, *spans()); }),
       [](Reader& in) {
         const auto got = get_moves(in);
         for (const auto& run : got->spans) CHECK(run.bytes > 0 && countable(run));
       }},
      {body_of([](Writer& out) { put_select(out, select_spans(*spans())); }),
       [](Reader& in) {
         const auto got = get_select(in);
         for (const auto& span : got.spans) CHECK(span.bytes > 0 && countable({span.offset, 0, span.bytes}));
       }},
      {body_of([](Writer& out) { put_geometry(out, Geometry::of_memory()); }), [](Reader& in) { get_push_source(in).check(); }},
      {body_of([](Writer& out) { put_outcome(out, {Kind::refused, "no", true, true}); }), [](Reader& in) { get_outcome(in); }},
  };
  std::mt19937 random(11);
  int accepted = 0, turned_away = 0;
  for (int round = 0; round < 40'000; ++round) {
    const auto& codec = codecs[random() % codecs.size()];
    auto body = codec.good;
    switch (random() % 4) {
      case 0: body.resize(random() % (body.size() + 1)); break;
      case 1: body.insert(body.begin() + static_cast<std::ptrdiff_t>(random() % body.size()), static_cast<std::uint8_t>(random())); break;
      default:
        for (unsigned k = 0; k <= random() % 4; ++k) {
          constexpr std::uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff};
          body[random() % body.size()] = random() % 2 == 0 ? edges[random() % 5] : static_cast<std::uint8_t>(random());
        }
    }
    body.shrink_to_fit();  // so that a sanitizer sees a byte too far
    ++(refused(body, codec.get) ? turned_away : accepted);
  }
  std::printf("%d mutated bodies were refused, %d made sense\n", turned_away, accepted);
  CHECK(turned_away > 1000 && accepted > 1000);
}

// What passed the decoders is still checked against the caches it meets: a plan never leaves its geometry.
static void mutated_requests_make_plans_inside_their_caches(bool of_spans) {
  Geometry mine;
  mine.layout = Layout::mixed;
  mine.unit_bytes = 64, mine.stride_bytes = 96, mine.count = 16;
  mine.tensors = {{1 << 20, 0, 0}, {1 << 21, 0, 0}};
  if (of_spans) mine.stride_bytes = 64, mine.tensors.pop_back();
  const auto inside = [&](const Geometry& geometry, std::uint32_t first, std::uint32_t tensors, std::uint64_t at, std::uint64_t bytes) {
    CHECK(std::uint64_t{first} + tensors <= geometry.tensors.size());
    CHECK(at <= geometry.tensor_extent() && bytes <= geometry.tensor_extent() - at);
  };
  const std::int64_t from[] = {1, 2, 9}, to[] = {5, 6, 7};
  const std::uint64_t listed[] = {1, 2, 3, 1000, 4, 24, 0, 512, 512};
  const auto by_spans = Moves::make_spans(listed, 3);
  const std::vector<std::shared_ptr<const Moves>> given = of_spans ? std::vector{by_spans} : std::vector<std::shared_ptr<const Moves>>{Moves::make_whole({}, {}), Moves::make_row(3, 7, 32, {}, {}),
                                                           Moves::make_row_to_blocks(2, to, 1, {}, {}), Moves::make_blocks(from, 3, to, 3, {}, {})};
  SourceSelect asked;
  asked.tensor_count = 2, asked.unit_bytes = 64, asked.units = {{2, 3}, {9, 1}};
  if (of_spans) asked = select_spans(*by_spans);
  std::mt19937 random(12);
  int plans = 0;
  for (int round = 0; round < 40'000; ++round) {
    const bool pull = round % 2 == 0;
    auto body = body_of([&](Writer& out) {
      if (pull)
        put_select(out, asked);
      else
        put_geometry(out, mine), put_moves(out, *given[random() % given.size()]);
    });
    for (unsigned k = 0; k <= random() % 3; ++k) body[random() % body.size()] = random() % 2 == 0 ? static_cast<std::uint8_t>(random() % 18) : static_cast<std::uint8_t>(random());
    try {
      Reader in(body);
      if (pull) {
        const auto plan = make_source_plan(mine, get_select(in), -1);
        for (const auto& run : plan.runs) inside(mine, plan.source_first, plan.tensors, run.source, run.bytes);
      } else {
        const auto theirs = get_geometry(in);
        const auto plan = make_plan(theirs, mine, *get_moves(in), -1, false);
        for (const auto& run : plan.runs) inside(mine, plan.destination_first, plan.tensors, run.destination, run.bytes);
        for (const auto& run : plan.runs) inside(theirs, plan.source_first, plan.tensors, run.source, run.bytes);
      }
      ++plans;
    } catch (const WireError&) {
    } catch (const Error&) {
    }
  }
  std::printf("%d of 40000 mutated requests were planned\n", plans);
  CHECK(plans > 1000);
}

int main() {
  a_frame_says_what_it_carries();
  long_texts_are_cut_and_short_ones_refused();
  what_is_put_is_what_is_got();
  moves_of_every_form_travel();
  spans_travel_and_are_checked();
  values_to_be_summed_travel_and_are_checked();
  only_a_push_describes_the_memory_of_a_process();
  lists_longer_than_their_frame_are_refused_before_they_are_made();
  values_out_of_their_range_are_refused();
  mutated_bodies_harm_nobody();
  mutated_requests_make_plans_inside_their_caches(false);
  mutated_requests_make_plans_inside_their_caches(true);
  return TEST_RESULT();
}
