// Giving the GIL up and taking it back, in threads that may outlive the interpreter.
//
// When a daemon thread wants the GIL of an interpreter that is shutting down, CPython before 3.14 ends it by pthread_exit,
// which unwinds its stack; where the unwinding meets a function that may not throw, the whole process aborts. What 3.14
// does is done here for all: such a thread stands still until the process has ended.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace kvferry {

[[noreturn]] inline void stand_still() noexcept {
  for (;;) ::pause();
}

class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      stand_still();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() {
    try {
      state_ = PyGILState_Ensure();
    } catch (abi::__forced_unwind&) {
      stand_still();
    }
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace kvferry
