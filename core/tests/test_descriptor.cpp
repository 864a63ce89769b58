#include "../descriptor.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "check.hpp"

using namespace kvferry;

static Descriptor made() { return Descriptor(eventfd(0, EFD_CLOEXEC)); }
static bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

static void a_descriptor_closes_itself_once() {
  int fd;
  {
    Descriptor one = made();
    fd = one.get();
    CHECK(one && is_open(fd) && open_descriptors() == 1);
    Descriptor other = std::move(one);
    CHECK(!one && other.get() == fd && open_descriptors() == 1);
    other = made();
    CHECK(!is_open(fd) || other.get() == fd);
    other.reset();
    other.reset();
    CHECK(!other && open_descriptors() == 0);
  }
  const Descriptor none;
  CHECK(!none && none.get() == -1);
  const Descriptor failed(-1);
  CHECK(!failed && open_descriptors() == 0);
}

static void many_threads_open_and_close() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 2000; ++i) {
        const Descriptor a = made();
        Descriptor b = made();
        b.reset();
        CHECK(is_open(a.get()));
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(open_descriptors() == 0);
}

static void none_takes_the_place_of_a_standard_stream() {
  const int kept[] = {dup(0), dup(2)};
  close(0);
  close(2);
  {
    const Descriptor one = made(), other = made();
    const bool beside = one.get() > 2 && other.get() > 2 && !is_open(0) && !is_open(2);
    const bool closed_on_exec = (fcntl(one.get(), F_GETFD) & FD_CLOEXEC) != 0;
    dup2(kept[0], 0);
    dup2(kept[1], 2);
    CHECK(beside && closed_on_exec);
  }
  for (const int fd : kept) close(fd);
  CHECK(open_descriptors() == 0 && is_open(0) && is_open(2));
}

static void a_forked_child_has_none_of_them() {
  watch_forks();
  watch_forks();
  Descriptor one = made();
  std::vector<Descriptor> more;
  for (int i = 0; i < 200; ++i) more.push_back(made());
  const int plain = eventfd(0, EFD_CLOEXEC);
  CHECK(process_generation() == 0);
  const pid_t child = fork();
  if (child == 0) {
    bool good = process_generation() == 1 && open_descriptors() == 0 && !is_open(one.get()) && !is_open(more.back().get()) && is_open(plain);
    // Its number may be somebody else's by now, who keeps it.
    const int again = eventfd(0, EFD_CLOEXEC);
    good &= again == one.get();
    one.reset();
    good &= is_open(again);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(process_generation() == 2 ? 0 : 1);
    int status = 1;
    waitpid(grandchild, &status, 0);
    _exit(good && status == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(is_open(one.get()) && open_descriptors() == 201);
  close(plain);
}

int main() {
  a_descriptor_closes_itself_once();
  many_threads_open_and_close();
  none_takes_the_place_of_a_standard_stream();
  a_forked_child_has_none_of_them();
  return TEST_RESULT();
}
