#include "pull.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "sentence.hpp"
#include "thread.hpp"
#include "serve.hpp"

namespace kvferry {
namespace {

constexpr unsigned map_bit = static_cast<unsigned>(Transport::map);
constexpr unsigned cma_bit = static_cast<unsigned>(Transport::cma);
constexpr unsigned socket_bit = static_cast<unsigned>(Transport::socket);
// The kernel takes pages in fewer goes, and its calls cost something each: big transfers gain 2 % by the larger pieces.
constexpr std::uint64_t cma_piece_bytes = 4 << 20, cma_big_piece_bytes = 16 << 20;
constexpr std::uint64_t alone_from_bytes = 1 << 20;    // a call more costs 0.5 us
constexpr std::uint32_t spans_per_piece = 1000;        // with the identity word still below IOV_MAX
constexpr std::uint64_t summed_at_once_bytes = 128 << 10;  // with what they are copied from, well within a core's cache
constexpr std::uint64_t small_reply_bytes = 16 << 10;  // taken in one piece and copied on: cheaper than three system calls
constexpr std::uint64_t at_once_bytes = 64 << 10;
constexpr std::size_t at_once_spans = 64;
constexpr std::size_t spans_per_receive = 256;
constexpr std::uint64_t bytes_per_receive = 512 << 10;

SourceSelect select_of(const Plan& plan, const Moves& moves, const Geometry& source) {
  SourceSelect select;
  select.tensor_first = plan.source_first;
  select.tensor_count = plan.tensors;
  switch (moves.form) {
    case Moves::Form::whole:
      select.unit_bytes = source.unit_bytes;
      select.whole_count = source.count;
      break;
    case Moves::Form::blocks:
      select.unit_bytes = source.unit_bytes;
      select.units = moves.source;
      break;
    case Moves::Form::row:
    case Moves::Form::row_to_blocks:
      select.row = moves.source_row;
      select.row_bytes = plan.bytes_per_tensor;
      break;
    case Moves::Form::in_window_order: break;  // pairs by now
    case Moves::Form::spans: return source.layout == Layout::memory ? SourceSelect{} : select_spans(moves);  // of a push: it knows them
  }
  return select;
}

std::vector<UnitRun> units_of(const Moves& moves, const Geometry& source, std::int64_t key_row) {
  if (moves.form == Moves::Form::blocks) {
    auto units = moves.source;
    units.insert(units.end(), moves.overwritten.begin(), moves.overwritten.end());
    return units;
  }
  if (moves.form == Moves::Form::whole) return {{0, static_cast<std::uint32_t>(source.count)}};
  const auto row = moves.source_row >= 0 ? moves.source_row : key_row;
  return {{static_cast<std::uint32_t>(std::max<std::int64_t>(row, 0)), 1}};
}

// Whether it takes the source's geometry to know what to ask for, or whether all that was listed may be asked for.
bool needs_the_source(const Moves& moves) {
  return moves.form == Moves::Form::row_to_blocks || moves.form == Moves::Form::in_window_order || !moves.overwritten.empty();
}

}  // namespace

Destination destination_cache(Engine& engine, std::uint64_t cache_id) {
  auto cache = engine.registry.find(cache_id);
  if (!cache) throw Error(Kind::not_found, sentence("this node has no cache ", cache_id));
  Destination destination;
  destination.guards.push_back(cache->guard);
  destination.kind = cache->kind;
  destination.caches.push_back(std::move(cache));
  return destination;
}

Destination destination_memory(const std::shared_ptr<const Moves>& moves) {
  Destination destination;
  destination.caches.push_back(memory_of_process(moves));
  return destination;
}

Pull::Pull(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, PullAsk ask, const char* verb)
    : Operation(engine, std::move(link), deadline, verb), ask_(std::move(ask)), source_(ask_.source) {
  touched_ = ask_.touched_before;
}

std::string Pull::subject() const { return ask_.describe_only ? ask_.target.label() : ask_.destination.geometry().label(); }

Outcome Pull::gone() const {
  return {Kind::not_found, ask_.target.label() + " does not exist any more at " + link_->label(), touched_, true};
}

Outcome Pull::destination_gone() const {
  return {Kind::not_found, subject() + " was unregistered, or its window closed, before this transfer had ended", touched_, true};
}

// Said after a copy has begun.
Outcome Pull::destination_not_there() const {
  return {Kind::invalid_argument,
          subject() + " is not (or not writable) memory any more: it must stay mapped as it was, and no file or memfd behind it may be made shorter, until the transfer has ended",
          true, true};
}

bool Pull::destination_may_shrink() const noexcept {
  return std::ranges::any_of(ask_.destination.caches, [](const auto& cache) { return cache->may_shrink.load(); });
}

unsigned Pull::one_sided() const noexcept { return link_->transports(ask_.transports) & (map_bit | cma_bit); }

Need Pull::step() {
  Need need = Need::done;
  Frame frame;
  for (;;) {
    // A copy looks for itself, between pieces; after it the bytes are there whatever the clock says.
    if (phase_ != Phase::copy && must_stop() && !(may_be_answered() && only_link_ended())) throw Error(stop_reason());
    switch (phase_) {
      case Phase::begin:
        for (const auto& cache : ask_.destination.caches) engine_.check_writable(*cache);
        if (link_->transports(ask_.transports) == 0)
          throw Error(Kind::unsupported, "none of the transports that are allowed works on the link to " + link_->label() + ": " +
                                             (link_->reasons().first.empty() ? "" : "map: " + link_->reasons().first + "; ") +
                                             (link_->reasons().second.empty() ? "" : "cma: " + link_->reasons().second + "; ") +
                                             "allow " + (link_->transports(socket_bit) != 0 ? "socket" : "others in both nodes' transports"));
        if (!source_ && ask_.told && one_sided() != 0 && has_segments(*ask_.told)) source_ = ask_.told;
        if (!source_ && ask_.keep && one_sided() != 0) was_kept_ = (source_ = link_->kept(ask_.target)) != nullptr;
        if (source_) {
          phase_ = Phase::plan;
        } else if (ask_.resolve_only || ask_.describe_only || one_sided() != 0 || needs_the_source(*ask_.moves)) {
          if (!take_lane(LaneUse::small)) return Need::lane;
          ask_to_resolve(Phase::await_geometry, ask_.describe_only);
        } else {
          auto made = make_destination_plan(ask_.destination.geometry(), *ask_.moves);
          plan_ = std::make_shared<const Plan>(std::move(made.plan));
          select_ = std::move(made.select);
          have_select_ = true;
          phase_ = Phase::ask;
        }
        break;
      case Phase::send:
        switch (send_request()) {
          case Sent::later: return Need::writable;
          case Sent::lost: ask_again(true, need); continue;
          case Sent::all: break;
        }
        phase_ = after_send_;
        return Need::readable;  // the answer is not there yet
      case Phase::await_geometry:
        if (!await_answer(frame, need)) {
          if (need == Need::done) break;
          return need;
        }
        resolved(frame);
        phase_ = next_missing_segment() ? Phase::send : Phase::plan;
        break;
      case Phase::await_segment:
        if (!await_answer(frame, need)) return need;
        if (frame.header.type == wire::Type::segment && frame.descriptors.size() == 1) {
          if (!link_->take_segment(wanted_segment_, std::move(frame.descriptors[0]))) do_without_map();
        } else if (frame.header.type == wire::Type::segment) {
          do_without_map();  // this process had no descriptor left for it
        } else if (!source_stands()) {
          give_lane();
          throw Error(gone());  // the segment went with its cache, in the meantime
        } else {
          link_->give_up_map("the peer did not hand over a segment");
        }
        phase_ = next_missing_segment() ? Phase::send : Phase::plan;
        break;
      case Phase::plan:
        give_lane();  // at a frame's end: what is thrown from here on leaves it whole
        if (ask_.describe_only) {
          choose_transport();
          finish({}, 0, transport_);
          return Need::done;
        }
        make_plan_now();
        choose_transport();
        if (ask_.resolve_only) {
          finish({}, 0, transport_);
          return Need::done;
        }
        if (transport_ == Transport::socket) {
          phase_ = Phase::ask;
        } else {
          phase_ = Phase::copy;
        }
        break;
      case Phase::copy:
        if (!copy_one_sided()) {
          choose_transport();
          phase_ = transport_ == Transport::socket ? Phase::ask : Phase::copy;
          break;
        }
        after_copy();
        if (done()) return Need::done;
        break;
      case Phase::ask:
        ask_for_stream();
        if (phase_ == Phase::ask) return Need::lane;
        break;
      case Phase::stream:
        need = stream();
        if (need == Need::readable && !link_->alive()) throw Error(stop_reason());  // all that had come is not all
        if (need != Need::done || done()) return need;
        break;
      case Phase::confirm:
        if (!await_answer(frame, need)) return need;
        give_lane();
        if (frame.header.type == wire::Type::ended) {
          auto outcome = read_ended(frame).outcome;
          outcome.touched = true;
          throw Error(outcome);
        }
        finish({}, plan_->total(), transport_);
        return Need::done;
      case Phase::await_consumed: {
        if (!lane_) {
          if (!take_lane(LaneUse::small)) return Need::lane;
          wire::Writer request(wire::Type::consume, number());
          const auto form = ask_.moves->form;
          const bool of_a_row = form == Moves::Form::row || form == Moves::Form::row_to_blocks;
          const auto row = of_a_row && ask_.moves->source_row >= 0 ? ask_.moves->source_row : -1;
          wire::put_target(request, ask_.target);
          request.put(row).put(plan_->source_first).put(plan_->tensors);
          begin_request(std::move(request), Phase::await_consumed);
          break;
        }
        if (!await_answer(frame, need)) return need;
        wire::Reader in(frame.body);
        auto outcome = wire::get_outcome(in);
        outcome.touched = touched_;
        give_lane();
        if (!outcome.ok()) throw Error(outcome);
        finish({}, plan_->total(), transport_);
        return Need::done;
      }
    }
  }
}

bool Pull::will_not_wait(std::uint64_t bytes) {
  constexpr std::size_t spans_at_most = 256;  // to check and to plan more takes longer than giving up the GIL may
  if (one_sided() == 0 || ask_.moves->spans.size() > spans_at_most) return false;
  if (!source_ && ask_.keep) was_kept_ = (source_ = link_->kept(ask_.target)) != nullptr;
  if (!source_ || source_->consume || source_->geometry.kind != "host") return false;
  if (source_->segments.empty() && source_->file_backed) return false;
  try {
    if (may_be_held()) return false;
    make_plan_now();
  } catch (const Error&) {  // said by step()
    return true;
  }
  return plan_->total() <= bytes;
}

bool Pull::small_enough() const noexcept { return plan_->total() <= at_once_bytes && plan_->runs.size() * plan_->tensors <= at_once_spans; }

bool Pull::run_at_once() {
  finish_unshared();
  if (ask_.moves->source.size() > at_once_spans) return false;  // before it is planned for nothing
  const Link::Brief counted(*link_);
  if (!counted || !will_not_wait(at_once_bytes) || !plan_ || !small_enough()) return false;
  try {
    choose_transport();
  } catch (const Error&) {  // said by step()
    return false;
  }
  return transport_ != Transport::socket && !must_stop() && copy_small(touched_, ask_.sums.get());
}

std::optional<Result> Pull::run_again_at_once(const Deadline& deadline, bool& touched) noexcept {
  const auto began = now_ns();
  const Link::Brief counted(*link_);
  const bool usable = (link_->transports(ask_.transports) & static_cast<unsigned>(transport_)) != 0;
  if (!counted || !usable || began >= deadline.at_ns || !small_enough() || !link_->stands(*source_) || !copy_small(touched, nullptr)) return std::nullopt;
  return Result{{}, plan_->total(), now_ns() - began, transport_};
}

// Of a source that has been found to stand. Changes nothing of this pull: another thread may be doing the same.
bool Pull::copy_small(bool& touched, ValueSums* sums) noexcept {
  const auto total = plan_->total();
  {
    const Entered entered(engine_.guards, ask_.destination.guards);
    if (!entered) return false;
    touched = true;
    const PlanCursor all(*plan_);
    if (!(transport_ == Transport::map ? copy_by_map(all, total) : copy_by_cma(all, total)).ok()) return false;
    if (sums != nullptr && can_be_summed()) {
      ValueSums::Part part(*sums, 0);
      add_to(part, all, total);
    }
  }
  if (!source_stands() || (transport_ != Transport::cma && link_->peer_process_ended())) return false;
  link_->pulls.fetch_add(1, std::memory_order_relaxed);
  link_->bytes_pulled.fetch_add(total, std::memory_order_relaxed);
  return true;
}

// ---- the conversation

bool Pull::may_be_answered() const noexcept {
  return lane_ != nullptr && request_sent() && (phase_ == Phase::stream || phase_ == Phase::confirm || phase_ == Phase::await_consumed);
}

void Pull::begin_request(wire::Writer request, Phase then) {
  set_request(request.take());
  after_send_ = then;
  phase_ = Phase::send;
}

void Pull::ask_to_resolve(Phase then, bool to_describe) {
  wire::Writer request(wire::Type::resolve, number());
  wire::put_target(request, ask_.target);
  request.put(static_cast<std::uint8_t>(to_describe));
  begin_request(std::move(request), then);
}

bool Pull::await_answer(Frame& frame, Need& need) {
  if (!in_) in_.emplace(wire::max_request_bytes);
  switch (in_->read(lane_->descriptor.get(), frame)) {
    case FrameBuffer::State::would_block:
      if (!link_->alive()) throw Error(stop_reason());
      return need = Need::readable, false;
    case FrameBuffer::State::lost: return ask_again(in_->empty() && after_send_ != Phase::await_consumed, need), false;
    case FrameBuffer::State::frame: break;
  }
  if (frame.header.operation != number()) throw wire::WireError("an answer to something that was not asked");
  return true;
}

// The lane was closed. Before a byte of the answer has come, what can be asked twice without harm is asked again, over
// another lane: whoever continues finds the phase changed (Need::done). A consumption counts once it may have been read.
void Pull::ask_again(bool harmless, Need& need) {
  const auto from = after_send_ == Phase::await_geometry    ? Phase::begin
                    : after_send_ == Phase::stream          ? Phase::ask
                    : after_send_ == Phase::await_consumed  ? Phase::await_consumed
                                                            : Phase::send;  // in mid-conversation: its lane had not lain idle
  if (!harmless || from == Phase::send || !change_lane()) throw Error(lane_closed());
  in_.reset();
  phase_ = from;
  need = Need::done;
}

void Pull::do_without_map() {
  ask_.transports = link_->transports(ask_.transports) & ~map_bit;
  ask_.keep = false;  // the next one asks for the segment again
}

bool Pull::next_missing_segment() {
  if (!source_->geometry.mappable() || (link_->transports(ask_.transports) & map_bit) == 0) return false;
  for (const auto& tensor : source_->geometry.tensors) {
    if (link_->segment(tensor.segment)) continue;
    wanted_segment_ = tensor.segment;
    wire::Writer request(wire::Type::fetch_segment, number());
    request.put(tensor.segment);
    begin_request(std::move(request), Phase::await_segment);
    return true;
  }
  return false;
}

bool Pull::has_segments(const Source& source) const {
  return std::ranges::all_of(source.geometry.tensors, [&](const TensorPlace& tensor) { return link_->segment(tensor.segment) != nullptr; });
}

void Pull::resolved(Frame& frame) {
  wire::Reader in(frame.body);
  if (frame.header.type == wire::Type::ended) {
    auto outcome = wire::get_outcome(in);
    give_lane();
    throw Error(outcome.ok() ? Outcome::fail(Kind::internal, "the peer resolved nothing") : outcome);
  }
  if (frame.header.type != wire::Type::geometry) throw wire::WireError("an answer of another kind than was asked for");
  auto source = get_resolved(in, ask_.target);
  source->consume = (frame.header.flags & wire::flag_consume) != 0;
  source_ = std::move(source);
}

// ---- planning

void Pull::make_plan_now() {
  if (!plan_) {
    const auto& source = *source_;
    if (ask_.moves->form == Moves::Form::in_window_order) {
      if (!source.windowed)
        throw Error(Kind::invalid_argument, ask_.target.label() + " is no window: say which of its blocks goes where");
      ask_.moves = in_window_order(*ask_.moves, source.window, ask_.mover_owns_destination);
    }
    auto plan = make_plan(source.geometry, ask_.destination.geometry(), *ask_.moves, source.key_row, ask_.mover_owns_destination);
    if (source.windowed && ask_.moves->form == Moves::Form::spans)
      check_inside(source.window, source_spans(*ask_.moves), source.geometry);
    else if (source.windowed)
      check_inside(source.window, units_of(*ask_.moves, source.geometry, source.key_row), source.geometry.label());
    plan_ = std::make_shared<const Plan>(std::move(plan));
  }
  small_ = plan_->total() <= one_sided_inline_bytes;
}

void Pull::choose_transport() {
  auto usable = link_->transports(ask_.transports);
  // A fault in a file's mapping may take as long as its disk wants, with the copy in the kernel's hands.
  bool of_files = source_->file_backed;
  for (const auto& cache : ask_.destination.caches) of_files |= cache->file_backed.load();
  if (of_files) usable &= socket_bit;
  transport_ = Transport::socket;
  if (source_->geometry.kind == "host") {
    if ((usable & map_bit) != 0 && source_->geometry.mappable()) {
      transport_ = Transport::map;
      if (source_->segments.empty()) {
        was_kept_ = false;
        auto mapped = std::make_shared<Source>(*source_);
        for (const auto& tensor : mapped->geometry.tensors) {
          auto segment = link_->segment(tensor.segment);
          if (!segment) break;
          if (tensor.offset > segment->bytes() || mapped->geometry.tensor_extent() > segment->bytes() - tensor.offset)
            throw Error(Kind::refused, "the peer described a tensor that lies outside its segment");
          mapped->segments.push_back(std::move(segment));
        }
        if (mapped->segments.size() == mapped->geometry.tensors.size())
          source_ = std::move(mapped);
        else
          transport_ = Transport::socket;
      }
    }
    if (transport_ != Transport::map && (usable & cma_bit) != 0) transport_ = Transport::cma;
  }
  const bool cma_suits = source_->geometry.kind == "host" && !of_files && link_->transports(cma_bit) != 0;
  if (transport_ == Transport::socket && (usable & socket_bit) == 0) {
    // A segment goes with its cache or with the link, at any moment: that is what happened then.
    if (must_stop()) throw Error(stop_reason());
    if (link_->peer.page && !source_stands()) throw Error(gone());
    throw Error(Kind::unsupported, ask_.target.label() + " cannot be pulled by the transports that are allowed: " +
                                       (cma_suits ? "it is memory owned by its caller; allow cma or socket"
                                       : of_files ? "it, or where it is to go, is memory mapped from a file (shared memory too), which has to be sent; allow socket"
                                                  : "it, or where it is to go, is " + source_->geometry.kind +
                                                        " memory that has to be sent; allow socket"));
  }
  if (transport_ != Transport::socket && ask_.keep && !was_kept_ && !source_->consume && !ask_.source) {
    link_->keep(ask_.target, source_);
    was_kept_ = true;
  }
}

// ---- one-sided

// Its guards alone: a table epoch that has moved on says nothing about bytes that are still the cache's.
bool Pull::source_stands() const noexcept {
  for (const auto& guard : source_->guards)
    if (!link_->peer.page->alive(guard)) return false;
  return true;
}

bool Pull::copy_one_sided() {
  if (!source_stands()) throw Error(gone());
  fall_back_ = false;
  cursor_.emplace(*plan_);
  {
    const std::lock_guard lock(pieces_mutex_);
    pieces_open_ = true;
  }
  const auto total = plan_->total();
  summing_ = ask_.sums != nullptr && can_be_summed();
  if (summing_) ask_.sums->begin(), next_value_ = 0;
  piece_bytes_ = transport_ == Transport::cma ? std::clamp(total / (4 * (engine_.crew.helpers() + 1)), cma_piece_bytes, cma_big_piece_bytes) : piece_bytes;
  if (total > one_sided_inline_bytes) {
    const auto hands = static_cast<unsigned>(std::min<std::uint64_t>(engine_.crew.helpers(), total / one_sided_inline_bytes));
    engine_.crew.ask_for_help(shared_from_this(), hands);
  }
  work();
  {
    const std::lock_guard lock(pieces_mutex_);
    pieces_open_ = false;  // who comes now to help has come too late
  }
  for (int inside = inside_.load(std::memory_order_acquire); inside != 0; inside = inside_.load(std::memory_order_acquire))
    inside_.wait(inside, std::memory_order_acquire);  // each is in the middle of one piece
  touched_ |= any_bytes_.load(std::memory_order_relaxed);
  if (fall_back_) {
    failed_.store(false);
    return false;
  }
  if (failed_.load(std::memory_order_acquire)) {
    failure_.touched = touched_;
    throw Error(failure_);
  }
  // Everything was copied; is it the owner's, and did it still stand? Only now, after the last byte (the look fences). Of a
  // process that has ended cma would have read neither the bytes nor the word behind them.
  if (!source_stands()) throw Error(gone());
  if (transport_ != Transport::cma && link_->peer_process_ended())
    throw Error({Kind::peer_lost, "the process of " + link_->label() + " has ended", touched_, true});
  return true;
}

void Pull::help() {
  {
    const std::lock_guard lock(pieces_mutex_);
    if (!pieces_open_) return;
    inside_.fetch_add(1, std::memory_order_relaxed);
  }
  work();
  if (inside_.fetch_sub(1, std::memory_order_release) == 1) inside_.notify_all();
}

void Pull::work() noexcept {
  std::optional<Spread::Seat> seat;
  if (plan_->total() > one_sided_inline_bytes) seat.emplace(engine_.spread, !of_this_library());
  for (;;) {
    if (seat) seat->look();
    std::optional<PlanCursor> piece;
    std::uint64_t bytes = 0;
    std::size_t first_value = 0;
    {
      const std::lock_guard lock(pieces_mutex_);
      if (failed_.load(std::memory_order_relaxed) || cursor_->done()) return;
      auto most = piece_bytes_;
      if (summing_) {  // of values whole: a checksum is one thread's
        const auto& sizes = ask_.sums->sizes();
        for (most = 0, first_value = next_value_; most < piece_bytes_ && next_value_ < sizes.size();) most += sizes[next_value_++];
      }
      piece = cursor_->split(most, summing_ ? UINT32_MAX : spans_per_piece, bytes);
    }
    auto outcome = must_stop() ? stop_reason() : summing_ ? copy_summed(*piece, bytes, first_value) : copy_piece(*piece, bytes);
    if (outcome.ok()) continue;
    const std::lock_guard lock(pieces_mutex_);
    if (!failed_.load(std::memory_order_relaxed)) {
      failure_ = std::move(outcome);
      failed_.store(true, std::memory_order_release);
    }
    return;
  }
}

// Bit by bit, so that what has been written is still in this core's cache when it is read again.
Outcome Pull::copy_summed(PlanCursor piece, std::uint64_t bytes, std::size_t first_value) noexcept {
  ValueSums::Part sums(*ask_.sums, first_value);
  for (const auto end = piece.position() + bytes; piece.position() < end;) {
    std::uint64_t taken = 0;
    const auto bit = piece.split(std::min(summed_at_once_bytes, end - piece.position()), spans_per_piece, taken);
    auto outcome = must_stop() ? stop_reason() : copy_piece(bit, taken, &sums);
    if (!outcome.ok()) return outcome;
  }
  return {};
}

bool Pull::can_be_summed() const noexcept {
  return copier_of(ask_.destination.kind) == nullptr && !destination_may_shrink() && ask_.sums->total() == plan_->total();
}

void Pull::add_to(ValueSums::Part& sums, PlanCursor piece, std::uint64_t bytes) const noexcept {
  const auto& to = ask_.destination.geometry().tensors;
  while (bytes > 0) {
    const auto span = piece.next(bytes);
    sums.add(reinterpret_cast<const void*>(to[plan_->destination_first + span.tensor].address + span.destination), span.bytes);
    bytes -= span.bytes;
  }
}

Outcome Pull::copy_piece(PlanCursor piece, std::uint64_t bytes, ValueSums::Part* sums) noexcept {
  if (!source_stands()) return gone();
  const Entered entered(engine_.guards, ask_.destination.guards);
  if (!entered) return destination_gone();
  any_bytes_.store(true, std::memory_order_relaxed);
  auto outcome = transport_ == Transport::map ? copy_by_map(piece, bytes) : copy_by_cma(piece, bytes);
  if (sums != nullptr && outcome.ok()) add_to(*sums, piece, bytes);
  return outcome;
}

Outcome Pull::copy_by_map(PlanCursor piece, std::uint64_t bytes) noexcept {
  const auto& from = source_->geometry.tensors;
  const auto& to = ask_.destination.geometry().tensors;
  const bool streaming = plan_->total() >= stream_from_bytes && !summing_, by_kernel = destination_may_shrink();
  Copier* copier = copier_of(ask_.destination.kind);
  const auto end = piece.position() + bytes;
  auto span = piece.next(bytes);
  for (;;) {
    const auto left = end - piece.position();
    PlanCursor::Span following{};
    if (left != 0) following = piece.next(left);
    const auto source_tensor = plan_->source_first + span.tensor;
    auto& segment = *source_->segments[source_tensor];
    const auto offset = from[source_tensor].offset + span.source;
    const auto address = to[plan_->destination_first + span.tensor].address + span.destination;
    if (copier == nullptr) {
      if (left != 0) {
        const auto next_tensor = plan_->source_first + following.tensor;
        expect_copy(reinterpret_cast<void*>(to[plan_->destination_first + following.tensor].address + following.destination),
                    source_->segments[next_tensor]->data() + from[next_tensor].offset + following.source, following.bytes);
      }
      switch (segment.copy(reinterpret_cast<void*>(address), offset, span.bytes, streaming, by_kernel)) {
        case PeerSegment::Copied::all: break;
        case PeerSegment::Copied::outside: return Outcome::fail(Kind::refused, "the peer described a tensor that lies outside its segment");
        case PeerSegment::Copied::not_there: return destination_not_there();
      }
    } else {
      thread_local std::vector<std::byte> staging;
      staging.resize(span.bytes);
      if (segment.copy(staging.data(), offset, span.bytes, false) != PeerSegment::Copied::all || !copier->write(address, staging.data(), span.bytes))
        return Outcome::fail(Kind::invalid_argument, subject() + " is not memory of its kind");
    }
    if (left == 0) return {};
    span = following;
  }
}

// The owner's identity word is read behind the spans. A pid goes from a process's memory to another's (exec, or death and
// reuse) but never back, so the right word says that all that was read before it came from that memory too. One long span
// goes alone and the word in a call of its own: the kernel copies a vector of one element 4 % faster.
Outcome Pull::copy_by_cma(PlanCursor piece, std::uint64_t bytes) noexcept {
  iovec local[spans_per_piece + 1], remote[spans_per_piece + 1];
  std::uint64_t word = 0;
  Copier* copier = copier_of(ask_.destination.kind);
  thread_local std::vector<std::byte> staging;
  if (copier != nullptr) staging.resize(bytes);
  const auto& from = source_->geometry.tensors;
  const auto& to = ask_.destination.geometry().tensors;

  std::size_t n = 0;
  const auto start = piece.position();
  for (auto walk = piece; walk.position() - start < bytes; ++n) {
    const auto at = walk.position() - start;
    const auto span = walk.next(bytes - at);
    remote[n] = {reinterpret_cast<void*>(from[plan_->source_first + span.tensor].address + span.source), span.bytes};
    local[n] = {copier == nullptr
                    ? reinterpret_cast<void*>(to[plan_->destination_first + span.tensor].address + span.destination)
                    : static_cast<void*>(staging.data() + at),
                span.bytes};
  }
  local[n] = {&word, sizeof word};
  remote[n] = {reinterpret_cast<void*>(link_->peer.identity_address), sizeof word};

  const auto read = [&](std::size_t first, std::size_t count) {
    return ::process_vm_readv(static_cast<pid_t>(link_->peer.credentials.pid), local + first, count, remote + first, count, 0);
  };
  const bool alone = n == 1 && bytes >= alone_from_bytes;
  const ssize_t got = read(0, alone ? 1 : n + 1);
  if (got < 0 && (errno == EPERM || errno == ENOSYS)) {
    link_->give_up_cma(std::string("process_vm_readv was refused: ") + std::strerror(errno));
    fall_back_ = true;
    return Outcome::fail(Kind::unsupported, "cma was refused");
  }
  auto missing = static_cast<std::uint64_t>(std::max<ssize_t>(got, 0));
  if (missing < bytes + sizeof word) static_cast<void>(read(n, 1));
  if (word != link_->peer.identity_value)
    return {Kind::peer_lost, "the process of " + link_->label() + " has ended or has become another program", true, true};
  if (missing < bytes) {
    // It stopped at the first address that is not there, here or at the peer.
    auto walk = piece;
    auto span = walk.next(bytes);
    while (missing >= span.bytes && walk.position() - start < bytes) {
      missing -= span.bytes;
      span = walk.next(bytes);
    }
    if (copier == nullptr) {
      static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
      const auto at = to[plan_->destination_first + span.tensor].address + span.destination + missing;
      if (!still_there(at, std::min(page, span.bytes - missing), true)) return destination_not_there();
    }
    if (!source_stands()) return gone();
    return {Kind::invalid_argument,
            sentence("tensor ", plan_->source_first + span.tensor, " of ", source_->geometry.label(), " is not mapped at ", link_->label()),
            true, true};
  }
  if (copier != nullptr) {
    for (auto walk = piece; walk.position() - start < bytes;) {
      const auto at = walk.position() - start;
      const auto span = walk.next(bytes - at);
      if (!copier->write(to[plan_->destination_first + span.tensor].address + span.destination, staging.data() + at, span.bytes))
        return Outcome::fail(Kind::invalid_argument, subject() + " is not memory of its kind");
    }
  }
  return {};
}

void Pull::after_copy() {
  if (source_->consume) {
    phase_ = Phase::await_consumed;
    return;
  }
  finish({}, plan_->total(), transport_);
}

// ---- the stream

void Pull::ask_for_stream() {
  small_ = plan_->total() <= one_sided_inline_bytes;
  if (lane_ && lane_->use == LaneUse::small && !small_) give_lane();
  if (!take_lane(small_ ? LaneUse::small : LaneUse::bulk)) return;
  if (ask_.sums) ask_.sums->begin();  // those of a copy that this stream is in place of are none of these bytes'
  if (!have_select_) select_ = select_of(*plan_, *ask_.moves, source_->geometry);
  transport_ = Transport::socket;
  cursor_.emplace(*plan_);
  in_.reset();
  if (plan_->total() <= small_reply_bytes && !destination_may_shrink()) reply_.resize(plan_->total() + 1024);
  wire::Writer request(wire::Type::pull, number());
  request.put(static_cast<std::uint32_t>(std::min<std::int64_t>(deadline_.left_ms(), UINT32_MAX)));
  wire::put_guards(request, ask_.source && !ask_.mover_owns_destination ? ask_.source->guards : std::vector<Guard>{});
  wire::put_target(request, ask_.target);
  wire::put_select(request, select_);
  if (request.body_bytes() > wire::max_request_bytes)
    throw Error(Kind::invalid_argument, sentence("the ", select_.by_spans ? select_.spans.size() : select_.units.size(), select_.by_spans ? " spans" : " runs of blocks", " of one pull are too many for a request over a socket: pull them in several calls"));
  begin_request(std::move(request), Phase::stream);
}

Need Pull::stream() {
  Need need = Need::done;
  for (;;) {
    if (must_stop() && !only_link_ended()) throw Error(stop_reason());
    if (piece_left_ > 0) {
      if (!(reply_.empty() ? receive_payload(need) : take_payload(need))) return need;
      continue;
    }
    if (header_have_ < sizeof header_) {
      const long n = receive({reinterpret_cast<std::uint8_t*>(&header_) + header_have_, sizeof header_ - header_have_});
      if (n < 0) return ask_again(header_have_ == 0 && cursor_->position() == 0, need), need;
      if (n == 0) return Need::readable;
      header_have_ += static_cast<std::size_t>(n);
      continue;
    }
    if (header_.operation != number()) throw wire::WireError("bytes of another operation");
    if (header_.type == wire::Type::piece) {
      const auto left = plan_->total() - cursor_->position();
      if (header_.offset != cursor_->position() || header_.body_bytes == 0 || header_.body_bytes > wire::max_piece_bytes ||
          header_.body_bytes > left)
        throw wire::WireError("a piece that was not asked for");
      piece_left_ = header_.body_bytes;
      header_have_ = 0;
      continue;
    }
    if (header_.type != wire::Type::ended || header_.body_bytes > wire::max_control_bytes)
      throw wire::WireError("neither a piece nor an end");
    if (tail_.empty()) tail_.resize(header_.body_bytes);
    while (tail_have_ < tail_.size()) {
      const long n = receive(std::span(tail_).subspan(tail_have_));
      if (n < 0) throw Error(lane_closed());
      if (n == 0) return Need::readable;
      tail_have_ += static_cast<std::size_t>(n);
    }
    wire::Reader in(tail_);
    auto outcome = wire::get_outcome(in);
    outcome.touched = touched_;
    if (!outcome.ok()) {
      give_lane();  // both sides are at a frame's end
      throw Error(outcome);
    }
    if (cursor_->position() != plan_->total()) throw wire::WireError("an end before all bytes came");
    if (ask_.target.by == Target::By::window) {
      // The last bytes may have lain in the sockets' buffers for long. A success says that the window stood after they
      // had come, as it does for one-sided copies.
      ask_to_resolve(Phase::confirm, false);
      return Need::done;
    }
    give_lane();
    if ((header_.flags & wire::flag_consume) != 0) {
      phase_ = Phase::await_consumed;
      return Need::done;
    }
    finish({}, plan_->total(), Transport::socket);
    return Need::done;
  }
}

// Bytes of the conversation: from what has been read of a small reply, or from the socket. As receive_some().
long Pull::receive(std::span<std::uint8_t> into) {
  if (reply_.empty()) return receive_some(lane_->descriptor.get(), into);
  if (const long n = refill(); n <= 0) return n;
  const auto n = std::min(into.size(), reply_have_ - reply_taken_);
  std::memcpy(into.data(), reply_.data() + reply_taken_, n);
  reply_taken_ += n;
  return static_cast<long>(n);
}

// Bytes of a small reply that are at hand, from the socket if there are none. As receive_some().
long Pull::refill() {
  if (reply_taken_ == reply_have_) {
    reply_taken_ = reply_have_ = 0;
    const long n = receive_some(lane_->descriptor.get(), reply_);
    if (n <= 0) return n;
    reply_have_ = static_cast<std::size_t>(n);
  }
  return static_cast<long>(reply_have_ - reply_taken_);
}

// Payload of a small reply, on to the destination's spans.
bool Pull::take_payload(Need& need) {
  const long n = refill();
  if (n == 0) return need = Need::readable, false;
  if (n < 0) throw Error(lane_closed());
  const auto& to = ask_.destination.geometry().tensors;
  Copier* copier = copier_of(ask_.destination.kind);
  const Entered entered(engine_.guards, ask_.destination.guards);
  if (!entered) throw Error(destination_gone());
  touched_ = true;
  while (piece_left_ > 0 && reply_taken_ < reply_have_) {
    const auto span = cursor_->next(std::min<std::uint64_t>(piece_left_, reply_have_ - reply_taken_));
    const auto address = to[plan_->destination_first + span.tensor].address + span.destination;
    if (copier == nullptr)
      std::memcpy(reinterpret_cast<void*>(address), reply_.data() + reply_taken_, span.bytes);
    else if (!copier->write(address, reply_.data() + reply_taken_, span.bytes))
      throw Error({Kind::invalid_argument, subject() + " is not memory of its kind", true, true});
    reply_taken_ += span.bytes;
    piece_left_ -= span.bytes;
  }
  return true;
}

// Straight into the destination's spans, and the next header with the last of them.
bool Pull::receive_payload(Need& need) {
  const auto& to = ask_.destination.geometry().tensors;
  Copier* copier = copier_of(ask_.destination.kind);
  iovec iov[spans_per_receive + 1];
  std::size_t n = 0;
  std::uint64_t bytes = 0;
  const auto most = std::min(piece_left_, bytes_per_receive);
  auto walk = *cursor_;
  if (copier != nullptr) {
    staging_.resize(bytes_per_receive);
    iov[n++] = {staging_.data(), most};
    bytes = most;
  } else {
    for (; n < spans_per_receive && bytes < most; ++n) {
      const auto span = walk.next(most - bytes);
      iov[n] = {reinterpret_cast<void*>(to[plan_->destination_first + span.tensor].address + span.destination), span.bytes};
      bytes += span.bytes;
    }
  }
  if (bytes == piece_left_) iov[n++] = {reinterpret_cast<std::uint8_t*>(&header_), sizeof header_};
  msghdr message{};
  message.msg_iov = iov;
  message.msg_iovlen = n;
  ssize_t got;
  int error;
  {
    const Entered entered(engine_.guards, ask_.destination.guards);
    if (!entered) throw Error(destination_gone());
    const InKernel held_perhaps(*this);
    do got = ::recvmsg(lane_->descriptor.get(), &message, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    error = errno;
    if (got > 0) touched_ = true;
    if (got > 0 && copier != nullptr) {
      auto left = std::min<std::uint64_t>(static_cast<std::uint64_t>(got), bytes);
      for (std::uint64_t at = 0; left > 0;) {
        const auto span = walk.next(left);
        if (!copier->write(to[plan_->destination_first + span.tensor].address + span.destination, staging_.data() + at, span.bytes))
          throw Error({Kind::invalid_argument, subject() + " is not memory of its kind", true, true});
        at += span.bytes;
        left -= span.bytes;
      }
    }
  }
  if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return need = Need::readable, false;
  if (got < 0 && error == EFAULT) throw Error(destination_not_there());  // what came before that place may have been written
  if (got <= 0) throw Error(lane_closed());
  auto payload = std::min<std::uint64_t>(static_cast<std::uint64_t>(got), bytes);
  header_have_ = static_cast<std::size_t>(got) - payload;
  piece_left_ -= payload;
  while (payload > 0) payload -= cursor_->next(payload).bytes;
  return true;
}

bool Pull::may_be_held() {
  if (ask_.resolve_only) return false;
  bool held = false;
  for (const auto& cache : ask_.destination.caches) {
    engine_.check_writable(*cache);
    held |= cache->file_backed.load();
  }
  return held;
}

void Pull::given_up() noexcept {
  for (const auto& cache : ask_.destination.caches) engine_.held_of(*cache).fetch_add(1);
}

void Pull::let_go() noexcept {
  for (const auto& cache : ask_.destination.caches) engine_.held_of(*cache).fetch_sub(1);
}

void Pull::ended() noexcept {
  // Whoever keeps the ended operation does not keep the peer's memory. One that was given up may still be in the kernel.
  if (!ask_.resolve_only && !ask_.describe_only && !apart()) {
    source_.reset();
    ask_.source.reset();
  }
  auto& count = result().outcome.ok() ? link_->pulls : link_->failures;
  count.fetch_add(1, std::memory_order_relaxed);
  link_->bytes_pulled.fetch_add(result().bytes, std::memory_order_relaxed);
}

// ---- prepared

PreparedPull::PreparedPull(Engine& engine, std::shared_ptr<Link> link, PullAsk ask, Deadline deadline)
    : engine_(engine), link_(std::move(link)), ask_(std::move(ask)) {
  resolve(deadline);
}

void PreparedPull::resolve(Deadline deadline) {
  auto ask = ask_;
  ask.resolve_only = true;
  auto operation = std::make_shared<Pull>(engine_, link_, deadline, std::move(ask), "prepare");
  const auto result = operation->run_here();
  if (!result.outcome.ok()) throw Error(result.outcome, link_->label(), operation->subject(), "prepare");
  const std::lock_guard lock(mutex_);
  ask_.moves = operation->moves();  // what a window's order means does not change
  // A consumable key is resolved each time, and a stream by its owner.
  if (result.transport != Transport::socket && !operation->source()->consume) resolved_ = std::move(operation);
}

Result PreparedPull::run_here(const Deadline& deadline) {
  bool touched = false;
  if (auto result = run_at_once(deadline, touched)) return *std::move(result);
  const auto operation = this->operation(deadline, touched);
  return operation->run_here();
}

std::optional<Result> PreparedPull::run_at_once(const Deadline& deadline, bool& touched) {
  std::shared_ptr<Pull> resolved;
  {
    const std::lock_guard lock(mutex_);
    resolved = resolved_;
  }
  return resolved ? resolved->run_again_at_once(deadline, touched) : std::nullopt;
}

std::shared_ptr<Pull> PreparedPull::operation(Deadline deadline, bool touched) {
  auto ask = ask_;
  std::shared_ptr<const Plan> plan;
  ask.touched_before = touched;
  {
    const std::lock_guard lock(mutex_);
    // Out of date: resolved anew, which finds the cache, another of its name, or nothing.
    if (resolved_ && !link_->stands(*resolved_->source())) resolved_.reset();
    if (resolved_) ask.source = resolved_->source(), plan = resolved_->plan();
  }
  auto operation = std::make_shared<Pull>(engine_, link_, deadline, std::move(ask));
  if (plan) operation->use_plan(std::move(plan));
  return operation;
}

}  // namespace kvferry
