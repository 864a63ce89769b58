// Starting a native thread: named, and with every signal blocked, so that signals go to threads that handle them (Python's).
// Throws Error(busy) when the system gives no more threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "error.hpp"

namespace kvferry {

inline thread_local bool started_here = false;

// Whether the calling thread is one of the library's, which it may put where it likes.
inline bool of_this_library() noexcept { return started_here; }

template <class Function>
std::thread start_thread(const std::string& name, Function&& function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread
  std::thread thread;
  try {
    thread = std::thread([function = std::forward<Function>(function)]() mutable {
      started_here = true;
      function();
    });
  } catch (const std::system_error&) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw out_of_threads(name);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name.c_str());
  return thread;
}

}  // namespace kvferry
