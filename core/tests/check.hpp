// The little that these test programs need: a check that says where it failed, waiting with an end, and an exit code.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "../clock.hpp"
#include "../error.hpp"

namespace kvferry::testing {

inline int failures = 0;

inline void failed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  ++failures;
}

// The kind that `call` fails with; Kind::ok if it does not. `said` receives the sentence.
template <class Call>
Kind kind_of(Call&& call, std::string* said = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (said != nullptr) *said = error.outcome().sentence;
    return error.outcome().kind;
  }
  return Kind::ok;
}

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

template <class Condition>
bool eventually(Condition&& condition, int within_ms = 5000) {
  const auto until = Deadline::after_ms(within_ms);
  while (!condition()) {
    if (until.passed()) return false;
    sleep_ms(1);
  }
  return true;
}

}  // namespace kvferry::testing

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) ::kvferry::testing::failed(__FILE__, __LINE__, #condition);    \
  } while (false)

// The call fails with this kind, and its sentence contains these words.
#define CHECK_FAILS(expected, words, ...)                                                                            \
  do {                                                                                                               \
    std::string said_;                                                                                               \
    const ::kvferry::Kind kind_ = ::kvferry::testing::kind_of([&] { (void)(__VA_ARGS__); }, &said_);                 \
    if (kind_ != (expected) || said_.find(words) == std::string::npos) {                                             \
      ::kvferry::testing::failed(__FILE__, __LINE__,                                                                 \
                                 std::string(#__VA_ARGS__ " failed with ") +                                         \
                                     std::string(::kvferry::kind_name(kind_)) + ": " + said_);                       \
    }                                                                                                                \
  } while (false)

#define TEST_RESULT() (::kvferry::testing::failures == 0 ? 0 : 1)
