#include <sys/socket.h>

#include <cstdio>
#include <functional>
#include <random>

#include "../hello.hpp"
#include "check.hpp"

using namespace kvferry;
using namespace kvferry::hello;

using Bytes = std::vector<std::uint8_t>;
static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};

static Frame frame_of(const Bytes& bytes) {
  Frame frame;
  std::memcpy(&frame.header, bytes.data(), sizeof frame.header);
  frame.body.assign(bytes.begin() + sizeof frame.header, bytes.end());
  CHECK(frame.header.body_bytes == frame.body.size());
  return frame;
}

template <class Read>
static bool refused(const Frame& frame, Read&& read) {
  try {
    read(frame);
  } catch (const wire::WireError&) {
    return true;
  }
  return false;
}

static Hello a_hello() {
  Hello said;
  said.node_id = 77;
  said.instance = random_token(), said.boot_id = boot_id(), said.nonce = random_nonce();
  said.has_secret = true;
  said.program = "a program";
  return said;
}

static Challenge a_challenge() {
  Challenge said;
  said.node_id = 78;
  said.instance = random_token(), said.nonce = random_nonce(), said.local_token = random_token();
  said.has_secret = true;
  said.local_address = "kvferry-somewhere";
  said.program = "another";
  return said;
}

static void what_is_written_is_what_is_read() {
  const auto h = a_hello(), seen = read_hello(frame_of(write(h)));
  CHECK(seen.version == wire::version && seen.node_id == 77 && seen.instance == h.instance && seen.boot_id == h.boot_id);
  CHECK(seen.nonce == h.nonce && seen.has_secret && seen.program == h.program);
  auto c = a_challenge();
  c.proof = proof(secret, "kvferry listener", h, c);
  const auto got = read_challenge(frame_of(write(c)));
  CHECK(got.node_id == 78 && got.instance == c.instance && got.nonce == c.nonce && got.local_address == c.local_address);
  CHECK(got.local_token == c.local_token && got.proof == c.proof && got.has_secret && got.program == c.program);
  Auth auth{c.proof, true};
  CHECK(read_auth(frame_of(write(auth))).proof == c.proof && read_auth(frame_of(write(auth))).local_done);
  const auto token = random_token();
  CHECK(read_welcome(frame_of(write_welcome(token))) == token);
  for (const auto use : {LaneUse::bulk, LaneUse::small, LaneUse::push, LaneUse::call}) {
    const auto lane = read_lane(frame_of(write(LaneHello{token, true, use})));
    CHECK(lane.link == token && lane.reverse && lane.use == use);
  }
  const Local local{token, 1, 2, {3, 4}};
  for (const bool answer : {false, true}) {
    const auto frame = frame_of(write(local, answer, true));
    const auto back = read_local(frame);
    CHECK(frame.header.type == (answer ? wire::Type::local_answer : wire::Type::local));
    CHECK(frame.header.flags == wire::flag_descriptor);
    CHECK(back.token == token && back.identity_address == 1 && back.identity_value == 2 && back.page_nonce[1] == 4);
  }
  throw_if_refused(frame_of(write(h)));
  CHECK_FAILS(Kind::refused, "not you", throw_if_refused(frame_of(write_refused(Outcome::fail(Kind::refused, "not you")))));
  CHECK_FAILS(Kind::refused, "", throw_if_refused(frame_of(write_refused({}))));  // a refusal that says "ok" is still one
}

static void a_proof_covers_everything_that_was_said() {
  const auto h = a_hello();
  const auto c = a_challenge();
  const auto good = proof(secret, "kvferry dialler", h, c);
  CHECK(good == proof(secret, "kvferry dialler", h, c));
  CHECK(good != proof(secret, "kvferry listener", h, c));
  CHECK(good != proof({'o', 'p', 'e', 'n'}, "kvferry dialler", h, c));
  const auto with_hello = [&](auto change) {
    auto other = h;
    change(other);
    return proof(secret, "kvferry dialler", other, c);
  };
  CHECK(good != with_hello([](Hello& x) { x.version++; }));
  CHECK(good != with_hello([](Hello& x) { x.node_id++; }));
  CHECK(good != with_hello([](Hello& x) { x.instance[0]++; }));
  CHECK(good != with_hello([](Hello& x) { x.boot_id[15]++; }));
  CHECK(good != with_hello([](Hello& x) { x.nonce[31]++; }));
  CHECK(good != with_hello([](Hello& x) { x.has_secret = false; }));
  CHECK(good != with_hello([](Hello& x) { x.program += "x"; }));
  const auto with_challenge = [&](auto change) {
    auto other = c;
    change(other);
    return proof(secret, "kvferry dialler", h, other);
  };
  CHECK(good != with_challenge([](Challenge& x) { x.node_id++; }));
  CHECK(good != with_challenge([](Challenge& x) { x.instance[0]++; }));
  CHECK(good != with_challenge([](Challenge& x) { x.nonce[0]++; }));
  CHECK(good != with_challenge([](Challenge& x) { x.program += "x"; }));
  CHECK(good != with_challenge([](Challenge& x) { x.local_address += "x"; }));
  CHECK(good != with_challenge([](Challenge& x) { x.local_token[0]++; }));
  CHECK(good == with_challenge([](Challenge& x) { x.proof[0]++; }));  // the proof itself comes after
}

static void what_is_foreign_is_refused() {
  auto bytes = write(a_hello());
  bytes[sizeof(wire::Header)] = 'k';
  CHECK(refused(frame_of(bytes), read_hello));
  CHECK(refused(frame_of(write(a_challenge())), read_hello));
  CHECK(refused(frame_of(write(a_hello())), read_challenge));
  CHECK(refused(frame_of(write(a_hello())), read_auth));
  CHECK(refused(frame_of(write(a_hello())), read_welcome));
  CHECK(refused(frame_of(write(a_hello())), read_lane));
  CHECK(refused(frame_of(write(a_hello())), read_local));
  auto lane = write(LaneHello{});
  lane.back() = 4;
  CHECK(refused(frame_of(lane), read_lane));
}

static void mutated_frames_harm_nobody() {
  struct Codec {
    Bytes good;
    std::function<void(const Frame&)> read;
  };
  const std::vector<Codec> codecs = {
      {write(a_hello()), [](const Frame& f) { read_hello(f); }},
      {write(a_challenge()), [](const Frame& f) { read_challenge(f); }},
      {write(Auth{}), [](const Frame& f) { read_auth(f); }},
      {write_welcome({}), [](const Frame& f) { read_welcome(f); }},
      {write(LaneHello{}), [](const Frame& f) { CHECK(read_lane(f).use <= LaneUse::call); }},
      {write(Local{}, false, false), [](const Frame& f) { read_local(f); }},
      {write_refused(Outcome::fail(Kind::refused, "no")), [](const Frame& f) {
         try {
           throw_if_refused(f);
         } catch (const Error& error) {
           CHECK(!error.outcome().ok());
         }
       }}};
  std::mt19937 random(21);
  int turned_away = 0;
  for (int round = 0; round < 20'000; ++round) {
    const auto& codec = codecs[random() % codecs.size()];
    auto frame = frame_of(codec.good);
    if (random() % 2 == 0) frame.body.resize(random() % (frame.body.size() + 1));
    for (unsigned k = 0; k < random() % 4 && !frame.body.empty(); ++k) frame.body[random() % frame.body.size()] = static_cast<std::uint8_t>(random());
    frame.body.shrink_to_fit();
    turned_away += refused(frame, codec.read);
  }
  CHECK(turned_away > 5000 && turned_away < 15'000);
}

static void the_kernel_says_who_is_at_the_other_end() {
  CHECK(boot_id() != Token{} && boot_id() == boot_id() && random_token() != random_token());
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const Descriptor here(ends[0]), there(ends[1]);
  GuardTable table(8);
  IdentityWord word;
  Local said;
  said.identity_address = word.address(), said.identity_value = word.value();
  said.page_nonce[0] = table.page().nonce[0], said.page_nonce[1] = table.page().nonce[1];
  const auto page = [&] {
    std::vector<Descriptor> one;
    one.emplace_back(dup(table.page_descriptor()));
    return one;
  };
  auto descriptors = page();
  const auto facts = examine_local_peer(here.get(), said, descriptors, 7);
  CHECK(facts.same_host && facts.credentials.pid == getpid() && facts.credentials.uid == geteuid());
  CHECK(facts.map_ok && facts.map_reason.empty() && facts.page != nullptr);
  CHECK(facts.cma_ok == facts.cma_reason.empty());
  CHECK(static_cast<bool>(facts.pidfd));

  const auto with = [&](auto change, std::vector<Descriptor> given, unsigned transports = 7) {
    auto other = said;
    change(other);
    return examine_local_peer(here.get(), other, given, transports);
  };
  const auto nothing = [](Local&) {};
  CHECK(!with([](Local& x) { x.page_nonce[0]++; }, page()).map_ok);
  CHECK(!with(nothing, {}).map_ok && !with(nothing, {}).cma_ok);
  std::vector<Descriptor> no_page;
  no_page.emplace_back(dup(here.get()));
  CHECK(!with(nothing, std::move(no_page)).map_ok);
  if (facts.cma_ok) {
    CHECK(with([](Local& x) { x.identity_value++; }, page()).cma_reason.find("identity") != std::string::npos);
    CHECK(!with([](Local& x) { x.identity_address = 8; }, page()).cma_ok);
  }
  CHECK(with(nothing, page(), 4).map_reason.find("transports") != std::string::npos && !with(nothing, page(), 1).cma_ok);
}

int main() {
  what_is_written_is_what_is_read();
  a_proof_covers_everything_that_was_said();
  what_is_foreign_is_refused();
  mutated_frames_harm_nobody();
  the_kernel_says_who_is_at_the_other_end();
  return TEST_RESULT();
}
