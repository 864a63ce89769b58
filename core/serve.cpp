#include "serve.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "push.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

constexpr std::size_t spans_per_send = 256;
constexpr std::uint64_t bytes_per_send = 1 << 20;
constexpr std::uint64_t send_inline_bytes = 64 << 10;  // on the control thread at once, if the socket takes it

// A stream of pieces from a cache of this node. Whole frames only: if the cache ends in the middle of a piece, the piece
// is filled up with zeros and an end follows that says so, and the lane stays good.
class Send : public Operation {
 public:
  Send(Engine& engine, std::shared_ptr<ServerLane> lane, std::shared_ptr<Link> link, Deadline deadline, std::uint64_t operation,
       Resolved resolved, std::vector<Guard> guards, Plan plan, bool for_a_push)
      : Operation(engine, std::move(link), deadline, "send"),
        for_a_push_(for_a_push),
        server_lane_(std::move(lane)),
        asked_(operation),
        resolved_(std::move(resolved)),
        guards_(std::move(guards)),
        plan_(std::move(plan)),
        cursor_(plan_),
        copier_(copier_of(resolved_.cache->kind)) {
    ok_end_ = ended_frame(asked_, {}, plan_.total(), Transport::socket, resolved_.consumed_by_pull ? wire::flag_consume : 0);
    if (const auto& moves = resolved_.cache->memory_moves) sums_ = moves->sums;
    if (sums_) sums_->begin();
    if (plan_.total() == 0) end_with({});
  }

  std::string subject() const override { return resolved_.cache->geometry.label(); }
  bool may_be_held() override { return resolved_.cache->file_backed.load(); }
  // A cache's own guard says that it is held; memory without one is counted.
  void given_up() noexcept override {
    if (resolved_.cache->memory_moves) engine_.memory_held.fetch_add(1);
  }
  void let_go() noexcept override {
    if (resolved_.cache->memory_moves) engine_.memory_held.fetch_sub(1);
  }
  std::uint64_t total() const noexcept { return plan_.total(); }

 protected:
  int descriptor() const noexcept override { return server_lane_->descriptor(); }
  void put_aside(Need) override { server_lane_->watch_for(EPOLLOUT); }
  bool part_of_another() const noexcept override { return for_a_push_; }

  Need step() override {
    for (;;) {
      const bool ending = !end_.empty() && piece_left_ == 0 && header_sent_ == sizeof header_;
      if (ending && end_sent_ == end_.size()) {
        // Whatever the clock says by now: the peer may have all of it and use the lane again.
        whole_ = true;
        finish({}, cursor_.position(), Transport::socket);
        return Need::done;
      }
      if (must_stop()) throw Error(stop_reason());
      if (ending) {
        const long n = send_some(descriptor(), std::span(end_).subspan(end_sent_));
        if (n < 0) throw Error(Kind::peer_lost, "the peer closed its lane");
        if (n == 0) return Need::writable;
        end_sent_ += static_cast<std::size_t>(n);
        continue;
      }
      if (piece_left_ == 0 && header_sent_ == sizeof header_) {
        header_ = {};
        header_.type = wire::Type::piece;
        header_.operation = asked_;
        header_.offset = cursor_.position();
        piece_left_ = std::min<std::uint64_t>(plan_.total() - cursor_.position(), wire::max_piece_bytes);
        header_.body_bytes = static_cast<std::uint32_t>(piece_left_);
        header_sent_ = 0;
      }
      if (!send_piece()) return Need::writable;
    }
  }

  void ended() noexcept override { server_lane_->operation_ended(whole_); }

 private:
  void end_with(const Outcome& outcome) { end_ = ended_frame(asked_, outcome, cursor_.position(), Transport::socket); }

  // One sendmsg of what is left of the header, payload, and after the last byte the end. False: would block.
  bool send_piece() {
    iovec iov[spans_per_send + 2];
    std::size_t n = 0;
    std::uint64_t head = 0, payload = 0, tail = 0;
    if (header_sent_ < sizeof header_) {
      head = sizeof header_ - header_sent_;
      iov[n++] = {reinterpret_cast<std::uint8_t*>(&header_) + header_sent_, head};
    }
    std::optional<Entered> entered;
    if (end_.empty()) {
      entered.emplace(engine_.guards, guards_);
      if (!*entered) {
        end_with({Kind::not_found, sentence("cache ", resolved_.cache->geometry.cache_id, " or its window does not exist any more"), true, true});
        entered.reset();
        if (header_sent_ == 0) {  // nothing was promised yet
          header_sent_ = sizeof header_;
          piece_left_ = 0;
          return true;
        }
      }
    }
    auto walk = cursor_;
    if (!end_.empty()) {
      static const std::byte zeros[64 << 10] = {};
      payload = std::min<std::uint64_t>(piece_left_, sizeof zeros);
      if (payload > 0) iov[n++] = {const_cast<std::byte*>(zeros), payload};
    } else if (copier_ != nullptr) {
      if (staged_left_ == 0) stage();
      payload = std::min(staged_left_, piece_left_);
      iov[n++] = {staging_.data() + (staging_.size() - staged_left_), payload};
    } else {
      const auto& from = resolved_.cache->geometry.tensors;
      const auto most = std::min(piece_left_, bytes_per_send);
      for (std::size_t spans = 0; spans < spans_per_send && payload < most; ++spans) {
        const auto span = walk.next(most - payload);
        iov[n++] = {reinterpret_cast<void*>(from[plan_.source_first + span.tensor].address + span.source), span.bytes};
        // Before they are sent: the peer may say that it has all of them before this thread goes on.
        if (sums_) sums_->add(cursor_.position() + payload, iov[n - 1].iov_base, span.bytes);
        payload += span.bytes;
      }
    }
    const bool last = end_.empty() && payload == piece_left_ && cursor_.position() + payload == plan_.total();
    if (last) {
      tail = ok_end_.size();
      iov[n++] = {ok_end_.data(), tail};
    }
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = n;
    ssize_t sent;
    int error;
    {
      const InKernel held_perhaps(*this);
      do sent = ::sendmsg(descriptor(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      while (sent < 0 && errno == EINTR);
      error = errno;
    }
    entered.reset();
    if (sent < 0) {
      if (error == EAGAIN || error == EWOULDBLOCK) return false;
      if (error == EFAULT) {
        end_with({Kind::invalid_argument, sentence("memory of ", subject(), " is not mapped (any more) at its owner"), true, true});
        return true;  // the piece is filled up
      }
      throw Error(Kind::peer_lost, "the peer closed its lane");
    }
    auto left = static_cast<std::uint64_t>(sent);
    const auto of_head = std::min(left, head);
    header_sent_ += of_head;
    left -= of_head;
    auto of_payload = std::min(left, payload);
    left -= of_payload;
    piece_left_ -= of_payload;
    if (end_.empty()) {
      if (copier_ != nullptr) staged_left_ -= of_payload;
      while (of_payload > 0) of_payload -= cursor_.next(of_payload).bytes;
    }
    if (last && piece_left_ == 0) {  // what is left of the end is sent next
      end_ = ok_end_;
      end_sent_ = left;
    }
    return true;
  }

  void stage() {
    staging_.resize(std::min<std::uint64_t>(piece_left_, 256 << 10));
    auto walk = cursor_;
    for (std::uint64_t at = 0; at < staging_.size();) {
      const auto span = walk.next(staging_.size() - at);
      const auto address = resolved_.cache->geometry.tensors[plan_.source_first + span.tensor].address + span.source;
      if (!copier_->read(staging_.data() + at, address, span.bytes)) throw Error(Kind::invalid_argument, subject() + " is not memory of its kind");
      at += span.bytes;
    }
    staged_left_ = staging_.size();
  }

  const bool for_a_push_;  // of this side, whose receiver asks for the bytes
  std::shared_ptr<ServerLane> server_lane_;
  const std::uint64_t asked_;
  Resolved resolved_;
  std::vector<Guard> guards_;
  Plan plan_;
  PlanCursor cursor_;
  Copier* copier_;
  std::shared_ptr<ValueSums> sums_;
  wire::Header header_{};
  std::size_t header_sent_ = sizeof(wire::Header);
  std::uint64_t piece_left_ = 0;
  std::vector<std::uint8_t> ok_end_, end_;
  std::size_t end_sent_ = 0;
  std::vector<std::byte> staging_;
  std::uint64_t staged_left_ = 0;
  bool whole_ = false;
};

// A push, carried out by its receiver: a pull from the pusher's cache as the pusher has described it.
class Receive : public Pull {
 public:
  Receive(Engine& engine, std::shared_ptr<ServerLane> lane, std::shared_ptr<Link> link, Deadline deadline, std::uint64_t operation, PullAsk ask)
      : Pull(engine, std::move(link), deadline, std::move(ask), "push"), server_lane_(std::move(lane)), asked_(operation) {}

 protected:
  void ended() noexcept override {
    Pull::ended();
    const auto& r = result();
    const auto taken = sums() != nullptr && r.outcome.ok() ? sums()->taken() : std::vector<std::uint64_t>{};
    server_lane_->answer(ended_frame(asked_, r.outcome, r.bytes, r.transport, 0, taken));
    server_lane_->operation_ended(true);
  }

 private:
  std::shared_ptr<ServerLane> server_lane_;
  const std::uint64_t asked_;
};

// The moves of a push, now that its target is known: a key names a row, and a window has an order.
std::shared_ptr<const Moves> moves_to(const Target& target, const Resolved& resolved, std::shared_ptr<const Moves> moves) {
  if (moves->form == Moves::Form::in_window_order) {
    if (!resolved.window) throw Error(Kind::invalid_argument, target.label() + " is no window: say which block goes where");
    return in_window_order(*moves, resolved.window->units, false);
  }
  const bool as_keyed = moves->form == Moves::Form::row && moves->destination_row == key_row_there;
  if (resolved.key_row < 0) {
    if (as_keyed) throw Error(Kind::invalid_argument, target.label() + " names no row: say destination_row=");
    return moves;
  }
  if (moves->form != Moves::Form::row)
    throw Error(Kind::invalid_argument, sentence(target.label(), " names one row, ", resolved.key_row, ": push a row to it, and no more"));
  if (!as_keyed && moves->destination_row != resolved.key_row)
    throw Error(Kind::invalid_argument, sentence(target.label(), " names row ", resolved.key_row, ", not ", moves->destination_row, ": leave destination_row= out"));
  auto there = std::make_shared<Moves>(*moves);
  there->destination_row = static_cast<std::uint32_t>(resolved.key_row);
  there->destination_end = static_cast<std::uint64_t>(resolved.key_row) + 1;
  return there;
}

// Where a push by addresses writes: each address is a name, looked up in the live table together with everything that
// will be written behind it.
Destination destination_addresses(Engine& engine, const Target& target, const Source& source, const Moves& moves,
                                  const std::vector<std::uint64_t>& check_too) {
  const auto units = moves.form == Moves::Form::row ? 1 : moves.form == Moves::Form::whole ? source.geometry.count : moves.destination_end;
  Geometry composed = target.composed(source.geometry, units);
  std::uint64_t extent = 0;
  for (const auto& run : make_plan(source.geometry, composed, moves, -1, false).runs) extent = std::max(extent, run.destination + run.bytes);
  for (std::size_t i = 0; i < check_too.size(); ++i)
    if (!engine.registry.find_address(check_too[i], extent))
      throw Error(Kind::invalid_argument, sentence("address number ", i, " of this push: its ", extent,
                                                   " bytes do not lie inside one tensor of a cache that is registered there"));
  Destination destination;
  for (std::size_t i = 0; i < target.addresses.size(); ++i) {
    const auto found = engine.registry.find_address(target.addresses[i], extent);
    if (!found)
      throw Error(Kind::invalid_argument, sentence("address number ", i, " of this push: its ", extent,
                                                   " bytes do not lie inside one tensor of a cache that is registered there"));
    bool known = false;
    for (const auto& cache : destination.caches) known |= cache == found->cache;
    if (known) continue;
    if (!destination.caches.empty() && destination.caches.front()->kind != found->cache->kind)
      throw Error(Kind::invalid_argument, "the addresses of one push lie in memory of different kinds");
    destination.guards.push_back(found->cache->guard);
    destination.kind = found->cache->kind;
    destination.caches.push_back(found->cache);
  }
  if (destination.caches.empty()) throw Error(Kind::invalid_argument, "a push by addresses names no address");
  destination.composed = std::move(composed);
  return destination;
}

}  // namespace

void put_resolved(wire::Writer& out, const Resolved& resolved) {
  out.put(resolved.epoch).put(resolved.key_row).put(static_cast<std::uint8_t>(resolved.cache->file_backed.load()));
  out.put(static_cast<std::uint8_t>(resolved.window != nullptr));
  wire::put_runs(out, resolved.window ? resolved.window->units : std::vector<UnitRun>{});
  wire::put_guards(out, resolved.guards);
  wire::put_geometry(out, resolved.cache->geometry);
}

std::shared_ptr<Source> get_resolved(wire::Reader& in, const Target& target) {
  auto source = std::make_shared<Source>();
  source->epoch = in.get<std::uint64_t>();
  source->by_epoch = target.by != Target::By::id && target.by != Target::By::window;
  source->key_row = in.get<std::int64_t>();
  source->file_backed = in.get<std::uint8_t>() != 0;
  source->windowed = in.get<std::uint8_t>() != 0;
  source->window = wire::get_runs(in);
  source->guards = wire::get_guards(in);
  source->geometry = wire::get_geometry(in);
  return source;
}

std::vector<std::uint8_t> ended_frame(std::uint64_t operation, const Outcome& outcome, std::uint64_t bytes, Transport transport,
                                      std::uint16_t flags, const std::vector<std::uint64_t>& checksums) {
  wire::Writer out(wire::Type::ended, operation, flags);
  wire::put_outcome(out, outcome);
  out.put(bytes).put(transport);
  wire::put_words(out, checksums);
  return out.take();
}

Ended read_ended(const Frame& frame) {
  if (frame.header.type != wire::Type::ended) throw wire::WireError("an answer of another kind than was asked for");
  wire::Reader in(frame.body);
  Ended ended;
  ended.outcome = wire::get_outcome(in);
  ended.bytes = in.get<std::uint64_t>();
  ended.transport = static_cast<Transport>(in.get<std::uint8_t>());
  ended.checksums = wire::get_words(in);
  return ended;
}

ServerLane::ServerLane(Engine& engine, std::shared_ptr<Link> link, Descriptor descriptor, FrameBuffer read)
    : engine_(engine), link_(std::move(link)), descriptor_(std::move(descriptor)), in_(std::move(read)) {
  in_.set_limit(wire::max_request_bytes);
}

ServerLane::ServerLane(Engine& engine, std::shared_ptr<Link> link, Descriptor descriptor, std::vector<std::uint8_t> first,
                       std::function<void(bool used)> lost)
    : engine_(engine),
      link_(std::move(link)),
      descriptor_(std::move(descriptor)),
      in_(wire::max_request_bytes),
      out_(std::move(first)),
      lost_(std::move(lost)) {}

void ServerLane::start() {
  // Writable at once as well: what was read together with the lane hello is waiting already.
  const bool at_once = !out_.empty() || !in_.empty();
  const std::lock_guard lock(mutex_);  // the first event may come before watch() has returned
  token_ = engine_.reactor.watch(descriptor_.get(), 0, shared_from_this());
  watch_for(at_once ? EPOLLOUT : EPOLLIN);
}

void ServerLane::close() noexcept {
  ::shutdown(descriptor_.get(), SHUT_RDWR);
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    operation = operation_;
  }
  if (operation) operation->schedule();
}

// Reading stays armed while requests are answered at once, which saves a system call for each.
void ServerLane::watch_for(std::uint32_t events) {
  if (events == EPOLLIN && armed_for_reading_.exchange(true)) return;
  armed_for_reading_.store(events == EPOLLIN);
  engine_.reactor.rearm(token_, descriptor_.get(), events, events == EPOLLIN ? Reactor::Mode::always : Reactor::Mode::once);
}

void ServerLane::drop() noexcept {
  if (std::exchange(dropped_, true)) return;
  const auto self = shared_from_this();  // the reactor may hold the last reference
  engine_.reactor.forget(token_, descriptor_.get());
  armed_for_reading_.store(false);
  ::shutdown(descriptor_.get(), SHUT_RDWR);
  if (lost_) lost_(used_);
}

// On the control thread.
void ServerLane::ready(std::uint32_t events) {
  if (dropped_) return;
  {
    std::unique_lock lock(mutex_);
    if (operation_) {
      const auto operation = operation_;
      const bool gone = receiving_ && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      lock.unlock();
      if (gone)
        operation->cancel();  // who pushed does not wait for it any more
      else
        operation->schedule();
      return;
    }
  }
  try {
    if (!flush()) return watch_for(EPOLLOUT);
    Frame frame;
    for (;;) {
      switch (in_.read(descriptor_.get(), frame)) {
        case FrameBuffer::State::would_block: return watch_for(EPOLLIN);
        case FrameBuffer::State::lost: return drop();
        case FrameBuffer::State::frame: break;
      }
      went_on_ = false;
      used_ = true;
      handle(frame);
      if (went_on_ || dropped_) return;
      if (!flush()) return watch_for(EPOLLOUT);
      if (in_.empty()) return watch_for(EPOLLIN);
    }
  } catch (const wire::WireError& error) {
    engine_.log.add("warning", "a lane of " + link_->label() + " was closed: " + error.what());
  } catch (const std::bad_alloc&) {
    engine_.log.add("warning", "a lane of " + link_->label() + " was closed: out of memory for its request");
  }
  drop();
}

void ServerLane::handle(Frame& frame) {
  try {
    switch (frame.header.type) {
      case wire::Type::resolve: return on_resolve(frame);
      case wire::Type::pull: return on_pull(frame);
      case wire::Type::push: return on_push(frame);
      case wire::Type::consume: return on_consume(frame);
      case wire::Type::fetch_segment: return on_fetch_segment(frame);
      case wire::Type::segment_made: return on_segment_made(frame);
      default: throw wire::WireError("an unknown request");
    }
  } catch (const Error& error) {
    answer_ended(frame.header.operation, error.outcome());
  }
}

void ServerLane::on_resolve(const Frame& frame) {
  wire::Reader in(frame.body);
  const auto target = wire::get_target(in);
  const bool to_describe = in.get<std::uint8_t>() != 0;
  const auto resolved = engine_.registry.resolve(target, to_describe ? Access::any : Access::read);
  if (!to_describe) engine_.check_readable(*resolved.cache);
  wire::Writer out(wire::Type::geometry, frame.header.operation, resolved.consumed_by_pull ? wire::flag_consume : 0);
  put_resolved(out, resolved);
  if (out.body_bytes() > wire::max_request_bytes)
    throw Error(Kind::invalid_argument, sentence(target.label(), " has too many tensors and runs of blocks to be named to a peer: ", out.body_bytes(), " bytes"));
  answer(out.take());
}

void ServerLane::on_fetch_segment(const Frame& frame) {
  wire::Reader in(frame.body);
  const auto id = in.get<std::uint32_t>();
  if (link_->peer.page)  // a process of the same user on this host
    for (const auto& segment : engine_.registry.segments())
      if (segment->id() == id) {
        link_->announce(id);
        return answer(wire::Writer(wire::Type::segment, frame.header.operation, wire::flag_descriptor).take(), segment->descriptor());
      }
  throw Error(Kind::not_found, sentence("segment ", id, " does not exist"));
}

// No answer: it goes ahead of a push, which does without the segment if this fails.
void ServerLane::on_segment_made(Frame& frame) {
  wire::Reader in(frame.body);
  const auto id = in.get<std::uint32_t>();
  if (!link_->peer.page || frame.descriptors.size() != 1) return;
  link_->take_segment(id, std::move(frame.descriptors[0]));
}

void ServerLane::on_consume(const Frame& frame) {
  wire::Reader in(frame.body);
  const auto target = wire::get_target(in);
  auto row = in.get<std::int64_t>();
  const auto first = in.get<std::uint32_t>();
  const auto count = in.get<std::uint32_t>();
  const auto resolved = engine_.registry.resolve(target, Access::read);
  if (resolved.key_row >= 0) row = resolved.key_row;
  const bool first_to_pull = !resolved.consumed_by_pull || engine_.registry.consume(resolved.cache->geometry.cache_id, row, first, count);
  if (!first_to_pull && target.by == Target::By::request)
    throw Error(Kind::not_found, target.label() + " was pulled by somebody else first");
  answer_ended(frame.header.operation, {});
}

Resolved ServerLane::offered(const Target& target) const {
  auto offer = link_->offered(target.id);
  if (!offer) throw Error(Kind::not_found, target.label() + " does not exist (any more)");
  Resolved resolved;
  resolved.cache = std::move(offer->memory);
  resolved.guards = {offer->guard};
  return resolved;
}

void ServerLane::on_pull(const Frame& frame) {
  wire::Reader in(frame.body);
  const auto left_ms = in.get<std::uint32_t>();
  auto guards = wire::get_guards(in);
  const auto target = wire::get_target(in);
  const auto select = wire::get_select(in);
  auto resolved = target.by == Target::By::push ? offered(target) : engine_.registry.resolve(target, Access::read);
  engine_.check_readable(*resolved.cache);
  // A push of this process's memory is asked for by its number alone: what it gives away is what its own caller said.
  const auto& memory_moves = resolved.cache->memory_moves;
  auto plan = make_source_plan(resolved.cache->geometry, memory_moves ? select_spans(*memory_moves) : select, resolved.key_row);
  if (resolved.window && select.by_spans) {
    check_inside(resolved.window->units, select.spans, resolved.cache->geometry);
  } else if (resolved.window) {
    const auto row = select.row >= 0 ? select.row : resolved.key_row;
    const auto count = static_cast<std::uint32_t>(resolved.cache->geometry.count);
    const auto units = select.whole_count > 0 ? std::vector<UnitRun>{{0, count}}
                       : select.unit_bytes > 0 ? select.units
                                               : std::vector<UnitRun>{{static_cast<std::uint32_t>(row), 1}};
    check_inside(resolved.window->units, units, resolved.cache->geometry.label());
  }
  const bool for_a_push = !guards.empty();  // its guard, with that of its source
  guards.insert(guards.end(), resolved.guards.begin(), resolved.guards.end());
  for (const auto& guard : guards)
    if (!engine_.guards.alive(guard)) throw Error(Kind::not_found, target.label() + " or the push it belongs to does not exist any more");
  const auto operation = std::make_shared<Send>(engine_, shared_from_this(), link_, Deadline::after_ms(left_ms), frame.header.operation,
                                                std::move(resolved), std::move(guards), std::move(plan), for_a_push);
  run(operation, operation->total() <= send_inline_bytes && !operation->may_be_held());
}

void ServerLane::on_push(const Frame& frame) {
  wire::Reader in(frame.body);
  const auto left_ms = in.get<std::uint32_t>();
  PullAsk ask;
  ask.transports = in.get<std::uint8_t>();
  const auto target = wire::get_target(in);
  auto source = std::make_shared<Source>();
  source->file_backed = in.get<std::uint8_t>() != 0;
  source->guards = wire::get_guards(in);
  source->geometry = wire::get_push_source(in);
  ask.moves = wire::get_moves(in);
  const auto check_too = wire::get_words(in);
  ask.sums = wire::get_sums(in);
  const bool of_memory = source->geometry.layout == Layout::memory;
  ask.target.by = of_memory ? Target::By::push : Target::By::id;
  ask.target.id = of_memory ? frame.header.operation : source->geometry.cache_id;
  ask.mover_owns_destination = false;
  ask.keep = false;
  if (target.by == Target::By::addresses && ask.moves->form == Moves::Form::spans)
    throw Error(Kind::invalid_argument, "a push by addresses says by them where everything goes: spans go into a cache or a window");
  if (target.by == Target::By::addresses) {
    ask.destination = destination_addresses(engine_, target, *source, *ask.moves, check_too);
  } else {
    auto resolved = engine_.registry.resolve(target, Access::write);
    ask.moves = moves_to(target, resolved, std::move(ask.moves));
    if (resolved.window && ask.moves->form == Moves::Form::spans) {
      check_inside(resolved.window->units, destination_spans(*ask.moves), resolved.cache->geometry);
    } else if (resolved.window) {
      const auto& moves = *ask.moves;
      const auto units = moves.form == Moves::Form::blocks || moves.form == Moves::Form::row_to_blocks
                             ? moves.destination
                             : moves.form == Moves::Form::row ? std::vector<UnitRun>{{moves.destination_row, 1}}
                                                              : std::vector<UnitRun>{{0, static_cast<std::uint32_t>(resolved.cache->geometry.count)}};
      check_inside(resolved.window->units, units, resolved.cache->geometry.label());
    }
    ask.destination.kind = resolved.cache->kind;
    ask.destination.guards = std::move(resolved.guards);
    ask.destination.caches.push_back(std::move(resolved.cache));
  }
  ask.source = std::move(source);
  const auto operation = std::make_shared<Receive>(engine_, shared_from_this(), link_, Deadline::after_ms(left_ms), frame.header.operation, std::move(ask));
  {
    const std::lock_guard lock(mutex_);
    receiving_ = true;
  }
  run(operation, false);
  const std::lock_guard lock(mutex_);
  if (operation_) watch_for(EPOLLRDHUP);
}

void ServerLane::run(const std::shared_ptr<Operation>& operation, bool here) {
  {
    const std::lock_guard lock(mutex_);
    operation_ = operation;
    starting_ = true;
  }
  try {
    if (here) {
      operation->start_here();
    } else {
      if (armed_for_reading_) watch_for(0);  // before it can want to watch for something itself
      operation->start();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    operation_.reset();
    starting_ = false;
    receiving_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  starting_ = false;
  went_on_ = operation_ != nullptr;  // from here on the lane is its, until operation_ended()
}

void ServerLane::operation_ended(bool whole) noexcept {
  // All under the lock: once there is no operation in hand, the next event makes the lane the control thread's again.
  const std::lock_guard lock(mutex_);
  if (!whole) {
    ::shutdown(descriptor_.get(), SHUT_RDWR);  // in the middle of a frame: the peer sees the end of the lane
  }
  operation_.reset();
  receiving_ = false;
  if (starting_) return;  // the control thread is in handle() and goes on by itself
  if (whole && in_.empty() && out_.empty()) return watch_for(EPOLLIN);
  engine_.reactor.post([self = shared_from_this()] { self->ready(0); });
}

void ServerLane::answer_ended(std::uint64_t operation, const Outcome& outcome, std::uint64_t bytes, Transport transport) {
  answer(ended_frame(operation, outcome, bytes, transport));
}

void ServerLane::answer(std::vector<std::uint8_t> frame, int attached) {
  if (out_.empty()) {
    const long n = send_some(descriptor_.get(), frame, attached >= 0 ? std::span<const int>(&attached, 1) : std::span<const int>());
    if (n == static_cast<long>(frame.size())) return;
    // A descriptor that did not go with the first byte does not go at all: the peer then does without the segment.
    if (n > 0) frame.erase(frame.begin(), frame.begin() + n);
  }
  out_.insert(out_.end(), frame.begin(), frame.end());
}

bool ServerLane::flush() {
  while (!out_.empty()) {
    const long n = send_some(descriptor_.get(), std::span(out_).subspan(out_sent_));
    if (n < 0) {
      out_.clear();
      out_sent_ = 0;
      return true;  // the next read finds the lane lost
    }
    if (n == 0) return false;
    out_sent_ += static_cast<std::size_t>(n);
    if (out_sent_ == out_.size()) {
      out_.clear();
      out_sent_ = 0;
    }
  }
  return true;
}

}  // namespace kvferry
