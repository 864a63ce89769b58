#include "log.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

namespace llm_datadist {
namespace {

constexpr const char* names[] = {"DEBUG", "INFO", "WARNING", "ERROR"};
constexpr std::size_t longest = 2000;  // of a sentence: longer ones say what somebody gave, which has no end

// In one go: lines of threads stay whole. Whoever reads them may have gone, and a thread may be cancelled: neither may end the
// program.
void write_to_stderr(std::span<const iovec> parts) noexcept {
  int cancelling;
  ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
  sigset_t broken_pipe, before, pending;
  ::sigemptyset(&broken_pipe);
  ::sigaddset(&broken_pipe, SIGPIPE);
  const bool was_pending = ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
  ::pthread_sigmask(SIG_BLOCK, &broken_pipe, &before);
  if (::writev(STDERR_FILENO, parts.data(), static_cast<int>(parts.size())) < 0 && errno == EPIPE && !was_pending) {
    const timespec at_once{};
    ::sigtimedwait(&broken_pipe, nullptr, &at_once);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setcancelstate(cancelling, nullptr);
}

}  // namespace

Level log_level() noexcept {
  static const Level level = [] {
    const char* said = std::getenv("ASCEND_GLOBAL_LOG_LEVEL");
    const bool known = said != nullptr && std::strlen(said) == 1 && *said >= '0' && *said <= '3';
    return known ? static_cast<Level>(*said - '0') : Level::error;
  }();
  return level;
}

void log_line(Level level, std::string_view function, std::string_view sentence) noexcept {
  if (level < log_level()) return;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  ::localtime_r(&now.tv_sec, &local);
  char when[32];
  ::strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &local);
  char head[256];
  const int written = std::snprintf(head, sizeof head, "[%s] LLM_DATADIST(%d,%s):%s.%03ld %lu %.*s: ", names[static_cast<int>(level)],
                                    static_cast<int>(::getpid()), program_invocation_short_name, when, now.tv_nsec / 1'000'000,
                                    static_cast<unsigned long>(::pthread_self()), static_cast<int>(function.size()), function.data());
  const auto head_bytes = std::min(sizeof head - 1, static_cast<std::size_t>(std::max(written, 0)));
  char body[longest];
  const auto body_bytes = std::min(sentence.size(), longest);
  std::replace_copy_if(sentence.begin(), sentence.begin() + static_cast<std::ptrdiff_t>(body_bytes), body, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  char end[] = "\n";
  iovec parts[] = {{head, head_bytes}, {body, body_bytes}, {end, 1}};
  write_to_stderr(parts);
}

}  // namespace llm_datadist
