// Messages as they are read from a lane: a frame whose body is a caller's bytes and ends up in memory of its own. A short
// body is copied once, from what was read ahead; a long one is read where it stays.
#pragma once

#include <cstdlib>
#include <memory>
#include <span>
#include <utility>

#include "wire.hpp"

namespace kvferry {

// Bytes that nobody has filled with zeros first, and that move when they grow without being copied by hand.
class Payload {
 public:
  Payload() = default;
  Payload(Payload&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Payload& operator=(Payload&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  explicit Payload(std::span<const std::uint8_t> bytes);  // a copy
  void resize(std::size_t size);                          // throws std::bad_alloc
  std::uint8_t* data() noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::span<const std::uint8_t> bytes() const noexcept { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::uint8_t* data) const noexcept { std::free(data); }
  };
  std::unique_ptr<std::uint8_t, Free> data_;
  std::size_t size_ = 0;
};

class MessageReader {
 public:
  explicit MessageReader(std::span<const std::uint8_t> read_before = {});
  enum class State { message, would_block, more, lost };
  // Reads until a whole message is there, but no more than a turn's worth of a long one (more). Throws wire::WireError for a
  // frame over the limit, std::bad_alloc.
  State read(int fd);
  bool ahead() const noexcept { return have_ > 0 && !in_body_; }  // something of the next one has been read already
  bool empty() const noexcept { return have_ == 0 && !in_body_; }

  wire::Header header;  // of the message that is there
  Payload body;

 private:
  bool begin_body();

  std::size_t room_;
  std::unique_ptr<std::uint8_t[]> ahead_;
  std::size_t have_ = 0;
  bool in_body_ = false;
  std::size_t body_have_ = 0;
};

}  // namespace kvferry
