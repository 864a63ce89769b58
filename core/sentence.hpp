// Sentences for errors, put together from words and numbers.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace kvferry {

inline void append_word(std::string& out, std::string_view word) { out += word; }
template <class Number>
  requires std::is_arithmetic_v<Number>
void append_word(std::string& out, Number number) {
  out += std::to_string(number);
}

template <class... Words>
std::string sentence(const Words&... words) {
  std::string out;
  (append_word(out, words), ...);
  return out;
}

}  // namespace kvferry
