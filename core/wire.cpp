#include "wire.hpp"

namespace kvferry::wire {
namespace {

template <class E>
E checked(std::uint8_t value, std::uint8_t last, const char* what) {
  if (value > last) throw WireError(std::string("unknown ") + what);
  return static_cast<E>(value);
}

void put_range(Writer& out, const TensorRange& range) { out.put(range.first).put(range.count); }

TensorRange get_range(Reader& in) {
  TensorRange range;
  range.first = in.get<std::uint32_t>();
  range.count = in.get<std::int64_t>();
  if (range.count < -1 || range.count > 0xffffffffLL) throw WireError("a tensor range is out of bounds");
  return range;
}

std::uint64_t end_of(const std::vector<UnitRun>& runs) {
  std::uint64_t end = 0;
  for (const auto& run : runs) end = std::max(end, std::uint64_t{run.first} + run.count);
  return end;
}

Geometry get_geometry(Reader& in, Layout last) {
  Geometry geometry;
  geometry.cache_id = in.get<std::uint64_t>();
  geometry.name = in.text();
  geometry.layout = checked<Layout>(in.get<std::uint8_t>(), static_cast<std::uint8_t>(last), "layout");
  geometry.kind = in.text();
  geometry.unit_bytes = in.get<std::uint64_t>();
  geometry.stride_bytes = in.get<std::uint64_t>();
  geometry.count = in.get<std::uint64_t>();
  geometry.tensors.resize(in.count(20));
  for (auto& tensor : geometry.tensors) {
    tensor.address = in.get<std::uint64_t>();
    tensor.segment = in.get<std::uint32_t>();
    tensor.offset = in.get<std::uint64_t>();
  }
  try {
    geometry.check();
  } catch (const Error& error) {
    throw WireError(error.what());
  }
  return geometry;
}

// Lists of u64s, which a Run and a ByteSpan are as they lie in memory.
template <class T>
void put_list(Writer& out, const std::vector<T>& list) {
  out.put(static_cast<std::uint32_t>(list.size())).raw(list.data(), list.size() * sizeof(T));
}

template <class T>
std::vector<T> get_list(Reader& in) {
  std::vector<T> list(in.count(sizeof(T)));
  in.raw(list.data(), list.size() * sizeof(T));
  return list;
}
static_assert(sizeof(Run) == 24 && sizeof(ByteSpan) == 16);

void check_spans(const std::vector<Run>& spans) {
  std::uint64_t total = 0;
  for (const auto& run : spans) {
    if (run.bytes == 0 || !countable(run)) throw WireError("a span is out of bounds");
    total += run.bytes;
    if (total >> 63 != 0) throw WireError("spans of more bytes than can be counted");
  }
}

}  // namespace

void put_guards(Writer& out, const std::vector<Guard>& guards) {
  out.put(static_cast<std::uint32_t>(guards.size()));
  for (const auto& guard : guards) out.put(guard.slot).put(guard.number);
}

std::vector<Guard> get_guards(Reader& in) {
  std::vector<Guard> guards(in.count(12));
  if (guards.size() > 1024) throw WireError("too many guards");
  for (auto& guard : guards) {
    guard.slot = in.get<std::uint32_t>();
    guard.number = in.get<std::uint64_t>();
  }
  return guards;
}

void put_runs(Writer& out, const std::vector<UnitRun>& runs) {
  static_assert(sizeof(UnitRun) == 8);
  out.put(static_cast<std::uint32_t>(runs.size())).raw(runs.data(), runs.size() * sizeof(UnitRun));
}

std::vector<UnitRun> get_runs(Reader& in) {
  std::vector<UnitRun> runs(in.count(sizeof(UnitRun)));
  in.raw(runs.data(), runs.size() * sizeof(UnitRun));
  for (const auto& run : runs)
    if (run.count == 0 || std::uint64_t{run.first} + run.count > (std::uint64_t{1} << 32))
      throw WireError("a run of blocks is out of bounds");
  return runs;
}

void put_target(Writer& out, const Target& target) {
  out.put(target.by).put(target.id).put(target.model).text(target.name);
  put_list(out, target.addresses);
}

Target get_target(Reader& in) {
  Target target;
  target.by = checked<Target::By>(in.get<std::uint8_t>(), static_cast<std::uint8_t>(Target::By::push), "target");
  target.id = in.get<std::uint64_t>();
  target.model = in.get<std::uint64_t>();
  target.name = in.text();
  target.addresses = get_list<std::uint64_t>(in);
  return target;
}

void put_geometry(Writer& out, const Geometry& geometry) {
  out.put(geometry.cache_id).text(geometry.name).put(geometry.layout).text(geometry.kind);
  out.put(geometry.unit_bytes).put(geometry.stride_bytes).put(geometry.count);
  out.put(static_cast<std::uint32_t>(geometry.tensors.size()));
  for (const auto& tensor : geometry.tensors) out.put(tensor.address).put(tensor.segment).put(tensor.offset);
}

Geometry get_geometry(Reader& in) { return get_geometry(in, Layout::mixed); }

Geometry get_push_source(Reader& in) { return get_geometry(in, Layout::memory); }

void put_select(Writer& out, const SourceSelect& select) {
  out.put(select.tensor_first).put(select.tensor_count).put(static_cast<std::uint8_t>(select.all_tensors));
  out.put(select.unit_bytes).put(select.row).put(select.row_bytes).put(select.whole_count);
  put_runs(out, select.units);
  out.put(static_cast<std::uint8_t>(select.by_spans));
  put_list(out, select.spans);
}

SourceSelect get_select(Reader& in) {
  SourceSelect select;
  select.tensor_first = in.get<std::uint32_t>();
  select.tensor_count = in.get<std::uint32_t>();
  select.all_tensors = in.get<std::uint8_t>() != 0;
  select.unit_bytes = in.get<std::uint64_t>();
  select.row = in.get<std::int64_t>();
  select.row_bytes = in.get<std::uint64_t>();
  select.whole_count = in.get<std::uint64_t>();
  select.units = get_runs(in);
  select.by_spans = in.get<std::uint8_t>() != 0;
  select.spans = get_list<ByteSpan>(in);
  for (const auto& span : select.spans)
    if (span.bytes == 0 || !countable({span.offset, 0, span.bytes})) throw WireError("a span is out of bounds");
  if (!select.by_spans && !select.spans.empty()) throw WireError("spans beside another form");
  return select;
}

void put_moves(Writer& out, const Moves& moves) {
  put_moves(out, moves, moves.source_tensors, moves.destination_tensors);
}

void put_moves(Writer& out, const Moves& moves, const TensorRange& source, const TensorRange& destination) {
  out.put(moves.form);
  put_range(out, source);
  put_range(out, destination);
  out.put(moves.source_row).put(moves.destination_row).put(moves.size_bytes).put(moves.last_listed);
  put_runs(out, moves.source);
  put_runs(out, moves.destination);
  put_list(out, moves.spans);
}

std::shared_ptr<const Moves> get_moves(Reader& in) {
  auto moves = std::make_shared<Moves>();
  moves->form = checked<Moves::Form>(in.get<std::uint8_t>(), static_cast<std::uint8_t>(Moves::Form::in_window_order), "form");
  moves->source_tensors = get_range(in);
  moves->destination_tensors = get_range(in);
  moves->source_row = in.get<std::int64_t>();
  moves->destination_row = in.get<std::uint32_t>();
  moves->size_bytes = in.get<std::int64_t>();
  moves->last_listed = in.get<std::uint32_t>();
  moves->source = get_runs(in);
  moves->destination = get_runs(in);
  moves->spans = get_list<Run>(in);
  check_spans(moves->spans);
  const bool by_spans = moves->form == Moves::Form::spans;
  if (by_spans ? !moves->source.empty() || !moves->destination.empty() : !moves->spans.empty()) throw WireError("lists of two forms");
  if (moves->form == Moves::Form::blocks) {
    if (moves->source.size() != moves->destination.size()) throw WireError("block lists differ in length");
    for (std::size_t i = 0; i < moves->source.size(); ++i)
      if (moves->source[i].count != moves->destination[i].count) throw WireError("block runs differ in length");
  }
  const bool by_window = moves->form == Moves::Form::in_window_order;
  if (by_window && !moves->destination.empty()) throw WireError("lists of two forms");
  if (by_spans) moves->units = moves->spans.size();
  if (by_window)
    for (const auto& run : moves->source) moves->units += run.count;
  for (const auto& run : moves->destination) moves->units += run.count;
  moves->source_end = end_of(moves->source);
  moves->destination_end = end_of(moves->destination);
  return moves;
}

void put_words(Writer& out, const std::vector<std::uint64_t>& words) { put_list(out, words); }

std::vector<std::uint64_t> get_words(Reader& in) { return get_list<std::uint64_t>(in); }

void put_sums(Writer& out, const ValueSums* sums) {
  const bool asked = sums != nullptr && sums->sizes().size() <= most_sums;
  static const std::vector<std::uint64_t> none;
  put_words(out, asked ? sums->sizes() : none);
  put_words(out, asked ? sums->seeds() : none);
}

std::shared_ptr<ValueSums> get_sums(Reader& in) {
  auto sizes = get_words(in), seeds = get_words(in);
  if (sizes.empty() && seeds.empty()) return nullptr;
  if (sizes.size() > most_sums) throw WireError("too many checksums");
  try {
    return std::make_shared<ValueSums>(std::move(sizes), std::move(seeds));
  } catch (const Error& error) {
    throw WireError(error.what());
  }
}

void put_outcome(Writer& out, const Outcome& outcome) {
  out.put(outcome.kind).put(static_cast<std::uint8_t>(outcome.touched)).put(static_cast<std::uint8_t>(outcome.settled));
  out.text(outcome.sentence);
}

// What a peer says. That its own node is closed is no word about this one: to this side it is gone.
Outcome get_outcome(Reader& in) {
  Outcome outcome;
  const auto kind = in.get<std::uint16_t>();
  outcome.kind = kind <= static_cast<std::uint16_t>(Kind::internal) ? static_cast<Kind>(kind) : Kind::internal;
  outcome.touched = in.get<std::uint8_t>() != 0;
  outcome.settled = in.get<std::uint8_t>() != 0;
  outcome.sentence = in.text();
  if (outcome.kind == Kind::closed) outcome.kind = Kind::peer_lost, outcome.sentence = "the peer's node was closed";
  return outcome;
}

}  // namespace kvferry::wire
