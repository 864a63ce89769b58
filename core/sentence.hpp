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

// A name that somebody gave, fit to stand in a line: unprintable bytes escaped, the end of a long one left out.
inline std::string shown(std::string_view name) {
  constexpr std::size_t most = 80;
  constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (const char c : name.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f)
      out += c;
    else
      out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
  }
  if (name.size() > most) {
    while (!out.empty() && (static_cast<unsigned char>(out.back()) & 0xC0) == 0x80) out.pop_back();  // no half of a character
    if (!out.empty() && static_cast<unsigned char>(out.back()) >= 0xC0) out.pop_back();
    out += "...";
  }
  return out;
}

template <class... Words>
std::string sentence(const Words&... words) {
  std::string out;
  (append_word(out, words), ...);
  return out;
}

}  // namespace kvferry
