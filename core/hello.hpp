// The hello: what two nodes tell each other before there is a link, the mutual proof of a shared secret, and the local
// step that shows two processes of one host who they are. Pure values and checks; the sockets are others'.
//
//   dialler                         listener
//   HELLO            ->
//                    <-             CHALLENGE (its proof, and a Unix address and a one-time token if the host is the same)
//   LOCAL + page     ->  (Unix)
//                    <-  (Unix)     LOCAL_ANSWER + page
//   AUTH (its proof) ->
//                    <-             WELCOME (the token for lanes) or, at any step, REFUSED
#pragma once

#include <array>
#include <string>

#include "link.hpp"
#include "sha256.hpp"

namespace kvferry::hello {

using Token = std::array<std::uint8_t, 16>;
using Nonce = std::array<std::uint8_t, 32>;

struct Hello {
  std::uint16_t version = wire::version;
  std::uint64_t node_id = 0;
  Token instance{}, boot_id{};
  Nonce nonce{};
  bool has_secret = false;
  std::string program;
};

struct Challenge {
  std::uint64_t node_id = 0;
  Token instance{};
  Nonce nonce{};
  bool has_secret = false;
  std::string program;
  std::string local_address;  // abstract Unix name; "" if the hosts differ
  Token local_token{};
  Digest proof{};
};

struct Auth {
  Digest proof{};
  bool local_done = false;
};

struct LaneHello {
  Token link{};
  bool reverse = false;  // the side that was dialled is the client
  LaneUse use = LaneUse::bulk;
};

struct Local {  // both ways
  Token token{};
  std::uint64_t identity_address = 0, identity_value = 0;
  std::uint64_t page_nonce[2] = {0, 0};
};

std::vector<std::uint8_t> write(const Hello&);
std::vector<std::uint8_t> write(const Challenge&);
std::vector<std::uint8_t> write(const Auth&);
std::vector<std::uint8_t> write_welcome(const Token& link);
std::vector<std::uint8_t> write_refused(const Outcome&);
std::vector<std::uint8_t> write(const LaneHello&);
std::vector<std::uint8_t> write(const Local&, bool answer, bool with_page);

// Throw wire::WireError for anything malformed; read_hello also for a foreign protocol.
Hello read_hello(const Frame&);
Challenge read_challenge(const Frame&);
Auth read_auth(const Frame&);
Token read_welcome(const Frame&);
LaneHello read_lane(const Frame&);
Local read_local(const Frame&);
// Throws the Error that a REFUSED frame carries; anything else is passed over.
void throw_if_refused(const Frame&);

// HMAC over everything said so far, with the role of who proves.
Digest proof(const std::vector<std::uint8_t>& secret, std::string_view role, const Hello&, const Challenge&);

Token boot_id();  // of the running kernel
Token random_token();
Nonce random_nonce();

// What is known of a process at the other end of a Unix connection, after it has said `said` and sent its control page:
// credentials, pidfd, whether its page is what it said, whether its memory can be read (nonce read back).
PeerFacts examine_local_peer(int unix_fd, const Local& said, std::vector<Descriptor>& descriptors, unsigned transports);

}  // namespace kvferry::hello
