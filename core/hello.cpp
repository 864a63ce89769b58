#include "hello.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "sentence.hpp"

namespace kvferry::hello {
namespace {

constexpr char magic[8] = {'K', 'V', 'F', 'E', 'R', 'R', 'Y', '1'};

template <std::size_t N>
void put(wire::Writer& out, const std::array<std::uint8_t, N>& bytes) {
  out.raw(bytes.data(), N);
}
template <std::size_t N>
void get(wire::Reader& in, std::array<std::uint8_t, N>& bytes) {
  in.raw(bytes.data(), N);
}

wire::Reader body(const Frame& frame, wire::Type expected) {
  if (frame.header.type != expected) throw wire::WireError("another frame than the hello asks for");
  return wire::Reader(frame.body);
}

void put_body(wire::Writer& out, const Hello& hello) {
  out.raw(magic, sizeof magic).put(hello.version).put(hello.node_id);
  put(out, hello.instance);
  put(out, hello.boot_id);
  put(out, hello.nonce);
  out.put(static_cast<std::uint8_t>(hello.has_secret)).text(hello.program);
}

void put_unproved(wire::Writer& out, const Challenge& challenge) {
  out.put(challenge.node_id);
  put(out, challenge.instance);
  put(out, challenge.nonce);
  out.put(static_cast<std::uint8_t>(challenge.has_secret)).text(challenge.program).text(challenge.local_address);
  put(out, challenge.local_token);
}

std::string yama_hint() {
  std::ifstream scope("/proc/sys/kernel/yama/ptrace_scope");
  int value = 0;
  if (scope >> value && value > 0)
    return sentence(" (kernel.yama.ptrace_scope is ", value, "): let the peer's node be made with attach=\"any\", or let kvferry allocate its caches");
  return ": the peer's process is not dumpable or has more rights than this one; let kvferry allocate its caches";
}

}  // namespace

std::vector<std::uint8_t> write(const Hello& hello) {
  wire::Writer out(wire::Type::hello, 0);
  put_body(out, hello);
  return out.take();
}

std::vector<std::uint8_t> write(const Challenge& challenge) {
  wire::Writer out(wire::Type::challenge, 0);
  put_unproved(out, challenge);
  put(out, challenge.proof);
  return out.take();
}

std::vector<std::uint8_t> write(const Auth& auth) {
  wire::Writer out(wire::Type::auth, 0);
  put(out, auth.proof);
  out.put(static_cast<std::uint8_t>(auth.local_done));
  return out.take();
}

std::vector<std::uint8_t> write_welcome(const Token& link) {
  wire::Writer out(wire::Type::welcome, 0);
  put(out, link);
  return out.take();
}

std::vector<std::uint8_t> write_refused(const Outcome& outcome) {
  wire::Writer out(wire::Type::refused, 0);
  wire::put_outcome(out, outcome);
  return out.take();
}

std::vector<std::uint8_t> write(const LaneHello& lane) {
  wire::Writer out(wire::Type::lane, 0);
  put(out, lane.link);
  out.put(static_cast<std::uint8_t>(lane.reverse)).put(lane.use);
  return out.take();
}

std::vector<std::uint8_t> write(const Local& local, bool answer, bool with_page) {
  wire::Writer out(answer ? wire::Type::local_answer : wire::Type::local, 0, with_page ? wire::flag_descriptor : 0);
  put(out, local.token);
  out.put(local.identity_address).put(local.identity_value).put(local.page_nonce[0]).put(local.page_nonce[1]);
  return out.take();
}

Hello read_hello(const Frame& frame) {
  auto in = body(frame, wire::Type::hello);
  char said[8];
  in.raw(said, sizeof said);
  if (std::memcmp(said, magic, sizeof magic) != 0) throw wire::WireError("not a kvferry hello");
  Hello hello;
  hello.version = in.get<std::uint16_t>();
  hello.node_id = in.get<std::uint64_t>();
  get(in, hello.instance);
  get(in, hello.boot_id);
  get(in, hello.nonce);
  hello.has_secret = in.get<std::uint8_t>() != 0;
  if (in.left() > 0) hello.program = in.text();
  return hello;
}

Challenge read_challenge(const Frame& frame) {
  auto in = body(frame, wire::Type::challenge);
  Challenge challenge;
  challenge.node_id = in.get<std::uint64_t>();
  get(in, challenge.instance);
  get(in, challenge.nonce);
  challenge.has_secret = in.get<std::uint8_t>() != 0;
  challenge.program = in.text();
  challenge.local_address = in.text();
  get(in, challenge.local_token);
  get(in, challenge.proof);
  return challenge;
}

Auth read_auth(const Frame& frame) {
  auto in = body(frame, wire::Type::auth);
  Auth auth;
  get(in, auth.proof);
  auth.local_done = in.get<std::uint8_t>() != 0;
  return auth;
}

Token read_welcome(const Frame& frame) {
  auto in = body(frame, wire::Type::welcome);
  Token token;
  get(in, token);
  return token;
}

LaneHello read_lane(const Frame& frame) {
  auto in = body(frame, wire::Type::lane);
  LaneHello lane;
  get(in, lane.link);
  lane.reverse = in.get<std::uint8_t>() != 0;
  lane.use = in.get<LaneUse>();
  if (lane.use > LaneUse::call) throw wire::WireError("a lane for an unknown use");
  return lane;
}

Local read_local(const Frame& frame) {
  auto in = body(frame, frame.header.type == wire::Type::local_answer ? wire::Type::local_answer : wire::Type::local);
  Local local;
  get(in, local.token);
  local.identity_address = in.get<std::uint64_t>();
  local.identity_value = in.get<std::uint64_t>();
  local.page_nonce[0] = in.get<std::uint64_t>();
  local.page_nonce[1] = in.get<std::uint64_t>();
  return local;
}

void throw_if_refused(const Frame& frame) {
  if (frame.header.type != wire::Type::refused) return;
  wire::Reader in(frame.body);
  auto outcome = wire::get_outcome(in);
  if (outcome.ok()) outcome.kind = Kind::refused;
  throw Error(outcome);
}

Digest proof(const std::vector<std::uint8_t>& secret, std::string_view role, const Hello& hello, const Challenge& challenge) {
  wire::Writer said(wire::Type::auth, 0);
  said.text(role);
  put_body(said, hello);
  put_unproved(said, challenge);
  return hmac_sha256(secret, said.body());
}

Token boot_id() {
  Token id{};
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  std::size_t nibble = 0;
  for (const char c : text) {
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0 || nibble / 2 >= id.size()) continue;
    id[nibble / 2] = static_cast<std::uint8_t>(id[nibble / 2] * 16 + value);
    ++nibble;
  }
  return id;
}

Token random_token() {
  Token token;
  random_bytes(token.data(), token.size());
  return token;
}

Nonce random_nonce() {
  Nonce nonce;
  random_bytes(nonce.data(), nonce.size());
  return nonce;
}

PeerFacts examine_local_peer(int unix_fd, const Local& said, std::vector<Descriptor>& descriptors, unsigned transports) {
  PeerFacts facts;
  facts.same_host = true;
  const auto credentials = peer_credentials(unix_fd);
  if (!credentials) throw Error(Kind::refused, "the kernel does not say who is at the other end of the Unix socket");
  facts.credentials = *credentials;
  facts.pidfd = peer_pidfd(unix_fd, credentials->pid);
  facts.identity_address = said.identity_address;
  facts.identity_value = said.identity_value;
  if (credentials->uid != ::geteuid()) {
    facts.map_reason = facts.cma_reason =
        sentence("its process runs under uid ", credentials->uid, ", this one under uid ", ::geteuid(), ": run both under one user");
    return facts;
  }
  if (descriptors.size() == 1 && descriptors[0]) {
    try {
      facts.page = std::make_unique<PeerPage>(descriptors[0].get(), said.page_nonce);
    } catch (const Error& error) {
      facts.map_reason = facts.cma_reason = error.what();
      return facts;
    }
  } else {
    facts.map_reason = facts.cma_reason = "it did not hand over its control page";
    return facts;
  }
  if ((transports & static_cast<unsigned>(Transport::map)) != 0)
    facts.map_ok = true, facts.map_reason.clear();
  else
    facts.map_reason = "not among this node's transports";
  if ((transports & static_cast<unsigned>(Transport::cma)) == 0) {
    facts.cma_reason = "not among this node's transports";
  } else if (credentials->pid <= 0) {
    facts.cma_reason = "its process is not visible in this PID namespace: share the namespace, or let kvferry allocate the caches";
  } else {
    std::uint64_t word = 0;
    iovec here{&word, sizeof word}, there{reinterpret_cast<void*>(said.identity_address), sizeof word};
    const auto n = ::process_vm_readv(static_cast<pid_t>(credentials->pid), &here, 1, &there, 1, 0);
    if (n == static_cast<ssize_t>(sizeof word) && word == said.identity_value)
      facts.cma_ok = true, facts.cma_reason.clear();
    else if (n < 0 && errno == EPERM)
      facts.cma_reason = "reading its memory is not permitted" + yama_hint();
    else
      facts.cma_reason = n < 0 ? std::string("reading its memory failed: ") + std::strerror(errno) : "its identity word is not what it said";
  }
  return facts;
}

}  // namespace kvferry::hello
