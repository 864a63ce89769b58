// Geometry: how rows, blocks, layers and listed spans become byte runs, on both sides at once. Pure values; knows no links,
// no threads and touches no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checksum.hpp"
#include "copier.hpp"
#include "error.hpp"
#include "guard.hpp"

namespace kvferry {

inline constexpr std::size_t longest_name = 4096;  // of a cache, in bytes

// memory: no cache, but all addresses of a process, which one operation of that process reads or writes by spans. Nobody
// can name it from outside.
enum class Layout : std::uint8_t { rows = 0, blocks = 1, mixed = 2, memory = 3 };

// Where one tensor of a cache lies. `segment` 0: caller-owned, `address` is the owner's; else an offset in that segment is
// known as well (`offset`) and peers may map it.
struct TensorPlace {
  std::uint64_t address = 0;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

// The shape of a cache as spans see it. Unit = row or block (dim 0).
struct Geometry {
  std::uint64_t cache_id = 0;
  std::string name;
  Layout layout = Layout::blocks;
  std::string kind = "host";
  std::uint64_t unit_bytes = 0;
  std::uint64_t stride_bytes = 0;  // distance between units, >= unit_bytes
  std::uint64_t count = 0;         // units per tensor
  std::vector<TensorPlace> tensors;

  std::uint64_t tensor_extent() const noexcept {  // bytes from a tensor's first to behind its last byte
    return count == 0 ? 0 : (count - 1) * stride_bytes + unit_bytes;
  }
  static Geometry of_memory();     // Layout::memory: one tensor, at address 0
  bool mappable() const noexcept;  // every tensor lies in a segment
  // Throws Error(invalid_argument) naming what is wrong: zero sizes, stride < unit, overflow of any product or sum,
  // address 0, more than 2^32-1 units, no tensors. Of Layout::memory there is one only.
  void check() const;
  std::string label() const;  // "cache 3 'kv'"
};

struct TensorRange {
  std::uint32_t first = 0;
  std::int64_t count = -1;  // -1: all from `first`
  bool operator==(const TensorRange&) const = default;
};

struct UnitRun {  // `count` neighbouring units from `first`
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool operator==(const UnitRun&) const = default;
};

// A byte run on both sides, as offsets from the start of each tensor; the same for every tensor moved.
struct Run {
  std::uint64_t source = 0, destination = 0, bytes = 0;
  bool operator==(const Run&) const = default;
};

bool countable(const Run& run) noexcept;  // offsets, bytes and ends below 2^63

struct ByteSpan {  // of one side
  std::uint64_t offset = 0, bytes = 0;
  bool operator==(const ByteSpan&) const = default;
};

// What the caller asked for: which units go where, the same for every tensor moved. Immutable, shared by operations.
struct Moves {
  enum class Form : std::uint8_t { whole = 0, row = 1, blocks = 2, row_to_blocks = 3, spans = 4, in_window_order = 5 };
  Form form = Form::whole;
  TensorRange source_tensors, destination_tensors;
  std::int64_t source_row = 0;  // -1: the row that the key names
  std::uint32_t destination_row = 0;  // key_row_there: the row that the key of a push names
  std::int64_t size_bytes = -1;
  // blocks: pairs, neighbours merged (source and destination both + 1), a destination named twice keeps its last writer
  // (unless keep_order). row_to_blocks: `destination` only, in the given order.
  std::vector<UnitRun> source, destination;
  std::vector<Run> spans;  // spans: as the caller lists them, of each side's only tensor
  std::shared_ptr<ValueSums> sums;  // spans: whoever sends or copies them takes these, if it can; of one transfer at a time
  std::vector<UnitRun> overwritten;  // blocks: the sources of pairs that a later one overwrites, to be checked and not to be read
  std::uint64_t units = 0;
  std::uint64_t source_end = 0, destination_end = 0;  // highest unit + 1, for range checks
  std::uint32_t last_listed = 0;                      // row_to_blocks: the last listed block gets only what is left
  bool duplicates = false;                            // a destination was named twice in the caller's list

  static std::shared_ptr<const Moves> make_whole(TensorRange source, TensorRange destination);
  static std::shared_ptr<const Moves> make_row(std::int64_t source_row, std::uint32_t destination_row,
                                               std::int64_t size_bytes, TensorRange source, TensorRange destination);
  // n source and n destination unit numbers; throws Error(invalid_argument) for lengths that differ, numbers < 0 or >= 2^32.
  static std::shared_ptr<const Moves> make_blocks(const std::int64_t* source, std::size_t n_source,
                                                  const std::int64_t* destination, std::size_t n_destination,
                                                  TensorRange source_tensors, TensorRange destination_tensors,
                                                  bool keep_order = false);
  // `mine`: this side's blocks, each for the block that stands at its place in the far side's window. Not to be planned:
  // in_window_order() makes pairs of it once the window is known.
  static std::shared_ptr<const Moves> make_in_window_order(const std::int64_t* mine, std::size_t n, TensorRange source_tensors,
                                                           TensorRange destination_tensors);
  static std::shared_ptr<const Moves> make_row_to_blocks(std::int64_t source_row, const std::int64_t* destination,
                                                         std::size_t n, TensorRange source,
                                                         TensorRange destination_tensors);
  // n times source offset, destination offset, bytes. Throws Error(invalid_argument) naming the first span of 0 bytes or whose
  // end lies beyond 2^63-1, or if all of them together are more than that.
  static std::shared_ptr<const Moves> make_spans(const std::uint64_t* listed, std::size_t n);
};

inline constexpr std::uint32_t key_row_there = UINT32_MAX;

// Moves of that form as pairs of blocks. Throws Error(invalid_argument) for lists of unequal length.
std::shared_ptr<const Moves> in_window_order(const Moves& moves, const std::vector<UnitRun>& window, bool mover_owns_destination);

// One side of a move as byte runs: what the owner of a source needs to know, and all of it. This is what travels.
struct SourceSelect {
  std::uint32_t tensor_first = 0;
  std::uint32_t tensor_count = 0;
  bool all_tensors = false;          // "all of yours, and they must be tensor_count"
  std::uint64_t unit_bytes = 0;      // units form: the mover's unit size, which must equal the source's; 0: row form
  std::int64_t row = 0;              // row form: -1 the key's row
  std::uint64_t row_bytes = 0;       // row form: bytes from the row's start
  std::uint64_t whole_count = 0;     // > 0: units 0..whole_count-1, which must be all of the source's
  std::vector<UnitRun> units;        // units form, unless whole_count
  bool by_spans = false;             // spans form: nothing else counts, the source has one tensor
  std::vector<ByteSpan> spans{};
};

// Everything checked and turned into runs.
struct Plan {
  std::uint32_t source_first = 0, destination_first = 0, tensors = 0;
  std::vector<Run> runs;
  std::uint64_t bytes_per_tensor = 0;
  std::uint64_t total() const noexcept { return bytes_per_tensor * tensors; }
};

// The plan for `moves` from `source` to `destination`. Throws Error(invalid_argument) before the first byte, naming side,
// cache and number: tensor counts, unit sizes, rows and blocks out of range, sizes. `key_row`: what source_row -1 means.
// `destination_moves`: whether the mover owns the destination (pull: size -1 is the destination's row) or the source (push).
// A source row out of range is Error(not_found) ("row 9 of cache 3, which has 4"), as is a block outside `source_window`.
Plan make_plan(const Geometry& source, const Geometry& destination, const Moves& moves, std::int64_t key_row,
               bool mover_owns_destination);

// The source side alone, for an owner that sends (socket): checked against its live geometry; offsets in `destination`
// are the running position in the stream. Same exceptions.
Plan make_source_plan(const Geometry& source, const SourceSelect& select, std::int64_t key_row);

// The destination side alone, for a puller that does not know the source's geometry (socket): checks everything that can
// be checked here and says what to ask for. Not for row_to_blocks (whose sizes depend on the source).
struct DestinationPlan {
  Plan plan;            // offsets in `source` are the running position in the stream
  SourceSelect select;
};
DestinationPlan make_destination_plan(const Geometry& destination, const Moves& moves);

// What a source is asked for by spans: theirs, in the order listed.
SourceSelect select_spans(const Moves& moves);

// Throws Error(invalid_argument) for the first of them that `geometry` does not have. `side`: "source".
void check_blocks(std::string_view side, const Geometry& geometry, const std::vector<UnitRun>& units);

// Unit numbers in the caller's order with neighbours merged. Throws Error(invalid_argument) for numbers < 0 or >= 2^32.
std::vector<UnitRun> merge_units(const std::int64_t* units, std::size_t n);

// Throws Error(not_found) if some of `units` is not among the units of a window of the cache called `label`.
void check_inside(const std::vector<UnitRun>& window_units, const std::vector<UnitRun>& units, std::string_view label);
// The same for spans, which may lie across neighbouring units; of a cache that spans cannot be of (not one contiguous tensor)
// Error(invalid_argument).
void check_inside(const std::vector<UnitRun>& window_units, const std::vector<ByteSpan>& spans, const Geometry& geometry);
std::vector<ByteSpan> source_spans(const Moves& moves);
std::vector<ByteSpan> destination_spans(const Moves& moves);
// Throws Error(invalid_argument) naming side and cache unless spans can be of it: one tensor, without gaps between its units.
void check_spannable(std::string_view side, const Geometry& geometry);

// Walks a plan: tensor by tensor, run by run, in pieces that may cut runs. Cheap to copy.
class PlanCursor {
 public:
  explicit PlanCursor(const Plan& plan) noexcept : plan_(&plan) {}
  struct Span {
    std::uint32_t tensor = 0;  // 0..plan.tensors-1, relative to source_first / destination_first
    std::uint64_t source = 0, destination = 0;  // offsets from the tensor's start
    std::uint64_t bytes = 0;
  };
  bool done() const noexcept { return tensor_ >= plan_->tensors || plan_->runs.empty(); }
  Span next(std::uint64_t max_bytes) noexcept;  // precondition: !done(); at least one byte
  std::uint64_t position() const noexcept { return position_; }
  // Splits off up to max_bytes and max_spans: returns a cursor for [here, here + taken) and moves this one behind it.
  // `taken` is the number of bytes; iterate the returned cursor until its position() has grown by it.
  PlanCursor split(std::uint64_t max_bytes, std::uint32_t max_spans, std::uint64_t& taken) noexcept;

 private:
  const Plan* plan_;
  std::uint32_t tensor_ = 0;
  std::size_t run_ = 0;
  std::uint64_t in_run_ = 0;
  std::uint64_t position_ = 0;
};

}  // namespace kvferry
