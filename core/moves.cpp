// Lists of units and spans: how the numbers that a caller gives become runs (the Moves of geometry.hpp). Knows no cache.
#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "geometry.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

constexpr std::uint64_t unit_limit = std::uint64_t{1} << 32;

template <class... Words>
[[noreturn]] void invalid(const Words&... words) {
  throw Error(Kind::invalid_argument, sentence(words...));
}

std::uint64_t check_unit_numbers(std::string_view side, const std::int64_t* units, std::size_t n) {
  std::uint64_t highest = 0;
  bool bad = false;
  for (std::size_t i = 0; i < n; ++i) {
    const auto unit = static_cast<std::uint64_t>(units[i]);  // a negative number becomes a huge one
    bad |= unit >= unit_limit;
    highest = std::max(highest, unit);
  }
  if (!bad) return n == 0 ? 0 : highest + 1;
  const auto* wrong = std::find_if(units, units + n, [](std::int64_t unit) {
    return static_cast<std::uint64_t>(unit) >= unit_limit;
  });
  invalid(side, " block ", *wrong, ", number ", wrong - units, " of the list: blocks are numbered from 0 to 4294967295");
}

// The set of destinations already seen. A bitmap if the numbers lie close enough together, else an open-addressing
// table: at most 8 (and 16) bytes per listed block.
class Seen {
 public:
  Seen(std::size_t n, std::uint64_t end) {
    if (end / 64 <= n + 64) {
      bits_.resize(end / 64 + 1);
      return;
    }
    table_.assign(std::bit_ceil(2 * n), empty);
    mask_ = table_.size() - 1;
  }

  bool insert(std::uint32_t unit) {  // false: it was there
    if (!bits_.empty()) {
      std::uint64_t& word = bits_[unit / 64];
      const std::uint64_t bit = std::uint64_t{1} << (unit % 64);
      const bool fresh = (word & bit) == 0;
      word |= bit;
      return fresh;
    }
    if (unit == empty) return !std::exchange(empty_seen_, true);
    std::size_t at = ((unit * 0x9e3779b97f4a7c15ULL) >> 32) & mask_;
    for (; table_[at] != empty; at = (at + 1) & mask_) {
      if (table_[at] == unit) return false;
    }
    table_[at] = unit;
    return true;
  }

 private:
  static constexpr std::uint32_t empty = 0xffffffff;
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> table_;
  std::size_t mask_ = 0;
  bool empty_seen_ = false;
};

// Which pairs are overwritten by a later one; empty if none is.
std::vector<bool> find_overwritten(const std::int64_t* destination, std::size_t n, std::uint64_t end) {
  std::vector<bool> dropped;
  if (std::adjacent_find(destination, destination + n, std::greater_equal<>()) == destination + n) return dropped;
  Seen seen(n, end);
  for (std::size_t i = n; i-- > 0;) {
    if (seen.insert(static_cast<std::uint32_t>(destination[i]))) continue;
    if (dropped.empty()) dropped.resize(n);
    dropped[i] = true;
  }
  return dropped;
}

// Calls run(source, destination, count) for every run of neighbouring pairs. With `apart`, a run stays shorter than the
// distance between its two sides, so that within one cache it never reads what it has written.
template <class Call>
void for_each_pair_run(const std::int64_t* source, const std::int64_t* destination, std::size_t n,
                       const std::vector<bool>& dropped, bool apart, Call&& run) {
  std::int64_t from = 0, to = 0, count = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (!dropped.empty() && dropped[i]) continue;
    const bool neighbours = count > 0 && source[i] == from + count && destination[i] == to + count;
    const std::int64_t distance = from > to ? from - to : to - from;
    if (neighbours && !(apart && distance != 0 && count >= distance)) {
      ++count;
      continue;
    }
    if (count > 0) run(from, to, count);
    from = source[i];
    to = destination[i];
    count = 1;
  }
  if (count > 0) run(from, to, count);
}

UnitRun unit_run(std::int64_t first, std::int64_t count) {
  return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count)};
}

void check_list_length(std::size_t n, std::string_view what = "blocks") {
  if (n >= unit_limit) invalid(n, " ", what, " in one list: at most 4294967295 are possible");
}

}  // namespace

std::shared_ptr<const Moves> Moves::make_whole(TensorRange source, TensorRange destination) {
  auto moves = std::make_shared<Moves>();
  moves->form = Form::whole;
  moves->source_tensors = source;
  moves->destination_tensors = destination;
  return moves;
}

std::shared_ptr<const Moves> Moves::make_row(std::int64_t source_row, std::uint32_t destination_row,
                                             std::int64_t size_bytes, TensorRange source, TensorRange destination) {
  if (source_row < -1) invalid("source row ", source_row, ": rows are numbered from 0; -1 is the row that the key names");
  if (size_bytes < -1 || size_bytes == 0) invalid("size ", size_bytes, ": it must be positive, or -1 for the whole row");
  auto moves = std::make_shared<Moves>();
  moves->form = Form::row;
  moves->source_tensors = source;
  moves->destination_tensors = destination;
  moves->source_row = source_row;
  moves->destination_row = destination_row;
  moves->size_bytes = size_bytes;
  moves->units = 1;
  moves->source_end = static_cast<std::uint64_t>(source_row + 1);
  moves->destination_end = std::uint64_t{destination_row} + 1;
  return moves;
}

std::shared_ptr<const Moves> Moves::make_blocks(const std::int64_t* source, std::size_t n_source,
                                                const std::int64_t* destination, std::size_t n_destination,
                                                TensorRange source_tensors, TensorRange destination_tensors,
                                                bool keep_order) {
  if (n_source != n_destination) {
    invalid(n_source, " source blocks and ", n_destination, " destination blocks: they are pairs");
  }
  const std::size_t n = n_source;
  check_list_length(n);
  auto moves = std::make_shared<Moves>();
  moves->form = Form::blocks;
  moves->source_tensors = source_tensors;
  moves->destination_tensors = destination_tensors;
  moves->source_end = check_unit_numbers("source", source, n);
  moves->destination_end = check_unit_numbers("destination", destination, n);
  auto dropped = find_overwritten(destination, n, moves->destination_end);
  moves->duplicates = !dropped.empty();
  if (keep_order) dropped.clear();
  if (!dropped.empty()) {
    std::vector<std::int64_t> overwritten_sources;
    for (std::size_t i = 0; i < n; ++i)
      if (dropped[i]) overwritten_sources.push_back(source[i]);
    moves->overwritten = merge_units(overwritten_sources.data(), overwritten_sources.size());
  }

  std::size_t runs = 0;  // counted first: exact vectors instead of grown ones
  for_each_pair_run(source, destination, n, dropped, keep_order, [&](auto, auto, auto) { ++runs; });
  moves->source.reserve(runs);
  moves->destination.reserve(runs);
  for_each_pair_run(source, destination, n, dropped, keep_order, [&](auto from, auto to, auto count) {
    moves->source.push_back(unit_run(from, count));
    moves->destination.push_back(unit_run(to, count));
    moves->units += static_cast<std::uint64_t>(count);
  });
  if (n > 0) moves->last_listed = static_cast<std::uint32_t>(destination[n - 1]);
  return moves;
}

std::shared_ptr<const Moves> Moves::make_in_window_order(const std::int64_t* mine, std::size_t n, TensorRange source_tensors,
                                                         TensorRange destination_tensors) {
  check_list_length(n);
  auto moves = std::make_shared<Moves>();
  moves->form = Form::in_window_order;
  moves->source_tensors = source_tensors;
  moves->destination_tensors = destination_tensors;
  moves->source = merge_units(mine, n);
  moves->units = n;
  return moves;
}

std::shared_ptr<const Moves> in_window_order(const Moves& moves, const std::vector<UnitRun>& window, bool mover_owns_destination) {
  const auto one_by_one = [](const std::vector<UnitRun>& runs) {
    std::vector<std::int64_t> units;
    for (const UnitRun& run : runs)
      for (std::uint32_t i = 0; i < run.count; ++i) units.push_back(std::int64_t{run.first} + i);
    return units;
  };
  const auto mine = one_by_one(moves.source), theirs = one_by_one(window);
  if (mine.size() != theirs.size())
    invalid("the window is of ", theirs.size(), " blocks, and ", mine.size(), " are listed beside it: give one for each");
  const auto& from = mover_owns_destination ? theirs : mine;
  const auto& to = mover_owns_destination ? mine : theirs;
  return Moves::make_blocks(from.data(), from.size(), to.data(), to.size(), moves.source_tensors, moves.destination_tensors);
}

std::shared_ptr<const Moves> Moves::make_row_to_blocks(std::int64_t source_row, const std::int64_t* destination,
                                                       std::size_t n, TensorRange source,
                                                       TensorRange destination_tensors) {
  if (source_row < -1) invalid("source row ", source_row, ": rows are numbered from 0; -1 is the row that the key names");
  check_list_length(n);
  auto moves = std::make_shared<Moves>();
  moves->form = Form::row_to_blocks;
  moves->source_tensors = source;
  moves->destination_tensors = destination_tensors;
  moves->source_row = source_row;
  moves->source_end = static_cast<std::uint64_t>(source_row + 1);
  moves->destination_end = check_unit_numbers("destination", destination, n);
  moves->duplicates = !find_overwritten(destination, n, moves->destination_end).empty();
  moves->destination = merge_units(destination, n);
  moves->units = n;
  if (n > 0) moves->last_listed = static_cast<std::uint32_t>(destination[n - 1]);
  return moves;
}

std::shared_ptr<const Moves> Moves::make_spans(const std::uint64_t* listed, std::size_t n) {
  check_list_length(n, "spans");
  auto moves = std::make_shared<Moves>();
  moves->form = Form::spans;
  moves->units = n;
  moves->spans.resize(n);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Run run{listed[3 * i], listed[3 * i + 1], listed[3 * i + 2]};
    if (run.bytes == 0) invalid("span ", i, " has 0 bytes: leave it out");
    if (!countable(run)) invalid("span ", i, ": its offsets, its bytes and its ends on both sides must lie in 0 .. 2^63-1");
    total += run.bytes;  // both below 2^63
    if (total >> 63 != 0) invalid("the bytes of all spans up to span ", i, " are more than can be counted");
    moves->spans[i] = run;
  }
  return moves;
}

bool countable(const Run& run) noexcept {
  return ((run.source | run.destination | run.bytes | (run.source + run.bytes) | (run.destination + run.bytes)) >> 63) == 0;
}

std::vector<UnitRun> merge_units(const std::int64_t* units, std::size_t n) {
  check_unit_numbers("listed", units, n);
  std::vector<UnitRun> runs;
  for (std::size_t i = 0; i < n; ++i) {
    if (!runs.empty() && units[i] == std::int64_t{runs.back().first} + runs.back().count) {
      ++runs.back().count;
    } else {
      runs.push_back(unit_run(units[i], 1));
    }
  }
  return runs;
}

namespace {

// Units [first, end) of a window, ascending, neighbours joined.
struct UnitRange {
  std::uint64_t first, end;
};

std::vector<UnitRange> joined(const std::vector<UnitRun>& window_units) {
  std::vector<UnitRange> ranges;
  ranges.reserve(window_units.size());
  for (const UnitRun& run : window_units) ranges.push_back({run.first, std::uint64_t{run.first} + run.count});
  std::sort(ranges.begin(), ranges.end(), [](const UnitRange& a, const UnitRange& b) { return a.first < b.first; });
  std::size_t kept = 0;
  for (const UnitRange& range : ranges) {
    if (kept > 0 && range.first <= ranges[kept - 1].end) {
      ranges[kept - 1].end = std::max(ranges[kept - 1].end, range.end);
    } else {
      ranges[kept++] = range;
    }
  }
  ranges.resize(kept);
  return ranges;
}

// How far the window reaches without a gap from `unit` on: its first unit behind that is not in the window, or 0 if `unit` is
// not among those of a range that begins at or before it.
std::uint64_t covered_from(const std::vector<UnitRange>& ranges, std::uint64_t unit) {
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), unit,
                                      [](std::uint64_t one, const UnitRange& range) { return one < range.first; });
  return after == ranges.begin() ? 0 : std::prev(after)->end;
}

}  // namespace

void check_inside(const std::vector<UnitRun>& window_units, const std::vector<UnitRun>& units, std::string_view label) {
  const auto ranges = joined(window_units);
  for (const UnitRun& run : units) {
    if (run.count == 0) continue;
    const auto covered = covered_from(ranges, run.first);
    if (covered >= std::uint64_t{run.first} + run.count) continue;
    throw Error(Kind::not_found,
                sentence("block ", std::max<std::uint64_t>(run.first, covered), " of ", label, " is not in the window"));
  }
}

void check_inside(const std::vector<UnitRun>& window_units, const std::vector<ByteSpan>& spans, const Geometry& geometry) {
  check_spannable("the window of", geometry);
  const auto ranges = joined(window_units);
  const auto unit_bytes = geometry.unit_bytes;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto [offset, bytes] = spans[i];
    if (bytes == 0) continue;
    const auto first = offset / unit_bytes, end = (offset + bytes - 1) / unit_bytes + 1;
    const auto covered = covered_from(ranges, first);
    if (covered >= end) continue;
    throw Error(Kind::not_found, sentence("span ", i, ", ", bytes, " bytes from byte ", offset, " of ", geometry.label(), " on, does not lie in the window: block ",
                                          std::max(first, covered), " is not in it"));
  }
}

std::vector<ByteSpan> source_spans(const Moves& moves) {
  std::vector<ByteSpan> spans;
  spans.reserve(moves.spans.size());
  for (const Run& run : moves.spans) spans.push_back({run.source, run.bytes});
  return spans;
}

std::vector<ByteSpan> destination_spans(const Moves& moves) {
  std::vector<ByteSpan> spans;
  spans.reserve(moves.spans.size());
  for (const Run& run : moves.spans) spans.push_back({run.destination, run.bytes});
  return spans;
}

}  // namespace kvferry
