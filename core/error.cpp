#include "error.hpp"

#include <cerrno>
#include <cstring>

#include "sentence.hpp"

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

Error not_to_be_had(std::string_view what, int error) {
  switch (error) {
    case EMFILE: return {Kind::busy, sentence("out of descriptors: ", what, " cannot be had: raise this process's limit (ulimit -n), or close some")};
    case ENFILE: return {Kind::busy, sentence("out of descriptors: ", what, " cannot be had: raise the machine's limit (fs.file-max), or close some files")};
    case ENOSPC: return {Kind::busy, sentence(what, " cannot be had: raise the user's limit of watched descriptors (fs.epoll.max_user_watches)")};
    case ENOMEM:
    case ENOBUFS: return {Kind::out_of_memory, sentence(what, " cannot be had: the kernel has no memory left for it")};
    default: return {Kind::busy, sentence(what, " cannot be had: ", std::strerror(error))};
  }
}

Error out_of_threads(std::string_view name) {
  return {Kind::busy, sentence("out of threads: ", name,
                               " cannot be started: raise the limit on them (ulimit -u, pids.max of the control group) or on address space (ulimit -v), "
                               "or end some")};
}

}  // namespace kvferry
