// A call, from the side that asks: a message to the code that answers calls at the peer, and that code's answer. Or a message
// alone, which nobody answers.
#pragma once

#include <optional>

#include "link.hpp"
#include "message.hpp"

namespace kvferry {

inline constexpr std::size_t longest_message = wire::max_request_bytes;
void check_message(std::size_t bytes);  // throws Error(invalid_argument)

class Ask : public Operation {
 public:
  // `message` is the caller's and stays as it is until the operation has ended.
  Ask(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, std::span<const std::uint8_t> message, bool one_way);
  // It is the operation's own.
  Ask(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, Payload message, bool one_way);

  std::span<const std::uint8_t> answer() const noexcept { return answer_.bytes(); }  // once it has ended well

 protected:
  Need step() override;

 private:
  Sent send();
  Payload kept_;
  std::span<const std::uint8_t> message_;
  const bool one_way_;
  bool asked_ = false;  // all of it has gone out: the peer may have begun
  std::size_t sent_ = 0;
  wire::Header header_{};
  std::optional<MessageReader> in_;
  Payload answer_;
};

}  // namespace kvferry
