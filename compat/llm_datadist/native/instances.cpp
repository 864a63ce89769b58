// One instance: its program's name, its pools, its listener, and what ids of other instances' caches stand for.
#include <algorithm>
#include <charconv>

#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {
namespace {

constexpr std::uint32_t least_page_shift = 12;  // kvferry has no smaller pages

std::uint64_t pool_bytes(const EngineOptions& options) {
  std::uint64_t sum = 0;
  for (const auto& pool : {options.device_pool, options.host_pool})
    if (pool) sum += pool->size_bytes;  // each is below 2^63
  return sum;
}

// "MemTotal:       24576 kB" in bytes.
std::optional<std::uint64_t> line_of(std::string_view meminfo, std::string_view name) {
  while (!meminfo.empty()) {
    const auto line = meminfo.substr(0, meminfo.find('\n'));
    meminfo.remove_prefix(std::min(line.size() + 1, meminfo.size()));
    if (!line.starts_with(name) || line.size() <= name.size() || line[name.size()] != ':') continue;
    const auto digits = line.find_first_of("0123456789", name.size());
    std::uint64_t kilobytes = 0;
    if (digits == line.npos || std::from_chars(line.data() + digits, line.data() + line.size(), kilobytes).ec != std::errc{}) return std::nullopt;
    return kilobytes * 1024;
  }
  return std::nullopt;
}

}  // namespace

std::string program_of(bool remote) { return said(program_name, ", caches by ", remote ? "id" : "key"); }

std::optional<Pool> pool_of(const EngineOptions& options) {
  if (!options.device_pool && !options.host_pool) return std::nullopt;
  Pool out{pool_bytes(options), UINT32_MAX};
  for (const auto& pool : {options.device_pool, options.host_pool})
    if (pool) out.page_shift = std::min(out.page_shift, pool->page_shift);
  out.page_shift = std::max(out.page_shift, least_page_shift);
  return out;
}

std::optional<std::string> pools_too_large(const EngineOptions& options, std::string_view meminfo) {
  const auto memory = line_of(meminfo, "MemTotal"), swap = line_of(meminfo, "SwapTotal");
  const auto wanted = pool_bytes(options);
  if (!memory || !swap || wanted <= *memory + *swap) return std::nullopt;
  return said("the pools are to have ", wanted, " bytes, and this machine has ", *memory + *swap, ", swap space included");
}

std::uint64_t Share::wanted(std::uint64_t tensors, std::uint64_t tensor_bytes) const {
  std::uint64_t left = size_bytes_;
  for (const auto& [cache, bytes] : taken_) left -= bytes;
  const auto pages = tensor_bytes / page_bytes_ + (tensor_bytes % page_bytes_ != 0);
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(pages, page_bytes_, &bytes) || __builtin_mul_overflow(bytes, tensors, &bytes) || bytes > left)
    throw TooLittleLeft(said("the pool has ", left, " of ", size_bytes_, " bytes left, ", tensors, " tensors of ", tensor_bytes, " are wanted"));
  return bytes;
}

ListenerMove listener_move(bool has_links, bool hixl, const std::optional<ListenAt>& before, const std::optional<ListenAt>& wanted) {
  if (has_links && !hixl) return ListenerMove::refused_linked;
  if (before && wanted && before->second == wanted->second) return ListenerMove::stays;
  return hixl ? ListenerMove::refused_hixl : ListenerMove::moves;
}

IdMeans meaning_of_id(std::int64_t cache_id, bool remote, bool pushing) {
  if (cache_id > 0) return IdMeans::cache;
  if (pushing) return IdMeans::request_0;
  return remote ? IdMeans::blocks_of_model_0 : IdMeans::cache;
}

}  // namespace llm_datadist::rules
