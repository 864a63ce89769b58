// What this host allows: the facts behind `kvferry doctor`.
#pragma once

#include <string>

namespace kvferry {

struct HostReport {
  std::string kernel, boot_id;
  int yama_scope = -1;  // -1: no Yama
  bool memfd_seals = false;
  std::string map, cma, socket;  // "ok", or why not and what to change
  unsigned cores = 0;
};

HostReport host_report();
std::string why_sockets_only();  // "" where map and cma can work at all, else why not; cheap

}  // namespace kvferry
