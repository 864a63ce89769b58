#include <set>
#include <string>

#include "../error.hpp"
#include "check.hpp"

using namespace kvferry;

static void every_kind_has_a_name_of_its_own() {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(Kind::internal); ++kind) {
    names.insert(std::string(kind_name(static_cast<Kind>(kind))));
  }
  CHECK(names.size() == static_cast<std::size_t>(Kind::internal) + 1);
  CHECK(kind_name(Kind::not_found) == "not_found");
}

static void a_kind_of_a_newer_peer_is_internal() { CHECK(kind_name(static_cast<Kind>(9999)) == "internal"); }

static void an_error_carries_its_sentence_and_names() {
  const Error error({Kind::deadline, "time was up", true, false}, "node 7", "cache 3", "pull");
  CHECK(std::string(error.what()) == "time was up");
  CHECK(error.outcome().touched && !error.outcome().settled && !error.outcome().ok());
  CHECK(error.peer == "node 7" && error.cache == "cache 3" && error.operation == "pull");
}

int main() {
  every_kind_has_a_name_of_its_own();
  a_kind_of_a_newer_peer_is_internal();
  an_error_carries_its_sentence_and_names();
  return TEST_RESULT();
}
