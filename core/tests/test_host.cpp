#include "../host.hpp"

#include "check.hpp"

using namespace kvferry;

static void a_report_says_what_works_or_what_to_change() {
  const auto report = host_report();
  CHECK(!report.kernel.empty() && report.boot_id.size() == 36 && report.cores >= 1);
  CHECK(report.yama_scope >= -1 && report.yama_scope <= 3);
  CHECK(report.socket == "ok" && !report.map.empty() && !report.cma.empty());
  CHECK(report.memfd_seals == (report.map == "ok") || report.map.find("needs Linux") == 0);
  CHECK(report.cma == "ok" || report.cma.size() > 20);  // a sentence
}

int main() {
  a_report_says_what_works_or_what_to_change();
  return TEST_RESULT();
}
