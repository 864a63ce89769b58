#include "host.hpp"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>

#include "error.hpp"
#include "memory.hpp"

namespace kvferry {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Whether a process may read the memory of another of its user, which is not its child. Tried with a child that reads its
// parent: the direction that Yama's scope 1 refuses.
std::string try_cma() {
  static const std::uint64_t word = 0x6b76666572727921ULL;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return std::string("could not be tried: ") + std::strerror(errno);
  if (child == 0) {
    std::uint64_t seen = 0;
    iovec here{&seen, sizeof seen}, there{const_cast<std::uint64_t*>(&word), sizeof word};
    const auto n = ::process_vm_readv(parent, &here, 1, &there, 1, 0);
    ::_exit(n == static_cast<ssize_t>(sizeof seen) && seen == word ? 0 : n < 0 ? errno : 255);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status)) return "could not be tried";
  const int code = WEXITSTATUS(status);
  if (code == 0) return "ok";
  if (code == EPERM)
    return "reading another process's memory is not permitted: make nodes with attach=\"any\", set kernel.yama.ptrace_scope to 0, "
           "or let kvferry allocate the caches (map needs no permission)";
  if (code == ENOSYS) return "this kernel has no process_vm_readv";
  return std::string("reading another process's memory failed: ") + std::strerror(code);
}

}  // namespace

std::string why_sockets_only() {
  utsname name{};
  ::uname(&name);
  int major = 0, minor = 0;
  std::sscanf(name.release, "%d.%d", &major, &minor);
  const bool old = major < 5 || (major == 5 && minor < 14);
  return old ? std::string("map and cma need Linux 5.14 or newer, this is ") + name.release : "";
}

HostReport host_report() {
  HostReport report;
  utsname name{};
  ::uname(&name);
  report.kernel = name.release;
  report.boot_id = first_line("/proc/sys/kernel/random/boot_id");
  const auto scope = first_line("/proc/sys/kernel/yama/ptrace_scope");
  if (!scope.empty()) report.yama_scope = std::atoi(scope.c_str());
  const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  report.cores = cores > 0 ? static_cast<unsigned>(cores) : 1;
  try {
    const Segment segment(1, 1 << 16);
    report.memfd_seals = true;
    report.map = "ok";
  } catch (const Error& error) {
    report.map = error.what();
  }
  report.cma = try_cma();
  report.socket = "ok";
  if (auto why = why_sockets_only(); !why.empty()) report.map = report.cma = std::move(why);
  return report;
}

}  // namespace kvferry
