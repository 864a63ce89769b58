// Two sockets that are connected to each other.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <span>

#include "../descriptor.hpp"
#include "../socket.hpp"
#include "check.hpp"

namespace kvferry::testing {

struct Ends {
  Descriptor here, there;

  Ends() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    here = Descriptor(ends[0]);
    there = Descriptor(ends[1]);
  }
  // What `there` says, `here` can read.
  void say(std::span<const std::uint8_t> bytes, std::span<const int> descriptors = {}) {
    CHECK(send_some(there.get(), bytes, descriptors) == static_cast<long>(bytes.size()));
  }
  void say() { say(std::array<std::uint8_t, 1>{'x'}); }
};

}  // namespace kvferry::testing
