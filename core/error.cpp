#include "error.hpp"

namespace kvferry {

std::string_view kind_name(Kind kind) noexcept {
  switch (kind) {
    case Kind::ok: return "ok";
    case Kind::invalid_argument: return "invalid_argument";
    case Kind::not_found: return "not_found";
    case Kind::not_linked: return "not_linked";
    case Kind::already_linked: return "already_linked";
    case Kind::link_failed: return "link_failed";
    case Kind::refused: return "refused";
    case Kind::peer_lost: return "peer_lost";
    case Kind::deadline: return "deadline";
    case Kind::cancelled: return "cancelled";
    case Kind::closed: return "closed";
    case Kind::busy: return "busy";
    case Kind::out_of_memory: return "out_of_memory";
    case Kind::address_in_use: return "address_in_use";
    case Kind::unsupported: return "unsupported";
    case Kind::exists: return "exists";
    case Kind::internal: return "internal";
  }
  return "internal";  // a number from a newer peer
}

}  // namespace kvferry
