#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "../copier.hpp"
#include "check.hpp"

using namespace kvferry;

static void fill(std::vector<unsigned char>& bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 31 + seed + (i >> 8));
}

static void a_copy_writes_its_bytes_and_no_others() {
  for (const std::size_t bytes : {0, 1, 63, 1023, 1024, 1025, 1600, 4096, 32'767, 32'768 + 64, 49'151 + 64, 262'144 + 77}) {
    std::vector<unsigned char> from(bytes + 64), to(bytes + 128), expected(bytes + 128);
    fill(from, 1);
    for (const std::size_t to_offset : {0, 1, 32, 63}) {
      for (const std::size_t from_offset : {0, 33}) {
        for (const bool stream : {false, true}) {
          if (bytes > 100'000 && (to_offset == 32 || !stream)) continue;  // the big ones take long under a sanitizer
          fill(to, 7);
          expected = to;
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_offset), bytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(to_offset));
          copy_bytes(to.data() + to_offset, from.data() + from_offset, bytes, stream);
          CHECK(to == expected);
        }
      }
    }
  }
}

// In a child, which may not call process_vm_readv.
static void the_kernel_copies_and_says_what_is_not_there() {
  std::vector<unsigned char> from(300'000), to(from.size());
  fill(from, 5);
  auto* const nothing = reinterpret_cast<void*>(4096);
  const auto copies = [&](unsigned seed) {
    fill(to, seed);
    return copy_bytes_by_kernel(to.data(), from.data(), from.size()) && to == from && !copy_bytes_by_kernel(to.data(), nothing, 100) &&
           !copy_bytes_by_kernel(nothing, from.data(), 100);
  };
  CHECK(copies(1));
  const pid_t child = fork();
  if (child == 0) {
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(0);  // no way to try
    _exit(copies(2) ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void a_hint_may_name_any_address() { expect_copy(nullptr, nullptr, 1 << 20); }

static void a_kind_without_a_copier_is_refused_by_name() {
  CHECK(kind_by_name("host") == host_kind);
  CHECK(copier_of(host_kind) == nullptr && copier_of(77) == nullptr);
  CHECK_FAILS(Kind::unsupported, "'cuda:0'", kind_by_name("cuda:0"));
  CHECK_FAILS(Kind::unsupported, "tensor.cpu()", kind_by_name("cuda:0"));
  CHECK_FAILS(Kind::unsupported, "'test:0'", kind_by_name("test:0"));
  CHECK_FAILS(Kind::unsupported, "enable_test_kind", test_kind_allocate(1));
}

static void the_test_kind_is_reached_through_its_copier_alone() {
  enable_test_kind();
  enable_test_kind();
  CHECK(kind_by_name("test:0") == test_kind && kind_by_id(test_kind) == "test:0");
  const std::uint64_t memory = test_kind_allocate(10'000);
  CHECK(memory % 4096 == 0);
  const std::string word = "across two pages";
  Copier& copier = *copier_of(test_kind);
  CHECK(copier.write(memory + 4090, word.data(), word.size()));
  std::string back(word.size(), ' ');
  CHECK(copier.read(back.data(), memory + 4090, back.size()) && back == word);
  CHECK(test_kind_read(back.data(), memory + 4091, 3) && back.substr(0, 3) == "cro");
  CHECK(!copier.read(back.data(), memory + 3 * 4096 - 4, 16));  // past its end
  CHECK(!copier.write(reinterpret_cast<std::uint64_t>(back.data()), word.data(), 1));
  CHECK(!copier.read(back.data(), memory, ~std::size_t{0}));

  const pid_t child = fork();
  if (child == 0) {
    close(STDERR_FILENO);  // a sanitizer would tell the story of the crash
    (void)*reinterpret_cast<volatile char*>(memory);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);  // sanitizers turn the signal into an exit
}

static void threads_share_pages_of_the_test_kind() {
  const std::uint64_t memory = test_kind_allocate(4096);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([=] {
      for (unsigned i = 0; i < 200; ++i) {
        unsigned back = 0;
        CHECK(test_kind_write(memory + 8 * t, &i, sizeof i));
        CHECK(test_kind_read(&back, memory + 8 * t, sizeof back) && back == i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int main() {
  a_copy_writes_its_bytes_and_no_others();
  the_kernel_copies_and_says_what_is_not_there();
  a_hint_may_name_any_address();
  a_kind_without_a_copier_is_refused_by_name();
  the_test_kind_is_reached_through_its_copier_alone();
  threads_share_pages_of_the_test_kind();
  return TEST_RESULT();
}
