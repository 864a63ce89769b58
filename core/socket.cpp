#include "socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <memory>
#include <optional>

#include "interrupt.hpp"
#include "thread.hpp"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace kvferry {
namespace {

constexpr int socket_flags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr std::size_t max_descriptors = 16;  // with one message

constexpr std::int64_t listen_resolve_ms = 10'000;

struct Resolved {
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list{nullptr, freeaddrinfo};
  int rc = 0, error = 0;  // the second of EAI_SYSTEM
};

Resolved resolve_now(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  Resolved resolved;
  resolved.rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  resolved.error = errno;
  if (resolved.rc == 0) resolved.list.reset(list);
  return resolved;
}

// The system's resolver hears no deadline: a name is looked up on a thread of its own, which may outlive the call.
Resolved resolve_host(const std::string& host, std::uint16_t port, int flags, const Deadline& deadline) {
  auto resolved = resolve_now(host, port, flags | AI_NUMERICHOST);
  if (resolved.rc == EAI_NONAME && (flags & AI_NUMERICHOST) == 0) {
    struct Lookup {
      std::mutex mutex;
      std::condition_variable changed;
      std::optional<Resolved> found;
    };
    const auto lookup = std::make_shared<Lookup>();
    start_thread("kvferry-lookup", [lookup, host, port, flags] {
      auto found = resolve_now(host, port, flags);
      const std::lock_guard lock(lookup->mutex);
      lookup->found = std::move(found);
      lookup->changed.notify_all();
    }).detach();
    std::unique_lock lock(lookup->mutex);
    if (!wait_on(lookup->changed, lock, deadline, [&] { return lookup->found.has_value(); }))
      throw Error(Kind::deadline, "the name '" + host + "' was not found in time: does this host's name server answer?");
    resolved = std::move(*lookup->found);
  }
  if (resolved.rc == EAI_MEMORY) throw not_to_be_had("a look at the name '" + host + "'", ENOMEM);
  if (resolved.rc == EAI_SYSTEM) throw not_to_be_had("a look at the name '" + host + "'", resolved.error);
  if (resolved.rc == EAI_AGAIN) throw Error(Kind::link_failed, "the name '" + host + "' cannot be looked up now: " + gai_strerror(resolved.rc));
  if (resolved.rc != 0) throw Error(Kind::invalid_argument, "'" + host + "' is not an address: " + gai_strerror(resolved.rc));
  return resolved;
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

sockaddr_un path_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  constexpr auto most = sizeof address.sun_path - 1;
  if (path.empty() || path[0] != '/' || path.find('\0') != std::string::npos)
    throw Error(Kind::invalid_argument, "'" + path + "' is not the absolute path of a socket");
  if (path.size() > most)
    throw Error(Kind::invalid_argument, "the path of a socket may have " + std::to_string(most) + " bytes, and '" + path + "' has " +
                                            std::to_string(path.size()) + ": use a shorter one, in $XDG_RUNTIME_DIR or /tmp say");
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Nobody else who keeps to this replaces or removes a socket in that folder meanwhile. A lock that somebody keeps for long is
// not waited for: then two that start at one moment may take each other's place.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const auto slash = path.rfind('/');
    folder_ = Descriptor(::open(slash == 0 ? "/" : path.substr(0, slash).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (int ms = 0; folder_ && ::flock(folder_.get(), LOCK_EX | LOCK_NB) != 0 && ms < 1000; ++ms) ::usleep(1000);
  }

 private:
  Descriptor folder_;
};

// Whether nobody listens at a socket's file.
bool stale(const sockaddr_un& address) {
  struct stat st{};
  if (::lstat(address.sun_path, &st) != 0) return errno == ENOENT;
  if (!S_ISSOCK(st.st_mode)) return false;
  const Descriptor fd(::socket(AF_UNIX, socket_flags, 0));
  return fd && ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
}

bool wait_for(int fd, short events, const Deadline& deadline) {
  for (;;) {
    pollfd p{fd, events, 0};
    const int rc = ::poll(&p, 1, static_cast<int>(Interruptible::sleep_ms(deadline)));
    if (rc > 0) return true;
    if (rc == 0 && deadline.passed()) return false;
    if (rc < 0 && errno != EINTR) return true;  // the next call on the descriptor says what is wrong
    Interruptible::throw_if_asked();
  }
}

Descriptor finish_dial(Descriptor fd, const Deadline& deadline, const std::string& where) {
  if (!wait_for(fd.get(), POLLOUT, deadline)) throw Error(Kind::deadline, "no answer from " + where + " in time");
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) throw Error(Kind::link_failed, "cannot reach " + where + ": " + std::strerror(error));
  return fd;
}

Endpoint endpoint_of(const sockaddr_storage& address, socklen_t length) {
  Endpoint endpoint;
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    endpoint.port = ntohs(v4.sin_port);
    endpoint.loopback = (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
    endpoint.port = ntohs(v6.sin6_port);
    const bool mapped_loopback = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) && v6.sin6_addr.s6_addr[12] == 127;
    endpoint.loopback = IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) || mapped_loopback;
  } else {
    endpoint.loopback = true;
    const auto& here = reinterpret_cast<const sockaddr_un&>(address);
    const auto bytes = length > offsetof(sockaddr_un, sun_path) ? length - offsetof(sockaddr_un, sun_path) : 0;
    if (bytes > 0 && here.sun_path[0] == '/') endpoint.path.assign(here.sun_path, ::strnlen(here.sun_path, bytes));
  }
  endpoint.host = text;
  return endpoint;
}

}  // namespace

std::string Endpoint::text() const {
  if (!path.empty()) return "unix:" + path;
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Descriptor listen_tcp(const std::string& host, std::uint16_t port) {
  const auto resolved = resolve_host(host, port, AI_PASSIVE, Deadline::after_ms(listen_resolve_ms));
  const addrinfo* first = resolved.list.get();
  Descriptor fd(::socket(first->ai_family, socket_flags, 0));
  if (!fd) throw not_to_be_had("a socket to listen on", errno);
  const int on = 1;
  // Restarting on the port of a process that has just ended must work; two listeners on one port still refuse each other.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), first->ai_addr, first->ai_addrlen) != 0 || ::listen(fd.get(), 1024) != 0) {
    const int error = errno;
    const auto sentence = "cannot listen on " + host + ":" + std::to_string(port) + ": " + std::strerror(error);
    throw Error(error == EADDRINUSE ? Kind::address_in_use : Kind::invalid_argument, sentence);
  }
  return fd;
}

Descriptor listen_abstract(const std::string& name) {
  Descriptor fd(::socket(AF_UNIX, socket_flags, 0));
  socklen_t length;
  const auto address = abstract_address(name, length);
  if (!fd || ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(fd.get(), 1024) != 0)
    throw not_to_be_had("a Unix socket to listen on", errno);
  return fd;
}

Descriptor listen_unix(const std::string& path) {
  const auto address = path_address(path);
  const FolderLock lock(path);
  Descriptor fd(::socket(AF_UNIX, socket_flags, 0));
  if (!fd) throw not_to_be_had("a socket to listen on", errno);
  const auto bound = [&] { return ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0; };
  bool done = bound();
  if (!done && errno == EADDRINUSE && stale(address)) {
    ::unlink(path.c_str());
    done = bound();
  }
  if (!done) {
    const int error = errno;
    if (error == EADDRINUSE) throw Error(Kind::address_in_use, "cannot listen on unix:" + path + ": somebody listens there, or it is another file");
    throw Error(Kind::invalid_argument, "cannot listen on unix:" + path + ": " + std::strerror(error));
  }
  // Nobody can connect before it listens, with whatever mode the umask has given it.
  if (::chmod(path.c_str(), 0600) != 0 || ::listen(fd.get(), 1024) != 0) {
    const int error = errno;
    ::unlink(path.c_str());
    throw Error(Kind::invalid_argument, "cannot listen on unix:" + path + ": " + std::strerror(error));
  }
  return fd;
}

SocketFile::SocketFile(std::string path) : path_(std::move(path)) {
  struct stat st{};
  if (::lstat(path_.c_str(), &st) == 0) device_ = st.st_dev, inode_ = st.st_ino;
}

SocketFile::~SocketFile() {
  if (generation_ != process_generation() || !ours()) return;
  const FolderLock lock(path_);
  if (ours()) ::unlink(path_.c_str());
}

bool SocketFile::ours() const noexcept {
  struct stat st{};
  return ::lstat(path_.c_str(), &st) == 0 && S_ISSOCK(st.st_mode) && st.st_dev == device_ && st.st_ino == inode_;
}

Descriptor dial_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline) {
  const auto resolved = resolve_host(host, port, 0, deadline);
  const auto where = host + ":" + std::to_string(port);
  std::string last = "no address";
  for (const addrinfo* a = resolved.list.get(); a != nullptr; a = a->ai_next) {
    Descriptor fd(::socket(a->ai_family, socket_flags, 0));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE) throw not_to_be_had("a socket to reach " + where, errno);
      last = std::strerror(errno);
      continue;
    }
    if (::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS) {
      if (a->ai_next == nullptr) return finish_dial(std::move(fd), deadline, where);
      try {
        return finish_dial(std::move(fd), deadline, where);
      } catch (const Error& error) {
        if (error.outcome().kind == Kind::deadline || error.outcome().kind == Kind::cancelled) throw;
        last = error.what();
        continue;
      }
    }
    last = std::strerror(errno);
  }
  throw Error(Kind::link_failed, "cannot reach " + where + ": " + last);
}

namespace {
Descriptor dial(const sockaddr_un& address, socklen_t length, const Deadline& deadline, const std::string& failed) {
  for (;;) {
    Descriptor fd(::socket(AF_UNIX, socket_flags, 0));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE) throw not_to_be_had("a Unix socket", errno);
      throw Error(Kind::link_failed, std::string("no Unix socket: ") + std::strerror(errno));
    }
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
    if (errno != EAGAIN || deadline.passed())  // EAGAIN: the listener's backlog is full
      throw Error(Kind::link_failed, failed + ": " + std::strerror(errno));
    if (Interruptible::asked_now_and_then()) throw Error(Kind::cancelled, "interrupted while waiting");
    ::usleep(1000);
  }
}
}  // namespace

Descriptor dial_abstract(const std::string& name, const Deadline& deadline) {
  socklen_t length;
  const auto address = abstract_address(name, length);
  return dial(address, length, deadline, "its Unix socket does not answer");
}

Descriptor dial_unix(const std::string& path, const Deadline& deadline) {
  return dial(path_address(path), sizeof(sockaddr_un), deadline, "cannot reach unix:" + path);
}

Descriptor start_dial_tcp(const std::string& numeric_host, std::uint16_t port) {
  try {
    const auto resolved = resolve_host(numeric_host, port, AI_NUMERICHOST, Deadline::after_ms(0));
    const addrinfo* a = resolved.list.get();
    Descriptor fd(::socket(a->ai_family, socket_flags, 0));
    if (fd && (::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS)) return fd;
  } catch (const Error&) {  // the caller sees that there is no descriptor
  }
  return {};
}

Descriptor accept_on(int listener, int& error) {
  Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  error = fd ? 0 : errno;
  return fd;
}

Endpoint local_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return endpoint_of(address, length);
}

Endpoint peer_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return endpoint_of(address, length);
}

std::optional<Credentials> peer_credentials(int fd) {
  ucred cred{};
  socklen_t length = sizeof cred;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length) != 0) return std::nullopt;
  if (cred.uid == static_cast<uid_t>(-1)) return std::nullopt;  // no Unix socket
  return Credentials{cred.pid, cred.uid};
}

Descriptor peer_pidfd(int unix_fd, std::int64_t pid) {
  int fd = -1;
  socklen_t length = sizeof fd;
  if (getsockopt(unix_fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0 && fd >= 0) return Descriptor(fd);
  // Older kernels: the pid may already be somebody else's, which the identity words then tell.
  if (pid > 0) return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  return {};
}

bool closed_by_peer(int fd) {
  char byte;
  const ssize_t n = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ENOTCONN);
}

void tune_lane(int fd) {
  int domain = 0;
  socklen_t length = sizeof domain;
  getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length);
  const int on = 1;
  if (domain != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

long send_some(int fd, std::span<const std::uint8_t> bytes, std::span<const int> descriptors) {
  const iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  return send_some(fd, std::span(&part, 1), descriptors);
}

long send_some(int fd, std::span<const iovec> parts, std::span<const int> descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * max_descriptors)];
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  for (;;) {
    const ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) return n;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN ? 0 : -1;
  }
}

long receive_some(int fd, std::span<std::uint8_t> into, std::vector<Descriptor>* descriptors) {
  iovec iov{into.data(), into.size()};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * max_descriptors)];
  if (descriptors != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  for (;;) {
    const ssize_t n = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN ? 0 : -1;
    }
    if (descriptors != nullptr) {
      for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
          int fd_received;
          std::memcpy(&fd_received, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
          descriptors->emplace_back(fd_received);
        }
      }
    }
    return n == 0 ? -1 : n;
  }
}

void send_all(int fd, std::span<const std::uint8_t> bytes, const Deadline& deadline, std::span<const int> descriptors) {
  while (!bytes.empty()) {
    const long n = send_some(fd, bytes, descriptors);
    if (n < 0) throw Error(Kind::peer_lost, "the connection was closed while something was being sent");
    if (n == 0) {
      if (!wait_for(fd, POLLOUT, deadline)) throw Error(Kind::deadline, "the peer does not read");
      continue;
    }
    descriptors = {};
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

Frame receive_frame(int fd, std::size_t max_body_bytes, const Deadline& deadline) {
  Frame frame;
  const auto fill = [&](std::uint8_t* out, std::size_t n) {
    while (n > 0) {
      const long got = receive_some(fd, {out, n}, &frame.descriptors);
      if (got < 0) throw Error(Kind::peer_lost, "the connection was closed before an answer came");
      if (got == 0) {
        if (!wait_for(fd, POLLIN, deadline)) throw Error(Kind::deadline, "no answer in time");
        continue;
      }
      out += got;
      n -= static_cast<std::size_t>(got);
    }
  };
  fill(reinterpret_cast<std::uint8_t*>(&frame.header), sizeof frame.header);
  if (frame.header.body_bytes > max_body_bytes) throw wire::WireError("a frame is larger than allowed here");
  frame.body.resize(frame.header.body_bytes);
  fill(frame.body.data(), frame.body.size());
  return frame;
}

FrameBuffer::State FrameBuffer::read(int fd, Frame& frame) {
  constexpr std::size_t read_ahead = 4096;
  for (;;) {
    std::size_t want = sizeof(wire::Header);
    if (have_ >= want) {
      wire::Header header;
      std::memcpy(&header, bytes_.data(), sizeof header);
      if (header.body_bytes > max_body_bytes_) throw wire::WireError("a frame is larger than allowed here");
      want += header.body_bytes;
      if (have_ >= want) {
        frame.header = header;
        frame.body.assign(bytes_.begin() + sizeof header, bytes_.begin() + static_cast<std::ptrdiff_t>(want));
        frame.descriptors.clear();
        if ((header.flags & wire::flag_descriptor) != 0 && !descriptors_.empty()) {
          frame.descriptors.push_back(std::move(descriptors_.front()));
          descriptors_.erase(descriptors_.begin());
        }
        std::memmove(bytes_.data(), bytes_.data() + want, have_ - want);
        have_ -= want;
        if (bytes_.size() > 1 << 20 && have_ <= read_ahead) {  // a big request is rare: do not keep its room
          bytes_.resize(read_ahead);
          bytes_.shrink_to_fit();
        }
        return State::frame;
      }
    }
    // Memory grows with what has come, not with what a header promises.
    const std::size_t room = std::min(std::max(want, have_ + read_ahead), have_ + std::max<std::size_t>(have_, read_ahead));
    if (bytes_.size() < room) bytes_.resize(room);
    const long n = receive_some(fd, std::span(bytes_).subspan(have_), &descriptors_);
    if (n < 0) return State::lost;
    if (n == 0) return State::would_block;
    if (descriptors_.size() > max_descriptors) throw wire::WireError("descriptors that nothing claims");
    have_ += static_cast<std::size_t>(n);
  }
}

}  // namespace kvferry
