#include "ask.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

#include "sentence.hpp"
#include "serve.hpp"

namespace kvferry {

void check_message(std::size_t bytes) {
  if (bytes > longest_message) throw Error(Kind::invalid_argument, sentence("a message of ", bytes, " bytes: ", longest_message, " are allowed"));
}

Ask::Ask(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, std::span<const std::uint8_t> message, bool one_way)
    : Operation(engine, std::move(link), deadline, one_way ? "send" : "call"), message_(message), one_way_(one_way) {
  check_message(message.size());
}

Ask::Ask(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, Payload message, bool one_way)
    : Ask(engine, std::move(link), deadline, message.bytes(), one_way) {
  kept_ = std::move(message);  // which leaves its bytes where they are
}

Need Ask::step() {
  if (must_stop() && !(asked_ && only_link_ended())) throw Error(stop_reason());
  while (!asked_) {
    if (!take_lane(LaneUse::call)) return Need::lane;
    switch (send()) {
      case Sent::later: return Need::writable;
      case Sent::lost:  // it has not gone out whole, so nobody has begun
        if (!change_lane()) throw Error(lane_closed());
        sent_ = 0;
        break;
      case Sent::all:
        asked_ = true;
        if (!one_way_) return Need::readable;  // the answer is not there yet
        give_lane();
        finish({}, message_.size(), Transport::socket);
        return Need::done;
    }
  }
  if (!in_) in_.emplace();
  switch (in_->read(lane_->descriptor.get())) {
    case MessageReader::State::more: return Need::readable;
    case MessageReader::State::would_block:
      if (!link_->alive()) throw Error(stop_reason());
      return Need::readable;
    case MessageReader::State::lost: throw Error(lane_closed());
    case MessageReader::State::message: break;
  }
  if (in_->header.operation != number() || in_->ahead()) throw wire::WireError("an answer to something that was not asked");
  if (in_->header.type == wire::Type::answer) {
    answer_ = std::move(in_->body);
    give_lane();
    finish({}, answer_.size(), Transport::socket);
    return Need::done;
  }
  Frame frame;
  frame.header = in_->header;
  const auto said = in_->body.bytes();
  frame.body.assign(said.begin(), said.end());
  auto outcome = read_ended(frame).outcome;
  if (outcome.ok()) throw wire::WireError("an answer of another kind than was asked for");
  give_lane();
  throw Error(outcome);
}

// What a lane just dialled sends first, the header and the message in one go.
Operation::Sent Ask::send() {
  const int fd = lane_->descriptor.get();
  if (sent_ == 0) {
    // What is sent over TCP to a peer that has closed seems to go, and might have been heard: look first.
    if (!link_->peer.same_host && closed_by_peer(fd)) return Sent::lost;
    header_.type = one_way_ ? wire::Type::tell : wire::Type::call;
    header_.body_bytes = static_cast<std::uint32_t>(message_.size());
    header_.operation = number();
    header_.offset = one_way_ ? 0 : static_cast<std::uint64_t>(deadline_.left_ms());
  }
  auto& preface = lane_->preface;
  while (sent_ < sizeof header_ + message_.size()) {
    iovec iov[3];
    std::size_t n = 0;
    if (!preface.empty()) iov[n++] = {preface.data(), preface.size()};
    if (sent_ < sizeof header_) iov[n++] = {reinterpret_cast<std::uint8_t*>(&header_) + sent_, sizeof header_ - sent_};
    const auto of_message = sent_ < sizeof header_ ? 0 : sent_ - sizeof header_;
    if (of_message < message_.size()) iov[n++] = {const_cast<std::uint8_t*>(message_.data()) + of_message, message_.size() - of_message};
    const long went = send_some(fd, std::span<const iovec>(iov, n));
    if (went < 0) return Sent::lost;
    if (went == 0) return Sent::later;
    const auto of_preface = std::min(static_cast<std::size_t>(went), preface.size());
    preface.erase(preface.begin(), preface.begin() + static_cast<std::ptrdiff_t>(of_preface));
    sent_ += static_cast<std::size_t>(went) - of_preface;
  }
  return Sent::all;
}

}  // namespace kvferry
