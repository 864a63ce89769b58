// Descriptors that close themselves, here and in a forked child.
//
// Every descriptor of the core is owned by a Descriptor and noted in a process-wide ledger (a bitmap, no lock), so that a
// fork's child handler can close them all: the parent's death is then seen by its peers, and its port is free, although
// the child lives on. Each fork starts a new generation; whatever was made in an older one is closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvferry {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept;  // it may have another number afterwards
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// 0 in the first process, one more in each forked child of it.
std::uint32_t process_generation() noexcept;

std::size_t open_descriptors() noexcept;  // of the core in this process

// Called by everything that owns descriptors, before its first one: installs the fork handler once.
void watch_forks();

}  // namespace kvferry
