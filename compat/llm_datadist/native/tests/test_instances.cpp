#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

static void both_placements_draw_on_one_pool() {
  EngineOptions options;
  CHECK(!pool_of(options) && !pools_too_large(options, ""));
  options.device_pool = Pool{4096, 10};
  CHECK(pool_of(options) == Pool{4096, 12});  // no smaller pages than that
  options.host_pool = Pool{1 << 20, 20};
  options.device_pool->page_shift = 16;
  CHECK(pool_of(options) == Pool{(1 << 20) + 4096, 16});
}

static void a_pool_larger_than_the_machine_is_found() {
  EngineOptions options;
  options.device_pool = Pool{3 << 20};
  const std::string meminfo = "MemFree: 1 kB\nMemTotal:        2048 kB\nSwapTotal:       1024 kB\n";
  CHECK(!pools_too_large(options, meminfo));
  options.host_pool = Pool{1};
  CHECK(pools_too_large(options, meminfo).value_or("").find("has 3145728") != std::string::npos);
  for (const char* unknown : {"", "MemTotal: 1 kB\n", "MemTotal:\nSwapTotal: 1 kB", "MemTotal"}) CHECK(!pools_too_large(options, unknown));
}

static void a_share_counts_whole_pages() {
  Share share({10 << 12, 12});
  CHECK(share.wanted(2, 4097) == 4 << 12 && share.wanted(10, 1) == 10 << 12);
  share.take(7, share.wanted(4, 8192));
  CHECK_FAILS(TooLittleLeft, "8192 of 40960 bytes left", share.wanted(3, 1));
  CHECK_FAILS(TooLittleLeft, "left", share.wanted(2, UINT64_MAX));
  CHECK(share.has(7) && share.give_back(7) && !share.give_back(7) && share.wanted(10, 4096) == 10 << 12);
}

static void the_listener_follows_the_port() {
  const std::optional<ListenAt> none, here{{"127.0.0.1", 7000}}, renamed{{"0.0.0.0", 7000}}, there{{"127.0.0.1", 7001}};
  CHECK(listener_move(true, false, here, here) == ListenerMove::refused_linked);
  CHECK(listener_move(false, false, here, renamed) == ListenerMove::stays && listener_move(true, true, here, renamed) == ListenerMove::stays);
  CHECK(listener_move(false, false, here, there) == ListenerMove::moves && listener_move(false, false, here, none) == ListenerMove::moves);
  CHECK(listener_move(false, true, here, there) == ListenerMove::refused_hixl && listener_move(false, true, here, none) == ListenerMove::refused_hixl);
}

static void ids_of_no_cache_mean_keys() {
  CHECK(meaning_of_id(3, true, false) == IdMeans::cache && meaning_of_id(3, true, true) == IdMeans::cache);
  for (const std::int64_t id : {0, -1})
    CHECK(meaning_of_id(id, true, false) == IdMeans::blocks_of_model_0 && meaning_of_id(id, true, true) == IdMeans::request_0 && meaning_of_id(id, false, false) == IdMeans::cache);
}

int main() {
  both_placements_draw_on_one_pool();
  a_pool_larger_than_the_machine_is_found();
  a_share_counts_whole_pages();
  the_listener_follows_the_port();
  ids_of_no_cache_mean_keys();
  return TEST_RESULT();
}
