#include "../json.hpp"

#include <stdexcept>

#include "check.hpp"

using namespace llm_datadist::rules;

static void values_are_read() {
  const auto all = read_json(R"( {"a": [1, -2, 3.5, 1e3, true, false, null, "x"], "b": {}, "a": "later", "c": "\u00e9\ud83d\ude00\n\/"} )");
  CHECK(all.kind == Json::Kind::object && all.members.size() == 4);
  const auto& list = all.members[0].second.items;
  CHECK(list.size() == 8 && list[0].integer == 1 && list[1].integer == -2 && !list[2].integer && !list[3].integer);
  CHECK(list[2].kind == Json::Kind::number && list[4].truth && !list[5].truth && list[6].kind == Json::Kind::null && list[7].text == "x");
  CHECK(all.find("a")->text == "later" && all.find("b")->kind == Json::Kind::object && all.find("d") == nullptr);
  CHECK(all.find("c")->text == "\xC3\xA9\xF0\x9F\x98\x80\n/");
  CHECK(read_json("9223372036854775807").integer == INT64_MAX && !read_json("9223372036854775808").integer);
}

static void what_is_no_json_says_where() {
  for (const char* text : {"", " ", "{", "[", "[1", "[1,]", "{\"a\"}", "{\"a\":}", "{a:1}", "{\"a\":1,}", "01", "-", "1.", "1e", "tru", "nulL", "\"", "\"\\x\"",
                           "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\ud800\\u0041\"", "\"\\udc00\"", "\"\n\"", "1 2", "NaN", "+1", "'a'"})
    CHECK_FAILS(std::invalid_argument, "not JSON: ", read_json(text));
  CHECK_FAILS(std::invalid_argument, "at character 3", read_json("[1 2]"));
}

static void depth_has_an_end() {
  CHECK(read_json(std::string(60, '[') + std::string(60, ']')).kind == Json::Kind::list);
  CHECK_FAILS(std::invalid_argument, "too deep", read_json(std::string(100'000, '[')));
}

int main() {
  values_are_read();
  what_is_no_json_says_where();
  depth_has_an_end();
  return TEST_RESULT();
}
