#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

int main() {
  CHECK(status_of("deadline", "transfer") == status::timeout && status_of("peer_lost", "transfer") == status::failed);
  CHECK(status_of("closed", "transfer") == status::param_invalid && status_of("closed", "register") == status::failed);
  CHECK(status_of("peer_lost", "link") == status::link_failed && status_of("peer_lost", "unlink") == status::unlink_failed);
  CHECK(status_of("busy", "link") == status::link_failed && status_of("busy", "transfer") == status::link_busy);
  CHECK(status_of("not_linked", "unlink") == status::success && status_of("not_linked") == status::not_yet_link);
  CHECK(status_of("busy", "init") == status::failed && status_of("busy", "listen") == status::failed);
  CHECK(status_of("nobody thought of this", "link") == status::failed && status_of("") == status::failed);
  CHECK(known_kinds().size() == 16);
  for (const auto kind : known_kinds()) CHECK(status_of(kind) != status::success);
  CHECK(overall({}) == status::param_invalid && overall({0, 0}) == status::success && overall({status::timeout, status::link_failed, 0}) == status::link_failed);
  return TEST_RESULT();
}
