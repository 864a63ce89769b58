#include "json.hpp"

#include <charconv>
#include <stdexcept>

#include "sentence.hpp"

namespace llm_datadist::rules {
namespace {

constexpr int deepest = 64;

class Reading {
 public:
  explicit Reading(std::string_view text) : text_(text) {}

  Json all() {
    Json value = read(0);
    skip_space();
    if (at_ != text_.size()) fail("something behind the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* what) const { throw std::invalid_argument(said("not JSON: ", what, " at character ", at_)); }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  char peek() {
    skip_space();
    if (at_ == text_.size()) fail("it ends early");
    return text_[at_];
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void need(char c, const char* otherwise) {
    if (!take(c)) fail(otherwise);
  }

  Json read(int depth) {
    if (depth > deepest) fail("it is too deep");
    Json value;
    switch (peek()) {
      case '{': read_object(value, depth); break;
      case '[': read_list(value, depth); break;
      case '"': value.kind = Json::Kind::text, value.text = read_text(); break;
      case 't': word("true"), value.kind = Json::Kind::boolean, value.truth = true; break;
      case 'f': word("false"), value.kind = Json::Kind::boolean; break;
      case 'n': word("null"); break;
      default: read_number(value);
    }
    return value;
  }

  void read_object(Json& value, int depth) {
    value.kind = Json::Kind::object;
    ++at_;
    if (take('}')) return;
    do {
      if (peek() != '"') fail("no name");
      std::string name = read_text();
      need(':', "no colon");
      value.members.emplace_back(std::move(name), read(depth + 1));
    } while (take(','));
    need('}', "an object does not end");
  }

  void read_list(Json& value, int depth) {
    value.kind = Json::Kind::list;
    ++at_;
    if (take(']')) return;
    do value.items.push_back(read(depth + 1));
    while (take(','));
    need(']', "a list does not end");
  }

  void word(std::string_view expected) {
    if (text_.substr(at_, expected.size()) != expected) fail("an unknown word");
    at_ += expected.size();
  }

  bool digits() {
    const auto before = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ > before;
  }

  void read_number(Json& value) {
    value.kind = Json::Kind::number;
    const auto begin = at_;
    if (text_[at_] == '-') ++at_;
    const auto first = at_;
    if (!digits()) fail("no value");
    if (text_[first] == '0' && at_ - first > 1) fail("a number with a leading 0");
    bool whole = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_, whole = false;
      if (!digits()) fail("no digits behind the point");
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_, whole = false;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      if (!digits()) fail("no digits in the exponent");
    }
    if (!whole) return;
    std::int64_t number = 0;
    if (std::from_chars(text_.data() + begin, text_.data() + at_, number).ec == std::errc{}) value.integer = number;
  }

  std::string read_text() {
    std::string out;
    for (++at_;; ++at_) {
      if (at_ >= text_.size()) fail("a text does not end");
      const char c = text_[at_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character");
      if (c != '\\') {
        out += c;
        continue;
      }
      if (++at_ >= text_.size()) fail("a text does not end");
      constexpr std::string_view escaped = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
      if (const auto i = escaped.find(text_[at_]); i != escaped.npos) {
        out += meant[i];
      } else if (text_[at_] == 'u') {
        append_code_point(out, read_code_point());
      } else {
        fail("an unknown escape");
      }
    }
    ++at_;
    return out;
  }

  std::uint32_t hex4() {  // at_ stands on the character before; afterwards on the last of the four
    if (text_.size() - at_ < 5) fail("a text does not end");
    std::uint32_t unit = 0;
    const auto* begin = text_.data() + at_ + 1;
    const auto [end, error] = std::from_chars(begin, begin + 4, unit, 16);
    if (error != std::errc{} || end != begin + 4) fail("an escape that is no number");
    at_ += 4;
    return unit;
  }

  std::uint32_t read_code_point() {
    const auto high = hex4();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || text_.substr(at_ + 1, 2) != "\\u") fail("half a character");
    at_ += 2;
    const auto low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("half a character");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  static void append_code_point(std::string& out, std::uint32_t c) {
    const auto byte = [&](std::uint32_t value) { out += static_cast<char>(value); };
    if (c < 0x80) return byte(c);
    if (c < 0x800) return byte(0xC0 | c >> 6), byte(0x80 | (c & 0x3F));
    if (c < 0x10000) return byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
    byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 0x3F)), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view name) const noexcept {
  for (auto it = members.rbegin(); it != members.rend(); ++it)
    if (it->first == name) return &it->second;
  return nullptr;
}

Json read_json(std::string_view text) { return Reading(text).all(); }

}  // namespace llm_datadist::rules
