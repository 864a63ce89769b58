#include "message.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "socket.hpp"

namespace kvferry {

namespace {
constexpr std::size_t read_ahead = 4096;
constexpr std::size_t first_room = 64 << 10;  // of a long body
constexpr std::size_t bytes_per_turn = 1 << 20;
}  // namespace

Payload::Payload(std::span<const std::uint8_t> bytes) {
  resize(bytes.size());
  if (!bytes.empty()) std::memcpy(data(), bytes.data(), bytes.size());
}

void Payload::resize(std::size_t size) {
  if (size > 0) {
    auto* grown = static_cast<std::uint8_t*>(std::realloc(data_.get(), size));
    if (grown == nullptr) throw std::bad_alloc();
    [[maybe_unused]] auto* moved = data_.release();
    data_.reset(grown);
  }
  size_ = size;
}

MessageReader::MessageReader(std::span<const std::uint8_t> read_before)
    : room_(std::max(read_ahead, read_before.size())), ahead_(new std::uint8_t[room_]), have_(read_before.size()) {
  if (have_ > 0) std::memcpy(ahead_.get(), read_before.data(), have_);
}

// False: its header has not come yet.
bool MessageReader::begin_body() {
  if (have_ < sizeof header) return false;
  std::memcpy(&header, ahead_.get(), sizeof header);
  if (header.body_bytes > wire::max_request_bytes) throw wire::WireError("a frame is larger than allowed here");
  body_have_ = std::min<std::size_t>(have_ - sizeof header, header.body_bytes);
  body.resize(std::min<std::size_t>(header.body_bytes, std::max(body_have_, first_room)));
  if (body_have_ > 0) std::memcpy(body.data(), ahead_.get() + sizeof header, body_have_);
  const auto used = sizeof header + body_have_;
  have_ -= used;
  if (have_ > 0) std::memmove(ahead_.get(), ahead_.get() + used, have_);
  return in_body_ = true;
}

MessageReader::State MessageReader::read(int fd) {
  for (std::size_t this_turn = 0;;) {
    const bool begun = in_body_ || begin_body();
    if (begun && body_have_ == header.body_bytes) {
      in_body_ = false;
      return State::message;
    }
    if (this_turn >= bytes_per_turn) return State::more;  // so there is more to come
    long n;
    if (!begun) {
      n = receive_some(fd, {ahead_.get() + have_, room_ - have_});
      if (n > 0) have_ += static_cast<std::size_t>(n);
    } else {
      // Memory grows with what has come, not with what a header promises.
      if (body_have_ == body.size()) body.resize(std::min<std::size_t>(header.body_bytes, 2 * body.size()));
      n = receive_some(fd, {body.data() + body_have_, body.size() - body_have_});
      if (n > 0) body_have_ += static_cast<std::size_t>(n);
    }
    if (n < 0) return State::lost;
    if (n == 0) return State::would_block;
    this_turn += static_cast<std::size_t>(n);
  }
}

}  // namespace kvferry
