// What a test program needs: CHECK(condition), CHECK_FAILS(Exception, "part of its sentence", expression), TEST_RESULT().
#pragma once

#include <cstdio>
#include <exception>
#include <string>

inline int failures = 0;

#define CHECK(...)                                                          \
  do {                                                                      \
    if (!(__VA_ARGS__)) {                                                   \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      ++failures;                                                           \
    }                                                                       \
  } while (false)

#define CHECK_FAILS(Exception, part, ...)                                                               \
  do {                                                                                                  \
    std::string said_ = "nothing";                                                                      \
    bool right_ = false;                                                                                \
    try {                                                                                               \
      (void)(__VA_ARGS__);                                                                              \
    } catch (const Exception& error) {                                                                  \
      said_ = error.what();                                                                             \
      right_ = said_.find(part) != std::string::npos;                                                   \
    } catch (const std::exception& error) {                                                             \
      said_ = std::string("another kind: ") + error.what();                                             \
    }                                                                                                   \
    if (!right_) {                                                                                      \
      std::fprintf(stderr, "%s:%d: %s said %s\n", __FILE__, __LINE__, #__VA_ARGS__, said_.c_str()); \
      ++failures;                                                                                       \
    }                                                                                                   \
  } while (false)

#define TEST_RESULT() (failures == 0 ? 0 : 1)
