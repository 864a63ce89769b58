// JSON as RFC 8259 has it, as far as option strings and rank tables need it: read only, strict, at most 64 deep.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm_datadist::rules {

struct Json {
  enum class Kind { null, boolean, number, text, list, object };
  Kind kind = Kind::null;
  std::optional<std::int64_t> integer;  // of a number that is one
  bool truth = false;
  std::string text;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;

  const Json* find(std::string_view name) const noexcept;  // of an object; of two members of one name the last
};

// std::invalid_argument whose sentence says where and what.
Json read_json(std::string_view text);

}  // namespace llm_datadist::rules
