// Starting a native thread: named, and with every signal blocked, so that signals go to threads that handle them (Python's).
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <thread>
#include <utility>

namespace kvferry {

template <class Function>
std::thread start_thread(const std::string& name, Function&& function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread
  std::thread thread(std::forward<Function>(function));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name.c_str());
  return thread;
}

}  // namespace kvferry
