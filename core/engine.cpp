#include "engine.hpp"

#include "sentence.hpp"

namespace kvferry {

void EventLog::add(const char* level, std::string sentence) {
  const std::lock_guard lock(mutex_);
  if (lines_.size() == kept) lines_.pop_front();
  lines_.emplace_back(level, std::move(sentence));
  came_.notify_one();
}

std::optional<std::pair<std::string, std::string>> EventLog::take(std::int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  came_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return closed_ || !lines_.empty(); });
  if (lines_.empty()) return std::nullopt;
  auto line = std::move(lines_.front());
  lines_.pop_front();
  return line;
}

void EventLog::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  came_.notify_all();
}

namespace {
constexpr std::uint32_t guard_slots = 64 << 10;
}

Engine::Engine(NodeOptions given, unsigned threads, unsigned helpers, std::function<std::int64_t(std::int64_t)> tick)
    : options(std::move(given)),
      guards(guard_slots),
      registry(guards),
      reactor(std::move(tick)),
      crew(threads, helpers) {}

namespace {

std::string hex(std::uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

void check_spans(KnownMemory& memory, Cache& cache, bool writable, bool anew) {
  const auto& spans = cache.memory_moves->spans;
  std::vector<MemoryRange> ranges;
  ranges.reserve(spans.size());
  for (const auto& span : spans) {
    const auto address = writable ? span.destination : span.source;
    ranges.push_back({address, address + span.bytes, false});
  }
  if (anew) memory.forget(ranges);
  const auto look = memory.look(ranges, writable);
  if (look.file_backed) cache.file_backed.store(true);
  if (look.may_shrink) cache.may_shrink.store(true);
  if (look.ok) return;
  const auto& bad = ranges[look.range];
  throw Error({Kind::invalid_argument,
               sentence("span ", look.range, " (", bad.end - bad.begin, " bytes at ", hex(bad.begin), ") is not ", writable ? "writable" : "readable",
                        " memory of this process, at ", hex(look.hole), ": memory that is moved by spans must be mapped until the transfer has ended"),
               false, true},
              "", cache.geometry.label(), "");
}

void check_mapped(Engine& engine, Cache& cache, bool writable, std::atomic<bool>& known) {
  if (known.load(std::memory_order_acquire)) return;
  if (cache.geometry.layout == Layout::memory) {
    check_spans(engine.memory, cache, writable, false);
  } else if (cache.kind == host_kind && !cache.allocated) {
    const auto bytes = cache.geometry.tensor_extent();
    for (std::size_t i = 0; i < cache.geometry.tensors.size(); ++i) {
      const auto mapped = range_mapped(cache.geometry.tensors[i].address, bytes, writable);
      if (mapped.file_backed) cache.file_backed.store(true);
      if (mapped.may_shrink) cache.may_shrink.store(true);
      if (mapped.ok) continue;
      throw Error({Kind::invalid_argument,
                   "tensor " + std::to_string(i) + " of " + cache.geometry.label() + " is not " +
                       (writable ? "writable" : "readable") + " memory of the process that registered it (at " + hex(mapped.hole) +
                       "): it must register memory that is mapped, and keep it so until it is unregistered",
                   false, true},
                  "", cache.geometry.label(), "");
    }
  }
  known.store(true, std::memory_order_release);
}

}  // namespace

void Engine::look_anew(Cache& memory, bool writable) { check_spans(this->memory, memory, writable, true); }

void Engine::check_readable(Cache& cache) { check_mapped(*this, cache, false, cache.readable); }

void Engine::check_writable(Cache& cache) {
  check_mapped(*this, cache, true, cache.writable);
  const bool of_memory = cache.geometry.layout == Layout::memory;
  if (held_of(cache).load(std::memory_order_relaxed) == 0) return;
  if (of_memory && !cache.file_backed.load()) return;  // what is held is a file's
  throw Error({Kind::busy,
               "the kernel still holds a copy of an earlier operation into " + cache.geometry.label() +
                   ", which waits for the file or device behind it: nothing else is written there before it has come back",
               false, true},
              "", cache.geometry.label(), "");
}

}  // namespace kvferry
