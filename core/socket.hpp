// Sockets: addresses, listening, dialling, bytes with descriptors. Knows frames' headers but nothing of what is in them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "clock.hpp"
#include "descriptor.hpp"
#include "error.hpp"
#include "wire.hpp"

namespace kvferry {

struct Credentials {
  std::int64_t pid = 0;  // 0: not visible from here
  std::uint32_t uid = 0;
};

// `host` is a numeric address or a name; port 0 lets the kernel choose. Throws Error(address_in_use | invalid_argument).
Descriptor listen_tcp(const std::string& host, std::uint16_t port);
Descriptor listen_abstract(const std::string& name);
// A socket in the file system: `path` is absolute; mode 0600. A file that nobody listens at any more is replaced, a live one
// is Error(address_in_use).
Descriptor listen_unix(const std::string& path);
// Non-blocking sockets. dial_* with a deadline waits until connected: Error(link_failed | deadline | cancelled).
Descriptor dial_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline);
Descriptor dial_abstract(const std::string& name, const Deadline& deadline);
Descriptor dial_unix(const std::string& path, const Deadline& deadline);
// Starts connecting and returns; writes wait until the kernel has connected. Empty if it failed at once.
Descriptor start_dial_tcp(const std::string& numeric_host, std::uint16_t port);
Descriptor accept_on(int listener, int& error);  // empty: error says why

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
  bool loopback = false;  // or a Unix socket
  std::string path;       // of a socket in the file system; then there is no host and no port
  std::string text() const;  // "127.0.0.1:7000", "[::1]:7000", "unix:/run/kv.sock"
};
// The file of a socket that was bound there; removed with this, unless it is another's by now.
class SocketFile {
 public:
  explicit SocketFile(std::string path);
  ~SocketFile();
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

 private:
  bool ours() const noexcept;
  std::string path_;
  std::uint64_t device_ = 0, inode_ = 0;
  std::uint32_t generation_ = process_generation();  // a forked child leaves it to its parent
};
Endpoint local_endpoint(int fd);
Endpoint peer_endpoint(int fd);
std::optional<Credentials> peer_credentials(int fd);  // of a Unix socket; of others the kernel knows none
Descriptor peer_pidfd(int unix_fd, std::int64_t pid);  // SO_PEERPIDFD where there is one; empty if it cannot be had

bool closed_by_peer(int fd);  // or lost; false as long as there is something to read, or it is still connecting

void tune_lane(int fd);  // TCP_NODELAY, buffers

// One non-blocking write of `bytes` (and descriptors with its first byte): how many went, 0 for "would block", -1 for lost.
long send_some(int fd, std::span<const std::uint8_t> bytes, std::span<const int> descriptors = {});
long send_some(int fd, std::span<const iovec> parts, std::span<const int> descriptors = {});
// One non-blocking read: bytes read, 0 for "would block", -1 for lost or ended. Received descriptors are appended.
long receive_some(int fd, std::span<std::uint8_t> into, std::vector<Descriptor>* descriptors = nullptr);

// For threads of callers, which may wait. Throw Error(peer_lost | deadline | cancelled).
void send_all(int fd, std::span<const std::uint8_t> bytes, const Deadline& deadline, std::span<const int> descriptors = {});
struct Frame {
  wire::Header header;
  std::vector<std::uint8_t> body;
  std::vector<Descriptor> descriptors;
};
Frame receive_frame(int fd, std::size_t max_body_bytes, const Deadline& deadline);

// Collects bytes of one connection into frames. It reads ahead: a descriptor belongs to the next frame whose flag claims it,
// not to the bytes it was read with.
class FrameBuffer {
 public:
  explicit FrameBuffer(std::size_t max_body_bytes) : max_body_bytes_(max_body_bytes) {}
  enum class State { frame, would_block, lost };
  // Reads until a whole frame is there. Throws wire::WireError for a frame over the limit.
  State read(int fd, Frame& frame);
  bool empty() const noexcept { return have_ == 0; }
  std::span<const std::uint8_t> ahead() const noexcept { return std::span(bytes_).first(have_); }  // read, and no frame yet
  void set_limit(std::size_t max_body_bytes) noexcept { max_body_bytes_ = max_body_bytes; }

 private:
  std::size_t max_body_bytes_;
  std::vector<std::uint8_t> bytes_;  // of the frame in hand
  std::size_t have_ = 0;
  std::vector<Descriptor> descriptors_;
};

}  // namespace kvferry
