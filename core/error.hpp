// What can go wrong, named by what the caller can do about it, and the one exception type of the core.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry {

// The wire carries these numbers (docs/wire.md); append only.
enum class Kind : std::uint16_t {
  ok = 0,
  invalid_argument = 1,  // known before the first byte: fix the call
  not_found = 2,         // cache, key, window or row does not exist (any more)
  not_linked = 3,        // link first
  already_linked = 4,
  link_failed = 5,       // nobody there, or no kvferry there
  refused = 6,           // secret, version, uid
  peer_lost = 7,         // the other process or the way to it is gone
  deadline = 8,          // time was up
  cancelled = 9,
  closed = 10,           // this node is closed (or this is a forked child)
  busy = 11,
  out_of_memory = 12,
  address_in_use = 13,
  unsupported = 14,
  exists = 15,
  internal = 16,
};

std::string_view kind_name(Kind kind) noexcept;

// How an operation ended. `touched`: bytes of the destination may have changed. `settled`: whoever could write to the
// destination is known to have stopped.
struct Outcome {
  Kind kind = Kind::ok;
  std::string sentence;
  bool touched = false;
  bool settled = true;

  bool ok() const noexcept { return kind == Kind::ok; }
  static Outcome fail(Kind kind, std::string sentence) { return {kind, std::move(sentence), false, true}; }
};

class Error : public std::exception {
 public:
  Error(Kind kind, std::string sentence) : outcome_{kind, std::move(sentence), false, true} {}
  explicit Error(Outcome outcome) : outcome_(std::move(outcome)) {}
  Error(Outcome outcome, std::string peer, std::string cache, std::string operation)
      : outcome_(std::move(outcome)), peer(std::move(peer)), cache(std::move(cache)), operation(std::move(operation)) {}

  const char* what() const noexcept override { return outcome_.sentence.c_str(); }
  const Outcome& outcome() const noexcept { return outcome_; }

 private:
  Outcome outcome_;

 public:
  std::string peer;       // "node 7 at 127.0.0.1:7000"
  std::string cache;      // "cache 3 'kv'"
  std::string operation;  // "pull"
};

// What the system does not give, and the way out of that. `what`: "an eventfd"; `error`: the errno it was refused with.
Error not_to_be_had(std::string_view what, int error);
Error out_of_threads(std::string_view name);

}  // namespace kvferry
