#include "geometry.hpp"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>

#include "sentence.hpp"

namespace kvferry {
namespace {

constexpr std::uint64_t unit_limit = std::uint64_t{1} << 32;  // units and tensors are numbered with 32 bits

template <class... Words>
[[noreturn]] void invalid(const Words&... words) {
  throw Error(Kind::invalid_argument, sentence(words...));
}

std::string_view layout_name(Layout layout) {
  switch (layout) {
    case Layout::rows: return "rows";
    case Layout::blocks: return "blocks";
    case Layout::mixed: return "mixed";
    case Layout::memory: return "memory";
  }
  return "unknown";
}

// --- checks of one side ----------------------------------------------------------------------------------------------

void need_layout(std::string_view side, const Geometry& geometry, Layout wanted) {
  if (geometry.layout == wanted || geometry.layout == Layout::mixed) return;
  invalid(side, " ", geometry.label(), " is used by ", layout_name(wanted), " but was registered with layout ",
          layout_name(geometry.layout));
}

struct Tensors {
  std::uint32_t first = 0, count = 0;
};

Tensors take_tensors(std::string_view side, const Geometry& geometry, TensorRange range) {
  const std::uint64_t all = geometry.tensors.size();
  if (range.first >= all || range.count < -1 || range.count == 0 ||
      (range.count > 0 && static_cast<std::uint64_t>(range.count) > all - range.first)) {
    invalid(side, " ", geometry.label(), " has ", all, " tensors: ", range.count, " from tensor ", range.first,
            " were asked for");
  }
  const std::uint64_t count = range.count < 0 ? all - range.first : static_cast<std::uint64_t>(range.count);
  return {range.first, static_cast<std::uint32_t>(count)};
}

std::uint64_t source_row(const Geometry& source, std::int64_t row, std::int64_t key_row) {
  if (row == -1) {
    if (key_row < 0) {
      invalid("source row -1 of ", source.label(), " means the row that a request or prefix key names: name a row");
    }
    row = key_row;
  }
  if (row < 0) invalid("source row ", row, " of ", source.label(), ": rows are numbered from 0");
  if (static_cast<std::uint64_t>(row) >= source.count) {
    throw Error(Kind::not_found,
                sentence("row ", row, " of source ", source.label(), " does not exist: it has ", source.count, " rows"));
  }
  return static_cast<std::uint64_t>(row);
}

void check_destination_row(const Geometry& destination, std::uint32_t row) {
  if (row < destination.count) return;
  invalid("destination row ", row, " of ", destination.label(), " does not exist: it has ", destination.count, " rows");
}

void check_row_bytes(std::string_view side, const Geometry& geometry, std::uint64_t bytes) {
  if (bytes == 0) invalid("0 bytes of a row of ", side, " ", geometry.label(), ": size must be positive, or -1");
  if (bytes <= geometry.unit_bytes) return;
  invalid(bytes, " bytes do not fit in a row of ", side, " ", geometry.label(), ", which has ", geometry.unit_bytes);
}

// Spans need no look at what was registered how; what has a form does.
void need_cache(std::string_view side, const Geometry& geometry) {
  if (geometry.layout != Layout::memory) return;
  invalid(side, " ", geometry.label(), " has no blocks and no rows: it is moved by spans");
}

void check_span(std::string_view side, const Geometry& geometry, std::size_t number, std::uint64_t offset, std::uint64_t bytes) {
  const auto extent = geometry.tensor_extent();
  if (offset <= extent && bytes <= extent - offset) return;
  invalid("span ", number, " of ", side, " ", geometry.label(), ", ", bytes, " bytes from byte ", offset, " on, does not lie inside its ", extent,
          " bytes");
}

// --- making runs -----------------------------------------------------------------------------------------------------

// One side of a run of units: offsets in a tensor, or the position in a stream (whose units lie side by side).
struct Side {
  std::uint64_t stride;
  std::uint64_t unit_bytes;
  bool dense() const noexcept { return stride == unit_bytes; }
};

void append_units(std::vector<Run>& runs, Side source, std::uint64_t source_first, Side destination,
                  std::uint64_t destination_first, std::uint64_t count) {
  const std::uint64_t unit = source.unit_bytes;
  if (source.dense() && destination.dense()) {
    if (count > 0) runs.push_back({source_first * unit, destination_first * unit, count * unit});
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    runs.push_back({(source_first + i) * source.stride, (destination_first + i) * destination.stride, unit});
  }
}

std::size_t runs_needed(const std::vector<UnitRun>& units, std::uint64_t unit_count, bool dense) {
  return dense ? units.size() : static_cast<std::size_t>(unit_count);
}

std::uint64_t count_units(const std::vector<UnitRun>& runs) {
  std::uint64_t units = 0;
  for (const UnitRun& run : runs) units += run.count;
  return units;
}

void finish(Plan& plan, const Geometry& geometry) {
  std::uint64_t per_tensor = 0, total = 0;
  bool over = false;
  for (const Run& run : plan.runs) over |= __builtin_add_overflow(per_tensor, run.bytes, &per_tensor);
  over |= __builtin_mul_overflow(per_tensor, std::uint64_t{plan.tensors}, &total);
  if (over || total > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    invalid("the bytes asked of ", geometry.label(), " are more than can be counted");
  }
  plan.bytes_per_tensor = per_tensor;
}

Plan start_plan(const Geometry& source, const Geometry& destination, const Moves& moves) {
  const Tensors from = take_tensors("source", source, moves.source_tensors);
  const Tensors to = take_tensors("destination", destination, moves.destination_tensors);
  if (from.count != to.count) {
    invalid("source ", source.label(), " gives ", from.count, " tensors, destination ", destination.label(), " takes ",
            to.count, ": they must be equal");
  }
  Plan plan;
  plan.source_first = from.first;
  plan.destination_first = to.first;
  plan.tensors = from.count;
  return plan;
}

void check_equal_units(const Geometry& source, const Geometry& destination) {
  if (source.unit_bytes == destination.unit_bytes) return;
  invalid("source ", source.label(), " has units of ", source.unit_bytes, " bytes, destination ", destination.label(),
          " of ", destination.unit_bytes, ": they must be equal");
}

void plan_whole(Plan& plan, const Geometry& source, const Geometry& destination) {
  check_equal_units(source, destination);
  if (source.count != destination.count) {
    invalid("source ", source.label(), " has ", source.count, " units, destination ", destination.label(), " has ",
            destination.count, ": moving the whole needs equal counts");
  }
  append_units(plan.runs, {source.stride_bytes, source.unit_bytes}, 0,
               {destination.stride_bytes, destination.unit_bytes}, 0, source.count);
}

// Neighbours on both sides become one run.
void append_run(std::vector<Run>& runs, const Run& run) {
  if (!runs.empty()) {
    Run& last = runs.back();
    if (last.source + last.bytes == run.source && last.destination + last.bytes == run.destination) {
      last.bytes += run.bytes;
      return;
    }
  }
  runs.push_back(run);
}

void plan_spans(Plan& plan, const Geometry& source, const Geometry& destination, const Moves& moves) {
  plan.runs.reserve(moves.spans.size());
  for (std::size_t i = 0; i < moves.spans.size(); ++i) {
    const Run& span = moves.spans[i];
    check_span("source", source, i, span.source, span.bytes);
    check_span("destination", destination, i, span.destination, span.bytes);
    append_run(plan.runs, span);
  }
}

void plan_row(Plan& plan, const Geometry& source, const Geometry& destination, const Moves& moves,
              std::int64_t key_row, bool mover_owns_destination) {
  need_layout("source", source, Layout::rows);
  need_layout("destination", destination, Layout::rows);
  const std::uint64_t own = mover_owns_destination ? destination.unit_bytes : source.unit_bytes;
  const std::uint64_t bytes = moves.size_bytes < 0 ? own : static_cast<std::uint64_t>(moves.size_bytes);
  check_destination_row(destination, moves.destination_row);
  check_row_bytes("destination", destination, bytes);
  const std::uint64_t row = source_row(source, moves.source_row, key_row);
  check_row_bytes("source", source, bytes);
  plan.runs.push_back({row * source.stride_bytes, moves.destination_row * destination.stride_bytes, bytes});
}

void plan_blocks(Plan& plan, const Geometry& source, const Geometry& destination, const Moves& moves) {
  need_layout("source", source, Layout::blocks);
  need_layout("destination", destination, Layout::blocks);
  check_equal_units(source, destination);
  if (moves.source.size() != moves.destination.size()) invalid("source and destination name different numbers of blocks");
  check_blocks("source", source, moves.source);
  check_blocks("source", source, moves.overwritten);
  check_blocks("destination", destination, moves.destination);
  const Side from{source.stride_bytes, source.unit_bytes}, to{destination.stride_bytes, destination.unit_bytes};
  plan.runs.reserve(runs_needed(moves.source, count_units(moves.source), from.dense() && to.dense()));
  for (std::size_t i = 0; i < moves.source.size(); ++i) {
    if (moves.source[i].count != moves.destination[i].count) invalid("source and destination runs differ in length");
    append_units(plan.runs, from, moves.source[i].first, to, moves.destination[i].first, moves.source[i].count);
  }
}

bool names_each_once(std::vector<UnitRun> runs) {
  std::sort(runs.begin(), runs.end(), [](UnitRun a, UnitRun b) { return a.first < b.first; });
  return std::adjacent_find(runs.begin(), runs.end(), [](UnitRun a, UnitRun b) {
           return std::uint64_t{a.first} + a.count > b.first;
         }) == runs.end();
}

// Copy threads may take runs in any order, so of two writers of one block only the later may stay. The last listed block
// may be a partial one; what an earlier writer put behind its end stays visible then.
void drop_overwritten(std::vector<Run>& runs) {
  std::unordered_set<std::uint64_t> written;
  std::vector<Run> kept;
  const Run last = runs.back();
  bool tail_written = false;
  for (std::size_t i = runs.size(); i-- > 0;) {
    Run run = runs[i];
    if (written.insert(run.destination).second) {
      kept.push_back(run);
    } else if (run.destination == last.destination && run.bytes > last.bytes && !tail_written) {
      run.source += last.bytes;
      run.destination += last.bytes;
      run.bytes -= last.bytes;
      kept.push_back(run);
      tail_written = true;
    }
  }
  std::reverse(kept.begin(), kept.end());
  runs = std::move(kept);
}

void plan_row_to_blocks(Plan& plan, const Geometry& source, const Geometry& destination, const Moves& moves,
                        std::int64_t key_row) {
  need_layout("source", source, Layout::rows);
  need_layout("destination", destination, Layout::blocks);
  check_blocks("destination", destination, moves.destination);
  const std::uint64_t row = source_row(source, moves.source_row, key_row);
  const std::uint64_t block = destination.unit_bytes;
  const std::uint64_t needed = (source.unit_bytes - 1) / block + 1;
  const std::uint64_t listed = count_units(moves.destination);
  if (listed > needed) {
    invalid("a row of source ", source.label(), " (", source.unit_bytes, " bytes) fills ", needed, " blocks of ", block,
            " bytes of destination ", destination.label(), ": ", listed, " were listed");
  }
  const std::uint64_t start = row * source.stride_bytes;
  const bool once = names_each_once(moves.destination);
  std::uint64_t position = 0;
  for (const UnitRun& run : moves.destination) {
    // Blocks side by side are one run, unless one of them may be named again.
    const std::uint64_t step = once && destination.stride_bytes == block ? run.count : 1;
    for (std::uint64_t i = 0; i < run.count; i += step) {
      const std::uint64_t bytes = std::min(step * block, source.unit_bytes - position);
      plan.runs.push_back({start + position, (run.first + i) * destination.stride_bytes, bytes});
      position += bytes;
    }
  }
  if (!once) drop_overwritten(plan.runs);
}

}  // namespace

// --- Geometry --------------------------------------------------------------------------------------------------------

Geometry Geometry::of_memory() {
  Geometry geometry;
  geometry.name = "MEMORY";
  geometry.layout = Layout::memory;
  geometry.unit_bytes = geometry.stride_bytes = 1;
  geometry.count = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  geometry.tensors = {TensorPlace{}};
  return geometry;
}

bool Geometry::mappable() const noexcept {
  return !tensors.empty() &&
         std::all_of(tensors.begin(), tensors.end(), [](const TensorPlace& place) { return place.segment != 0; });
}

std::string Geometry::label() const {
  if (cache_id == 0) return shown(name);
  return name.empty() ? sentence("cache ", cache_id) : sentence("cache ", cache_id, " '", shown(name), "'");
}

void Geometry::check() const {
  if (layout == Layout::memory) {
    const bool is_it = cache_id == 0 && kind == "host" && unit_bytes == 1 && stride_bytes == 1 && count == of_memory().count &&
                       tensors.size() == 1 && tensors[0].address == 0 && tensors[0].segment == 0 && tensors[0].offset == 0;
    if (!is_it) invalid(label(), " is neither a cache nor the memory of a process");
    return;
  }
  if (static_cast<std::uint8_t>(layout) > 2) invalid(label(), ": layout ", static_cast<int>(layout), " is unknown");
  if (tensors.empty()) invalid(label(), " has no tensors");
  if (tensors.size() >= unit_limit) invalid(label(), " has ", tensors.size(), " tensors: too many");
  if (unit_bytes == 0) invalid(label(), ": a unit of 0 bytes");
  if (count == 0) invalid(label(), " has 0 units");
  if (count >= unit_limit) invalid(label(), " has ", count, " units: at most 4294967295 are possible");
  if (stride_bytes < unit_bytes) {
    invalid(label(), ": the stride of ", stride_bytes, " bytes is less than the unit of ", unit_bytes);
  }
  std::uint64_t extent = 0, all = 0;
  if (__builtin_mul_overflow(count, stride_bytes, &extent) ||
      __builtin_mul_overflow(extent, std::uint64_t{tensors.size()}, &all) ||
      all > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    invalid(label(), ": ", tensors.size(), " tensors of ", count, " units with a stride of ", stride_bytes,
            " bytes are more than can be addressed");
  }
  extent = tensor_extent();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::uint64_t end = 0;
    if (tensors[i].address == 0) invalid(label(), ": tensor ", i, " has address 0");
    if (__builtin_add_overflow(tensors[i].address, extent, &end) ||
        __builtin_add_overflow(tensors[i].offset, extent, &end)) {
      invalid(label(), ": tensor ", i, " of ", extent, " bytes reaches past the end of the address space");
    }
  }
}

// --- plans -----------------------------------------------------------------------------------------------------------

void check_blocks(std::string_view side, const Geometry& geometry, const std::vector<UnitRun>& units) {
  for (const UnitRun& run : units) {
    const std::uint64_t end = std::uint64_t{run.first} + run.count;
    if (end <= geometry.count) continue;
    invalid(side, " block ", std::max<std::uint64_t>(run.first, geometry.count), " of ", geometry.label(),
            " does not exist: it has ", geometry.count, " blocks");
  }
}

Plan make_plan(const Geometry& source, const Geometry& destination, const Moves& moves, std::int64_t key_row,
               bool mover_owns_destination) {
  const auto check_side = moves.form == Moves::Form::spans ? check_spannable : need_cache;
  check_side("source", source);
  check_side("destination", destination);
  Plan plan = start_plan(source, destination, moves);
  switch (moves.form) {
    case Moves::Form::whole: plan_whole(plan, source, destination); break;
    case Moves::Form::row: plan_row(plan, source, destination, moves, key_row, mover_owns_destination); break;
    case Moves::Form::blocks: plan_blocks(plan, source, destination, moves); break;
    case Moves::Form::row_to_blocks: plan_row_to_blocks(plan, source, destination, moves, key_row); break;
    case Moves::Form::spans: plan_spans(plan, source, destination, moves); break;
    default: invalid("form ", static_cast<int>(moves.form), " of a move is unknown");
  }
  finish(plan, destination);
  return plan;
}

Plan make_source_plan(const Geometry& source, const SourceSelect& select, std::int64_t key_row) {
  const std::uint64_t all = source.tensors.size();
  const std::uint64_t first = select.tensor_first;
  if (select.tensor_count == 0 || first >= all || select.tensor_count > all - first ||
      (select.all_tensors && select.tensor_count != all - first)) {
    invalid("source ", source.label(), " has ", all, " tensors: ", select.all_tensors ? "all" : "some", " from tensor ",
            first, " were asked for, and expected to be ", select.tensor_count);
  }
  Plan plan;
  plan.source_first = select.tensor_first;
  plan.tensors = select.tensor_count;

  if (select.by_spans) {
    check_spannable("source", source);
    plan.runs.reserve(select.spans.size());
    std::uint64_t position = 0;
    for (std::size_t i = 0; i < select.spans.size(); ++i) {
      const auto& [offset, bytes] = select.spans[i];
      check_span("source", source, i, offset, bytes);
      append_run(plan.runs, {offset, position, bytes});
      if (__builtin_add_overflow(position, bytes, &position)) break;  // said by finish(), which counts them again
    }
    finish(plan, source);
    return plan;
  }
  if (select.unit_bytes == 0) {
    need_layout("source", source, Layout::rows);
    const std::uint64_t row = source_row(source, select.row, key_row);
    check_row_bytes("source", source, select.row_bytes);
    plan.runs.push_back({row * source.stride_bytes, 0, select.row_bytes});
    finish(plan, source);
    return plan;
  }
  if (select.unit_bytes != source.unit_bytes) {
    invalid("source ", source.label(), " has units of ", source.unit_bytes, " bytes, the destination of ",
            select.unit_bytes, ": they must be equal");
  }
  const Side from{source.stride_bytes, source.unit_bytes};
  const Side stream{source.unit_bytes, source.unit_bytes};
  if (select.whole_count > 0) {
    if (select.whole_count != source.count) {
      invalid("source ", source.label(), " has ", source.count, " units, the destination has ", select.whole_count,
              ": moving the whole needs equal counts");
    }
    append_units(plan.runs, from, 0, stream, 0, source.count);
  } else {
    need_layout("source", source, Layout::blocks);
    check_blocks("source", source, select.units);
    plan.runs.reserve(runs_needed(select.units, count_units(select.units), from.dense()));
    std::uint64_t position = 0;
    for (const UnitRun& run : select.units) {
      append_units(plan.runs, from, run.first, stream, position, run.count);
      position += run.count;
    }
  }
  finish(plan, source);
  return plan;
}

SourceSelect select_spans(const Moves& moves) {
  SourceSelect select;
  select.tensor_count = 1;
  select.by_spans = true;
  select.spans = source_spans(moves);
  return select;
}

void check_spannable(std::string_view side, const Geometry& geometry) {
  if (geometry.tensors.size() != 1)
    invalid(side, " ", geometry.label(), " has ", geometry.tensors.size(), " tensors: spans are of caches that have one");
  if (geometry.stride_bytes != geometry.unit_bytes)
    invalid(side, " ", geometry.label(), " has gaps between its units (", geometry.unit_bytes, " bytes in ", geometry.stride_bytes,
            "): spans are of caches that have none");
}

DestinationPlan make_destination_plan(const Geometry& destination, const Moves& moves) {
  if (moves.form != Moves::Form::spans) need_cache("destination", destination);
  const Tensors to = take_tensors("destination", destination, moves.destination_tensors);
  DestinationPlan out;
  out.plan.source_first = moves.source_tensors.first;
  out.plan.destination_first = to.first;
  out.plan.tensors = to.count;
  out.select.tensor_first = moves.source_tensors.first;
  out.select.tensor_count = to.count;
  out.select.all_tensors = moves.source_tensors.count == -1;
  if (!out.select.all_tensors && moves.source_tensors.count != std::int64_t{to.count}) {
    invalid(moves.source_tensors.count, " tensors of the source were asked for, destination ", destination.label(),
            " takes ", to.count, ": they must be equal");
  }
  const Side into{destination.stride_bytes, destination.unit_bytes};
  const Side stream{destination.unit_bytes, destination.unit_bytes};
  std::vector<Run>& runs = out.plan.runs;
  switch (moves.form) {
    case Moves::Form::whole:
      out.select.unit_bytes = destination.unit_bytes;
      out.select.whole_count = destination.count;
      append_units(runs, stream, 0, into, 0, destination.count);
      break;
    case Moves::Form::row: {
      need_layout("destination", destination, Layout::rows);
      const auto bytes = moves.size_bytes < 0 ? destination.unit_bytes : static_cast<std::uint64_t>(moves.size_bytes);
      check_destination_row(destination, moves.destination_row);
      check_row_bytes("destination", destination, bytes);
      out.select.row = moves.source_row;
      out.select.row_bytes = bytes;
      runs.push_back({0, moves.destination_row * destination.stride_bytes, bytes});
      break;
    }
    case Moves::Form::blocks: {
      need_layout("destination", destination, Layout::blocks);
      check_blocks("destination", destination, moves.destination);
      out.select.unit_bytes = destination.unit_bytes;
      out.select.units = moves.source;
      runs.reserve(runs_needed(moves.destination, count_units(moves.destination), into.dense()));
      std::uint64_t position = 0;
      for (const UnitRun& run : moves.destination) {
        append_units(runs, stream, position, into, run.first, run.count);
        position += run.count;
      }
      break;
    }
    case Moves::Form::spans: {
      check_spannable("destination", destination);
      out.select = select_spans(moves);
      runs.reserve(moves.spans.size());
      std::uint64_t position = 0;
      for (std::size_t i = 0; i < moves.spans.size(); ++i) {
        const Run& span = moves.spans[i];
        check_span("destination", destination, i, span.destination, span.bytes);
        append_run(runs, {position, span.destination, span.bytes});
        position += span.bytes;
      }
      break;
    }
    default:
      throw Error(Kind::internal, "the sizes of a row spread over blocks depend on the source: not planned from one side");
  }
  finish(out.plan, destination);
  return out;
}

// --- PlanCursor ------------------------------------------------------------------------------------------------------

PlanCursor::Span PlanCursor::next(std::uint64_t max_bytes) noexcept {
  const Run& run = plan_->runs[run_];
  const std::uint64_t bytes = std::min(run.bytes - in_run_, std::max<std::uint64_t>(max_bytes, 1));
  const Span span{tensor_, run.source + in_run_, run.destination + in_run_, bytes};
  position_ += bytes;
  in_run_ += bytes;
  if (in_run_ == run.bytes) {
    in_run_ = 0;
    if (++run_ == plan_->runs.size()) {
      run_ = 0;
      ++tensor_;
    }
  }
  return span;
}

PlanCursor PlanCursor::split(std::uint64_t max_bytes, std::uint32_t max_spans, std::uint64_t& taken) noexcept {
  const PlanCursor piece = *this;
  taken = 0;
  for (std::uint32_t spans = 0; spans < max_spans && taken < max_bytes && !done(); ++spans) {
    taken += next(max_bytes - taken).bytes;
  }
  return piece;
}

}  // namespace kvferry
