#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "../socket.hpp"
#include "ends.hpp"

using namespace kvferry;
using namespace kvferry::testing;

using Bytes = std::vector<std::uint8_t>;
using State = FrameBuffer::State;

static Bytes frame(std::uint64_t operation, std::size_t body_bytes, std::uint16_t flags = 0) {
  wire::Writer out(wire::Type::resolve, operation, flags);
  for (std::size_t i = 0; i < body_bytes; ++i) out.put(static_cast<std::uint8_t>(operation + i));
  return out.take();
}

static bool is_frame(const Frame& got, std::uint64_t operation, std::size_t body_bytes) {
  bool good = got.header.operation == operation && got.body.size() == body_bytes;
  for (std::size_t i = 0; good && i < body_bytes; ++i) good = got.body[i] == static_cast<std::uint8_t>(operation + i);
  return good;
}

static bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

static void frames_come_out_whole_however_they_arrive() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Ends ends;
    Bytes stream;
    std::vector<std::size_t> sizes;
    for (int i = 0; i < 10; ++i) {
      sizes.push_back(random() % 4 == 0 ? random() % 20'000 : random() % 60);
      const auto one = frame(static_cast<std::uint64_t>(i), sizes.back());
      stream.insert(stream.end(), one.begin(), one.end());
    }
    FrameBuffer buffer(20'000);
    std::size_t sent = 0, got = 0;
    Frame one;
    while (got < 10) {
      const auto n = std::min<std::size_t>(stream.size() - sent, random() % 2 == 0 ? random() % 10 : random() % 9'000);
      if (n > 0) ends.say(std::span(stream).subspan(sent, n));
      sent += n;
      State state;
      while ((state = buffer.read(ends.here.get(), one)) == State::frame) {
        CHECK(is_frame(one, got, sizes[got]));
        ++got;
      }
      CHECK(state == State::would_block);
    }
    CHECK(buffer.empty());
    ends.there.reset();
    CHECK(buffer.read(ends.here.get(), one) == State::lost);
  }
}

static void a_frame_over_the_limit_is_refused_at_its_header() {
  Ends ends;
  FrameBuffer buffer(100);
  Frame one;
  ends.say(frame(1, 100));
  CHECK(buffer.read(ends.here.get(), one) == State::frame);
  ends.say(std::span<const std::uint8_t>(frame(2, 101)).first(24));
  bool refused = false;
  try {
    buffer.read(ends.here.get(), one);
  } catch (const wire::WireError&) {
    refused = true;
  }
  CHECK(refused);
}

// What a header promises is not what is kept for it.
static void memory_grows_with_what_has_come() {
  Ends ends;
  FrameBuffer buffer(std::size_t{4} << 30);
  wire::Header header;
  header.body_bytes = 0xffffffff;
  ends.say({reinterpret_cast<const std::uint8_t*>(&header), sizeof header});
  Frame one;
  CHECK(buffer.read(ends.here.get(), one) == State::would_block);
}

// Descriptors belong to the frame that says so, also when it is read together with frames before and behind it.
static void descriptors_go_to_the_frame_that_claims_them() {
  Ends ends, carried;
  const int fd = carried.here.get();
  ends.say(frame(1, 10));
  ends.say(frame(2, 10, wire::flag_descriptor), {&fd, 1});
  ends.say(frame(3, 10));
  ends.say(frame(4, 10, wire::flag_descriptor), {&fd, 1});
  ends.say(frame(5, 10, wire::flag_descriptor));  // claims one, and none came
  FrameBuffer buffer(100);
  for (const std::uint64_t operation : {1, 2, 3, 4, 5}) {
    Frame one;
    CHECK(buffer.read(ends.here.get(), one) == State::frame && is_frame(one, operation, 10));
    CHECK(one.descriptors.size() == (operation == 2 || operation == 4 ? 1u : 0u));
    if (one.descriptors.empty()) continue;
    const char byte = 'x';
    CHECK(::send(one.descriptors[0].get(), &byte, 1, 0) == 1);  // it is the one that was sent
  }
  char bytes[3];
  CHECK(::recv(carried.there.get(), bytes, sizeof bytes, 0) == 2);
}

static void descriptors_that_nothing_claims_do_not_pile_up() {
  const auto before = open_descriptors();
  {
    Ends ends;
    const std::vector<int> many(16, ends.there.get());
    FrameBuffer buffer(10'000);
    const auto bytes = frame(1, 1000);
    bool refused = false;
    try {
      Frame one;
      for (std::size_t i = 0; i < 100; ++i) {
        ends.say(std::span(bytes).subspan(i, 1), many);
        CHECK(buffer.read(ends.here.get(), one) == State::would_block);
      }
    } catch (const wire::WireError&) {
      refused = true;
    }
    CHECK(refused);
    CHECK(open_descriptors() <= before + 2 + 64);
  }
  CHECK(open_descriptors() == before);
}

static void callers_may_wait_for_frames_and_for_room() {
  Ends ends;
  const auto began = now_ns();
  CHECK_FAILS(Kind::deadline, "", receive_frame(ends.here.get(), 100, Deadline::after_ms(20)));
  CHECK(now_ns() - began > 15'000'000);
  const Bytes big(4 << 20, 7);
  CHECK_FAILS(Kind::deadline, "does not read", send_all(ends.there.get(), big, Deadline::after_ms(20)));
  Ends other;
  const auto one = frame(9, 300'000);
  std::thread sender([&] { send_all(other.there.get(), one, Deadline::after_ms(2000)); });
  CHECK(is_frame(receive_frame(other.here.get(), 300'000, Deadline::after_ms(2000)), 9, 300'000));
  sender.join();
  other.say(frame(1, 3));
  bool refused = false;
  try {
    receive_frame(other.here.get(), 2, Deadline::after_ms(100));
  } catch (const wire::WireError&) {
    refused = true;
  }
  CHECK(refused);
  other.there.reset();
  CHECK_FAILS(Kind::peer_lost, "", receive_frame(other.here.get(), 100, Deadline::after_ms(100)));
  CHECK_FAILS(Kind::peer_lost, "", send_all(other.here.get(), one, Deadline::after_ms(100)));
}

static void addresses_are_what_they_say() {
  CHECK((Endpoint{"127.0.0.1", 7000, true, {}}.text() == "127.0.0.1:7000"));
  CHECK((Endpoint{"::1", 7000, true, {}}.text() == "[::1]:7000"));
  const auto listener = listen_tcp("127.0.0.1", 0);
  const auto at = local_endpoint(listener.get());
  CHECK(at.host == "127.0.0.1" && at.port != 0 && at.loopback);
  const auto dialled = dial_tcp("localhost", at.port, Deadline::after_ms(1000));
  CHECK(peer_endpoint(dialled.get()).port == at.port && peer_endpoint(dialled.get()).loopback);
  int error = 0;
  const auto accepted = accept_on(listener.get(), error);
  CHECK(accepted && error == 0 && peer_endpoint(accepted.get()).port == local_endpoint(dialled.get()).port);
  CHECK(!accept_on(listener.get(), error) && (error == EAGAIN || error == EWOULDBLOCK));
  const auto anywhere = listen_tcp("0.0.0.0", 0);
  CHECK(!local_endpoint(anywhere.get()).loopback);
  CHECK_FAILS(Kind::address_in_use, "cannot listen", listen_tcp("127.0.0.1", at.port));
  CHECK_FAILS(Kind::invalid_argument, "not an address", listen_tcp("127.0.0.1.5", 0));
  CHECK_FAILS(Kind::invalid_argument, "", listen_tcp("203.0.113.7", 0));  // not one of this host's
}

static void abstract_names_are_found_and_gone_with_their_listener() {
  CHECK_FAILS(Kind::link_failed, "", dial_abstract("kvferry-test-nobody", Deadline::after_ms(10)));
  const auto name = "kvferry-test-" + std::to_string(getpid());
  auto listener = listen_abstract(name);
  CHECK_FAILS(Kind::busy, "", listen_abstract(name));
  const auto dialled = dial_abstract(name, Deadline::after_ms(1000));
  const auto credentials = peer_credentials(dialled.get());
  CHECK(credentials && credentials->pid == getpid() && credentials->uid == geteuid());
  const auto pidfd = peer_pidfd(dialled.get(), credentials->pid);
  CHECK(pidfd && is_open(pidfd.get()));
  listener.reset();
  CHECK_FAILS(Kind::link_failed, "", dial_abstract(name, Deadline::after_ms(10)));
}

static void a_dial_that_was_only_started_may_fail_later() {
  Endpoint nobody;
  {
    const auto listener = listen_tcp("127.0.0.1", 0);
    nobody = local_endpoint(listener.get());
  }
  const auto started = start_dial_tcp(nobody.host, nobody.port);
  if (started) {
    std::uint8_t byte = 0;
    long n = 0;
    for (int i = 0; i < 1000 && n == 0; ++i) n = send_some(started.get(), {&byte, 1});
    CHECK(n < 0);
  }
  CHECK(!start_dial_tcp("not a number", 1));
}

static void sockets_have_files() {
  char folder[] = "/tmp/kvferry-test-XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  const auto path = std::string(folder) + "/s";
  {
    const auto listener = listen_unix(path);
    const SocketFile file(path);
    CHECK(local_endpoint(listener.get()).path == path && local_endpoint(listener.get()).text() == "unix:" + path);
    CHECK(dial_unix(path, Deadline::after_ms(1000)));
    CHECK_FAILS(Kind::address_in_use, "somebody listens", listen_unix(path));
  }
  CHECK_FAILS(Kind::link_failed, "No such file", dial_unix(path, Deadline::after_ms(10)));  // it went with its socket
  { const auto left = listen_unix(path); }
  CHECK_FAILS(Kind::link_failed, "refused", dial_unix(path, Deadline::after_ms(10)));
  {
    const SocketFile of_the_first(path);
    const auto second = listen_unix(path);  // in place of what the first has left
    CHECK(dial_unix(path, Deadline::after_ms(1000)));
  }
  ::unlink(path.c_str());
  CHECK_FAILS(Kind::invalid_argument, "107 bytes", listen_unix(path + std::string(108, 'x')));
  CHECK_FAILS(Kind::invalid_argument, "absolute", dial_unix("s", Deadline::after_ms(10)));
  CHECK(!peer_credentials(listen_tcp("127.0.0.1", 0).get()));
  CHECK(::rmdir(folder) == 0);
}

int main() {
  sockets_have_files();
  frames_come_out_whole_however_they_arrive();
  a_frame_over_the_limit_is_refused_at_its_header();
  memory_grows_with_what_has_come();
  descriptors_go_to_the_frame_that_claims_them();
  descriptors_that_nothing_claims_do_not_pile_up();
  callers_may_wait_for_frames_and_for_room();
  addresses_are_what_they_say();
  abstract_names_are_found_and_gone_with_their_listener();
  a_dial_that_was_only_started_may_fail_later();
  return TEST_RESULT();
}
