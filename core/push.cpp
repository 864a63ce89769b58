#include "push.hpp"

#include <algorithm>

#include "sentence.hpp"
#include "serve.hpp"

namespace kvferry {

namespace {
// So that the receiver's own deadline passes first and its answer, which says that it has stopped, still comes in time: after
// the piece in hand, and over threads that have to wake up, which takes its milliseconds however short the deadline was.
std::int64_t told_ms(const Deadline& deadline) {
  constexpr std::int64_t least = 3, most = 50;
  const auto left = deadline.left_ms();
  const auto margin = std::min(std::clamp(left / 10, least, most), left / 2);
  return std::min<std::int64_t>(left - margin, UINT32_MAX);
}
// A layer push waits for its next layer without a deadline of its own.
constexpr std::int64_t far_ns = INT64_MAX / 2;
}  // namespace

Push::Push(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, PushAsk ask)
    : Operation(engine, std::move(link), deadline, "push"), ask_(std::move(ask)) {}

Push::~Push() {
  if (guard_.number != 0 && !done()) end_guard();  // of one that is done nothing is left, and its node may be gone
}

Need Push::step() {
  const Need need = converse(ask_.target, ask_.moves->source_tensors, ask_.moves->destination_tensors);
  if (need == Need::done) finish({}, bytes_, transport_);
  return need;
}

Need Push::converse(const Target& target, const TensorRange& source, const TensorRange& destination) {
  const bool may_be_answered = asked_ && request_sent() && only_link_ended();
  if (must_stop() && !may_be_answered) give_up(stop_reason());
  if (!asked_) {
    if (!request_set()) {
      check_blocks("source", ask_.source->geometry, ask_.moves->overwritten);  // of which the receiver is not told
      engine_.check_readable(*ask_.source);
      if (!of_memory() && !engine_.guards.alive(ask_.source->guard)) throw Error(Kind::not_found, subject() + " does not exist any more");
      if (guard_.number == 0) {
        guard_ = engine_.guards.open();
        if (of_memory()) link_->offer(number(), {ask_.source, guard_});
      }
    }
    if (!take_lane(LaneUse::push)) return Need::lane;
    wire::Writer request(wire::Type::push, number());
    request.put(static_cast<std::uint32_t>(std::max<std::int64_t>(told_ms(deadline_), 1)));
    request.put(static_cast<std::uint8_t>(ask_.transports & engine_.options.transports));
    wire::put_target(request, target);
    request.put(static_cast<std::uint8_t>(ask_.source->file_backed.load()));
    wire::put_guards(request, of_memory() ? std::vector<Guard>{guard_} : std::vector<Guard>{ask_.source->guard, guard_});
    wire::put_geometry(request, ask_.source->geometry);
    wire::put_moves(request, *ask_.moves, source, destination);
    wire::put_words(request, check_too_);
    wire::put_sums(request, ask_.moves->sums.get());
    if (request.body_bytes() > wire::max_request_bytes)
      throw Error(Kind::invalid_argument, "the lists of blocks or spans of one push are too long; push them in several calls");
    set_request(request.take());
    asked_ = true;
    in_.emplace(wire::max_control_bytes);
  }
  switch (send_request()) {
    case Sent::later: return Need::writable;
    case Sent::lost:  // it has not gone out whole, so nobody has begun
      asked_ = false;
      if (!change_lane()) give_up(lane_closed());
      return converse(target, source, destination);
    case Sent::all: break;
  }
  Frame frame;
  switch (in_->read(lane_->descriptor.get(), frame)) {
    case FrameBuffer::State::would_block:
      if (may_be_answered) give_up(stop_reason());
      return Need::readable;
    case FrameBuffer::State::lost: give_up(lane_closed());
    case FrameBuffer::State::frame: break;
  }
  if (frame.header.operation != number()) throw wire::WireError("an answer to something that was not asked");
  auto answer = read_ended(frame);
  give_lane();
  asked_ = false;
  set_request({});
  check_too_.clear();
  touched_ |= answer.outcome.touched || answer.bytes > 0;
  if (const auto& sums = ask_.moves->sums; sums && !answer.checksums.empty()) sums->take(answer.checksums);
  if (!answer.outcome.ok()) throw Error(answer.outcome);
  bytes_ += answer.bytes;
  transport_ = answer.transport;
  return Need::done;
}

// A receiver on this host maps what the cache lies in; it gets the descriptors ahead of the request, once per link.
bool Push::before_request() {
  // What is sent over TCP to a peer that has closed seems to go, and might have been carried out: look first.
  if (closed_by_peer(lane_->descriptor.get())) return false;
  if (!link_->peer.page || !ask_.source->geometry.mappable()) return true;
  for (const auto& place : ask_.source->places) {
    if (!link_->announce_ahead(place.segment->id())) continue;
    wire::Writer frame(wire::Type::segment_made, number(), wire::flag_descriptor);
    frame.put(place.segment->id());
    const int fd = place.segment->descriptor();
    const auto bytes = frame.take();
    const long n = send_some(lane_->descriptor.get(), bytes, {&fd, 1});
    if (n == static_cast<long>(bytes.size())) continue;
    link_->forget_announcement(place.segment->id());
    if (n > 0) throw Error(Kind::peer_lost, link_->label() + " does not read its lane");
    break;  // its buffer is full: this push goes by another transport
  }
  return true;
}

void Push::give_up(Outcome why) {
  end_guard();
  if (asked_) {
    why.touched = true;
    // A dead process writes nothing; of any other nothing is known until its own deadline has passed.
    why.settled = link_->peer_process_ended();
  } else {
    why.touched = touched_;
  }
  throw Error(std::move(why));
}

// Nothing is read on its behalf any more when this returns, unless the kernel holds that copy, from a file: then it is out of
// order, the lane that it goes to is closed, and the cache's own guard says Busy.
void Push::end_guard() noexcept {
  if (of_memory()) link_->withdraw(number());
  engine_.guards.end(guard_, ask_.source->file_backed.load() ? 0 : GuardTable::patience_ms_normally);
}

void Push::ended() noexcept {
  end_guard();
  auto& count = result().outcome.ok() ? link_->pushes : link_->failures;
  count.fetch_add(1, std::memory_order_relaxed);
  link_->bytes_pushed.fetch_add(result().bytes, std::memory_order_relaxed);
}

LayerPush::LayerPush(Engine& engine, std::shared_ptr<Link> link, PushAsk ask, std::vector<std::uint32_t> layers,
                     std::vector<std::uint32_t> destination_layers, std::uint32_t tensors_per_layer, std::int64_t timeout_ms)
    : Push(engine, std::move(link), Deadline{far_ns}, std::move(ask)),
      layers_(std::move(layers)),
      destination_layers_(std::move(destination_layers)),
      tensors_per_layer_(tensors_per_layer),
      timeout_ms_(timeout_ms),
      ready_ns_(layers_.size(), 0) {
  const auto tensors = ask_.source->geometry.tensors.size();
  if (tensors_per_layer_ == 0) throw Error(Kind::invalid_argument, "a layer has at least one tensor");
  if (layers_.size() != destination_layers_.size())
    throw Error(Kind::invalid_argument, sentence(layers_.size(), " source layers for ", destination_layers_.size(), " destination layers"));
  for (const auto layer : layers_)
    if ((std::uint64_t{layer} + 1) * tensors_per_layer_ > tensors)
      throw Error(Kind::invalid_argument, sentence("layer ", layer, " of ", subject(), " does not exist: it has ", tensors, " tensors, ",
                                                   tensors_per_layer_, " a layer"));
  if (ask_.target.by == Target::By::addresses && ask_.target.addresses.size() != layers_.size() * tensors_per_layer_)
    throw Error(Kind::invalid_argument, sentence(ask_.target.addresses.size(), " addresses for ", layers_.size(), " layers of ", tensors_per_layer_, " tensors"));
  if (ask_.target.by == Target::By::addresses) check_too_ = ask_.target.addresses;
}

void LayerPush::layer_ready(std::uint32_t layer) {
  if (!done()) check_not_forked(generation());
  bool known = false;
  {
    const std::lock_guard lock(ready_mutex_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (layers_[i] != layer) continue;
      known = true;
      if (ready_ns_[i] == 0) ready_ns_[i] = now_ns();
    }
  }
  if (!known) throw Error(Kind::invalid_argument, sentence("layer ", layer, " is not one of this push"));
  schedule();
}

Need LayerPush::step() {
  for (;;) {
    if (next_ == layers_.size()) {
      finish({}, bytes_, transport_);
      return Need::done;
    }
    std::int64_t ready;
    {
      const std::lock_guard lock(ready_mutex_);
      ready = ready_ns_[next_];
    }
    if (ready == 0) {
      set_deadline({far_ns});
      if (must_stop()) give_up(stop_reason());
      return Need::nothing_yet;
    }
    set_deadline({ready + timeout_ms_ * 1'000'000});
    Target target = ask_.target;
    TensorRange destination{destination_layers_[next_] * tensors_per_layer_, tensors_per_layer_};
    if (target.by == Target::By::addresses) {
      const auto begin = ask_.target.addresses.begin() + static_cast<std::ptrdiff_t>(next_ * tensors_per_layer_);
      target.addresses.assign(begin, begin + tensors_per_layer_);
      destination = {0, tensors_per_layer_};
    }
    const Need need = converse(target, {layers_[next_] * tensors_per_layer_, tensors_per_layer_}, destination);
    if (need != Need::done) return need;
    ++next_;
  }
}

}  // namespace kvferry
