// Many threads use instances at once, and links and instances come and go meanwhile: no call is stuck, none crashes, and what a
// successful pull brings is whole. For the thread sanitizer above all.
#include <thread>

#include "sides.hpp"

using namespace sides;

namespace {

void threads_pull_push_and_register_at_once() {
  Side a(1), b(2);
  Memory source(2);
  source.fill(1);
  CHECK_STATUS(LLM_SUCCESS, a.add(source));
  CHECK_STATUS(LLM_SUCCESS, b.link(a));
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      Memory mine(2);
      CHECK_STATUS(LLM_SUCCESS, b.add(mine));
      for (int turn = 0; turn < 50; ++turn) {
        CHECK_STATUS(LLM_SUCCESS, b.datadist.PullKvBlocks({1, 1}, mine.cache, {0, 1, 2}, {2, 1, 0}));
        CHECK(mine.has(0, 2, 1, 0, 0) && mine.has(1, 0, 1, 1, 2));
        CHECK_STATUS(LLM_SUCCESS, b.datadist.PushKvCache(mine.cache, {1, 1, static_cast<uint32_t>(4 + number)}, 2));
        CHECK_STATUS(LLM_NOT_YET_LINK, b.datadist.PullKvCache({7, 1}, mine.cache));
      }
      CHECK_STATUS(LLM_SUCCESS, b.datadist.UnregisterKvCache(mine.cache.cache_id));
    });
  for (auto &thread : threads) thread.join();
  for (std::size_t unit = 4; unit < 8; ++unit) CHECK(source.has(0, unit, 1, 0, 0) && source.has(1, unit, 1, 1, 0));
}

void links_come_and_go_beside_pulls() {
  Side a(1), b(2);
  Memory source(2);
  source.fill(1);
  CHECK_STATUS(LLM_SUCCESS, a.add(source));
  std::atomic<bool> over{false};
  std::atomic<int> pulled{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number)
    threads.emplace_back([&] {
      Memory mine(2);
      CHECK_STATUS(LLM_SUCCESS, b.add(mine));
      while (!over.load()) {
        const auto status = b.datadist.PullKvCache({1, 1, 3}, mine.cache, 1);
        CHECK(status == LLM_SUCCESS || status == LLM_NOT_YET_LINK || status == LLM_FAILED);
        if (status != LLM_SUCCESS) continue;
        CHECK(mine.has(0, 1, 1, 0, 3) && mine.has(1, 1, 1, 1, 3));
        ++pulled;
      }
    });
  for (int turn = 0; turn < 10; ++turn) {
    CHECK_STATUS(LLM_SUCCESS, b.link(a));
    const int before = pulled.load();
    while (pulled.load() == before) std::this_thread::yield();
    CHECK_STATUS(LLM_SUCCESS, b.unlink(a, turn % 2 == 0));
    if (turn % 2 == 0) CHECK_STATUS(LLM_SUCCESS, a.unlink(b, true));
  }
  over = true;
  for (auto &thread : threads) thread.join();
  b.datadist.Finalize();  // ends the use of memory that has gone with its thread
}

// Both sides pull and push all the time: what has begun is waited for, what begins meanwhile has no link.
void an_unlink_ends_beside_threads_that_go_on() {
  for (const char *transports : {"map,cma,socket", "socket"}) {
    Side a(1, {{"kvferry.transports", transports}}), b(2, {{"kvferry.transports", transports}});
    Memory ours(2), theirs(2);
    ours.fill(1);
    theirs.fill(2);
    CHECK_STATUS(LLM_SUCCESS, a.add(ours));
    CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
    std::atomic<bool> over{false};
    std::atomic<int> moved[6] = {};
    std::vector<std::thread> threads;
    for (std::size_t number = 0; number < 6; ++number)
      threads.emplace_back([&, number] {
        Side &mine = number < 3 ? a : b;
        const uint64_t other = number < 3 ? 2 : 1;
        Memory memory(2);
        CHECK_STATUS(LLM_SUCCESS, mine.add(memory));
        while (!over.load()) {
          const auto status = number % 3 == 0   ? mine.datadist.PullKvCache({other, 1, 3}, memory.cache, 1)
                              : number % 3 == 1 ? mine.datadist.PullKvBlocks({other, 1}, memory.cache, {3}, {1})
                                                : mine.datadist.PushKvCache(number < 3 ? ours.cache : theirs.cache, {other, 1, 7}, 6);  // what is pushed is not pushed over
          CHECK(status == LLM_SUCCESS || status == LLM_NOT_YET_LINK || status == LLM_FAILED);
          if (status != LLM_SUCCESS) continue;
          if (number % 3 != 2) CHECK(memory.has(0, 1, static_cast<int>(other), 0, 3) && memory.has(1, 1, static_cast<int>(other), 1, 3));
          ++moved[number];
        }
      });
    for (int turn = 0; turn < 6; ++turn) {
      CHECK_STATUS(LLM_SUCCESS, b.link(a));
      int before[6];
      for (std::size_t i = 0; i < 6; ++i) before[i] = moved[i].load();
      for (std::size_t i = 0; i < 6; ++i)
        while (moved[i].load() == before[i]) std::this_thread::yield();
      std::vector<Status> rets;
      Side &leaves = turn % 2 == 0 ? a : b, &stays = turn % 2 == 0 ? b : a;
      CHECK_STATUS(LLM_SUCCESS, leaves.datadist.UnlinkLlmClusters({cluster(stays.id, stays.port)}, rets, 30000));
      CHECK_STATUS(LLM_SUCCESS, stays.unlink(leaves));
    }
    over = true;
    for (auto &thread : threads) thread.join();
    a.datadist.Finalize();  // before the memory of the threads' caches, which has gone, is anybody's again
    b.datadist.Finalize();
  }
}

void an_instance_is_finalized_beside_calls() {
  Side a(1);
  Memory source(2);
  source.fill(1);
  CHECK_STATUS(LLM_SUCCESS, a.add(source));
  for (int turn = 0; turn < 5; ++turn) {
    Side b(2);
    Memory mine(2);
    CHECK_STATUS(LLM_SUCCESS, b.add(mine));
    CHECK_STATUS(LLM_SUCCESS, b.link(a));
    std::atomic<int> pulled{0};
    std::atomic<bool> ended{false};
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number)
      threads.emplace_back([&, number] {  // each into a row of its own; whatever is answered, they go on
        while (!ended.load())
          if (b.datadist.PullKvCache({1, 1}, mine.cache, static_cast<uint32_t>(number)) == LLM_SUCCESS) ++pulled;
      });
    while (pulled.load() == 0) std::this_thread::yield();
    b.datadist.Finalize();
    ended.store(true);
    for (auto &thread : threads) thread.join();
    CHECK_STATUS(LLM_FAILED, b.datadist.PullKvCache({1, 1}, mine.cache));
  }
}

}  // namespace

int main() {
  threads_pull_push_and_register_at_once();
  links_come_and_go_beside_pulls();
  an_unlink_ends_beside_threads_that_go_on();
  an_instance_is_finalized_beside_calls();
  return sides::failures == 0 ? 0 : 1;
}
