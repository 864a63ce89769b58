/* What this machine itself can do: the loops that kvferry is measured against.
 *
 * Each is the plainest C that does the job, with nothing between it and the memory or the kernel. It runs between the
 * same two processes, on the same pages and in the same minute as kvferry. Compiled at run time with -O3 -march=native;
 * limits.py declares the same functions to Python. A loop returns the seconds it took, or minus errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 64, VECTORS_A_CALL = 1024, REQUEST_BYTES = 64, PIECE_BYTES = 1 << 20 };
static const double LOOK_S = 50e-6; /* as long as kvferry looks for an answer before it sleeps */

static double seconds_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- memory copies: contiguous, and block by block over two index lists ---- */

typedef struct Work {
  char *to;
  const char *from;
  const int64_t *to_blocks, *from_blocks; /* both null: one piece */
  int64_t count, unit;                    /* blocks, and bytes of each */
  pid_t owner;                            /* 0: `from` is mapped here; else an address in that process */
} Work;

typedef struct Part {
  const Work *work;
  int64_t first, last; /* blocks; or bytes of the one piece */
  int error;
} Part;

static void copy_mapped(Part *p) {
  const Work *w = p->work;
  if (!w->to_blocks) {
    memcpy(w->to + p->first, w->from + p->first, (size_t)(p->last - p->first));
    return;
  }
  for (int64_t i = p->first; i < p->last; i++)
    memcpy(w->to + w->to_blocks[i] * w->unit, w->from + w->from_blocks[i] * w->unit, (size_t)w->unit);
}

static void read_attached(Part *p) {
  const Work *w = p->work;
  if (!w->to_blocks) {
    for (int64_t at = p->first; at < p->last;) {
      struct iovec to = {w->to + at, (size_t)(p->last - at)};
      struct iovec from = {(void *)(w->from + at), (size_t)(p->last - at)};
      ssize_t got = process_vm_readv(w->owner, &to, 1, &from, 1, 0);
      if (got <= 0) {
        p->error = got < 0 ? errno : EFAULT;
        return;
      }
      at += got;
    }
    return;
  }
  struct iovec to[VECTORS_A_CALL], from[VECTORS_A_CALL];
  for (int64_t i = p->first; i < p->last;) {
    int n = 0;
    for (; n < VECTORS_A_CALL && i < p->last; n++, i++) {
      to[n].iov_base = w->to + w->to_blocks[i] * w->unit;
      from[n].iov_base = (void *)(w->from + w->from_blocks[i] * w->unit);
      to[n].iov_len = from[n].iov_len = (size_t)w->unit;
    }
    if (process_vm_readv(w->owner, to, (unsigned long)n, from, (unsigned long)n, 0) != (ssize_t)n * w->unit) {
      p->error = errno ? errno : EFAULT;
      return;
    }
  }
}

static void *run_part(void *part) {
  Part *p = part;
  if (p->work->owner)
    read_attached(p);
  else
    copy_mapped(p);
  return NULL;
}

/* The calling thread takes the first part; the others are threads made for this call (some 50 us of some 10 ms). */
static double run(const Work *work, int64_t length, int threads) {
  if (threads < 1 || threads > MOST_THREADS) return -EINVAL;
  Part parts[MOST_THREADS];
  pthread_t others[MOST_THREADS];
  int64_t page = work->to_blocks ? 1 : 4096;
  double began = seconds_now();
  for (int t = 0; t < threads; t++) {
    parts[t] = (Part){work, length * t / threads / page * page, length * (t + 1) / threads / page * page, 0};
    if (t == threads - 1) parts[t].last = length;
    if (t && pthread_create(&others[t], NULL, run_part, &parts[t])) return -EAGAIN;
  }
  run_part(&parts[0]);
  int error = parts[0].error;
  for (int t = 1; t < threads; t++) {
    pthread_join(others[t], NULL);
    if (parts[t].error) error = parts[t].error;
  }
  return error ? -error : seconds_now() - began;
}

double copy_whole(void *to, const void *from, int64_t size_bytes, int owner, int threads) {
  Work work = {to, from, NULL, NULL, 0, 0, owner};
  return run(&work, size_bytes, threads);
}

double copy_blocks(void *to, const void *from, const int64_t *to_blocks, const int64_t *from_blocks, int64_t count,
                   int64_t unit, int owner, int threads) {
  Work work = {to, from, to_blocks, from_blocks, count, unit, owner};
  return run(&work, count, threads);
}

/* One block a call, each call timed: what a single small read costs with nothing around it. */
double copy_latencies(void *to, const void *from, const int64_t *to_blocks, const int64_t *from_blocks, int64_t count,
                      int64_t unit, int owner, double *us) {
  Work work = {to, from, to_blocks, from_blocks, count, unit, owner};
  double all = 0;
  for (int64_t i = 0; i < count; i++) {
    Part part = {&work, i, i + 1, 0};
    double began = seconds_now();
    run_part(&part);
    double took = seconds_now() - began;
    if (part.error) return -part.error;
    us[i] = took * 1e6;
    all += took;
  }
  return all;
}

/* ---- sockets: one connection, blocking; the answer to a 64-byte request is the bytes that it asks for ----
 *
 * Where `look` is set, both ends look for bytes for a while before they sleep: no core has to be woken for them then.
 *
 * In pieces of 1 MiB: over TCP a single call for everything moves a third less (3.2 for 4.7 GB/s over loopback), and so
 * do pieces of 256 KiB. A Unix socket does not care. */

static int64_t piece(int64_t left) { return left < PIECE_BYTES ? left : PIECE_BYTES; }

static int write_all(int socket, const char *at, int64_t left) {
  while (left > 0) {
    ssize_t n = send(socket, at, (size_t)piece(left), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EPIPE;
    at += n;
    left -= n;
  }
  return 0;
}

static ssize_t receive(int socket, char *at, size_t most, int look) {
  if (look) {
    for (double until = seconds_now() + LOOK_S; seconds_now() < until;) {
      ssize_t n = recv(socket, at, most, MSG_DONTWAIT);
      if (n >= 0 || errno != EAGAIN) return n;
    }
  }
  return recv(socket, at, most, 0);
}

static int read_all(int socket, char *at, int64_t left, int look) {
  while (left > 0) {
    ssize_t n = receive(socket, at, (size_t)piece(left), look);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EPIPE;
    at += n;
    left -= n;
  }
  return 0;
}

/* The owner's end: answers until the other side closes. It looks for a request if the one before was looking. */
int serve(int socket, const void *memory, int64_t size_bytes) {
  int64_t request[REQUEST_BYTES / 8] = {0, 0};
  for (;;) {
    int error = read_all(socket, (char *)request, REQUEST_BYTES, (int)request[1]);
    if (error) return error == EPIPE || error == ECONNRESET ? 0 : error;
    int64_t bytes = request[0], from = request[2];
    if (bytes < 0 || from < 0 || from > size_bytes || bytes > size_bytes - from) return EINVAL;
    error = write_all(socket, (const char *)memory + from, bytes);
    if (error) return error;
  }
}

double ask(int socket, void *to, int64_t from, int64_t size_bytes, int look) {
  int64_t request[REQUEST_BYTES / 8] = {size_bytes, look, from};
  double began = seconds_now();
  int error = write_all(socket, (const char *)request, REQUEST_BYTES);
  if (!error) error = read_all(socket, to, size_bytes, look);
  return error ? -error : seconds_now() - began;
}

/* Call i asks for the block from_blocks[i] and puts it where to_blocks[i] is. */
double ask_latencies(int socket, char *to, const int64_t *to_blocks, const int64_t *from_blocks, int64_t count, int64_t unit,
                     int64_t size_bytes, int look, double *us) {
  double all = 0;
  for (int64_t i = 0; i < count; i++) {
    double took = ask(socket, to + to_blocks[i] * unit, from_blocks[i] * unit, size_bytes, look);
    if (took < 0) return took;
    us[i] = took * 1e6;
    all += took;
  }
  return all;
}

/* ---- the data, so that every round can be checked ---- */

static uint64_t word_at(uint64_t seed, uint64_t i) {
  uint64_t x = (seed + i) * 0x9E3779B97F4A7C15u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

void fill_pattern(uint64_t *words, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; i++) words[i] = word_at(seed, (uint64_t)i);
}

void fill_byte(void *memory, int byte, int64_t size_bytes) { memset(memory, byte, (size_t)size_bytes); }

/* The first listed block that does not hold the source's pattern, or -1. */
int64_t first_wrong_block(const uint64_t *memory, const int64_t *to_blocks, const int64_t *from_blocks, int64_t count,
                          int64_t unit, uint64_t seed) {
  int64_t words = unit / 8;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t *have = memory + to_blocks[i] * words;
    uint64_t first = (uint64_t)(from_blocks[i] * words), differs = 0;
    for (int64_t k = 0; k < words; k++) differs |= have[k] ^ word_at(seed, first + (uint64_t)k);
    if (differs) return i;
  }
  return -1;
}

/* ---- holding the interpreter's lock ---- */

/* Called through ctypes.PyDLL, so the caller's GIL stays held for the whole time. What a Python counter thread did
 * meanwhile is read here, before any other Python code can run. */
int64_t hold(double seconds, const volatile int64_t *counter) {
  int64_t before = *counter;
  double until = seconds_now() + seconds;
  while (seconds_now() < until) {
  }
  return *counter - before;
}

#ifdef SPINNER
/* A C process that spins in the place of the owner's Python: spinner SECONDS. Ends with its parent. */
int main(int count, char **words) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  double until = seconds_now() + (count > 1 ? atof(words[1]) : 1.0);
  while (seconds_now() < until) {
  }
  return 0;
}
#endif
