// Layer ranges, shapes and sizes: what may be given and which tensors it means.
#include <limits>

#include "rules.hpp"
#include "sentence.hpp"

namespace llm_datadist::rules {
namespace {

template <class... Words>
[[noreturn]] void broken(const Words&... words) {
  throw RuleError(said(words...));
}

void check_equal_lengths(const Layers& source, const Layers& destination) {
  if (source.count() == destination.count()) return;
  broken("src_layer_range has ", source.count(), " layers, dst_layer_range has ", destination.count());
}

void check_whole_layers(std::uint32_t num_tensors, std::uint32_t tensors_per_layer) {
  if (num_tensors % tensors_per_layer == 0) return;
  broken(num_tensors, " tensors are not a whole number of layers of ", tensors_per_layer);
}

std::optional<Layers> unless_empty(std::optional<Layers> layers) {
  return layers && layers->count() > 0 ? layers : std::nullopt;
}

std::string shown(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (const auto dim : shape) out += said(out.size() > 1 ? ", " : "", dim);
  return out + "]";
}

std::string type_name(std::int64_t data_type) {  // of those whose elements are no whole bytes
  return data_type == 29 ? "DT_INT4" : said("data type ", data_type);
}

// Nothing for a range that is left out.
std::optional<Layers> given(const char* name, Inclusive range) {
  if (range.first < -1 || range.last < -1 || range.first > range.last)
    broken(name, " is {", range.first, ", ", range.last, "}: both ends are -1 or more, and the first is not behind the second");
  if (range.first < 0) return std::nullopt;
  return Layers{range.first, std::int64_t{range.last} + 1};
}

}  // namespace

void check_addresses(std::size_t given, std::uint64_t num_tensors, bool one_is_0) {
  if (given == 0) broken("addrs is empty");
  if (given != num_tensors) broken(given, " addresses are given for ", num_tensors, " tensors");
  if (one_is_0) broken("addrs contains 0");
}

void check_size(std::int64_t size) {
  if (size != -1 && size <= 0) broken("size must be -1 or over 0, but got ", size);
}

void check_row(std::string_view name, std::uint64_t row, std::uint64_t count) {
  if (row >= count) broken(name, " is ", row, ", the cache has ", count, " rows");
}

void check_tensors_per_layer(std::uint32_t tensors_per_layer) {
  if (tensors_per_layer == 0) broken("tensor_num_per_layer must be over 0");
}

void check_timeout(std::int64_t timeout_ms) {
  if (timeout_ms <= 0) broken("timeout must be over 0 milliseconds, but got ", timeout_ms);
}

void check_paired(std::size_t sources, std::size_t destinations) {
  if (destinations == 0) broken("dst_blocks is empty");
  if (sources != destinations) broken("src_blocks and dst_blocks must have the same length, but have ", sources, " and ", destinations);
}

void check_numbers(std::string_view name, const std::vector<std::uint64_t>& blocks) {
  constexpr std::uint64_t most = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] > most) broken(name, "[", i, "] is ", blocks[i], ": blocks are numbered from 0 to ", most);
}

std::optional<std::uint32_t> element_bits(std::int64_t data_type) {
  switch (data_type) {
    case 29: return 4;  // DT_INT4
    case 2: case 4: case 12: case 34: case 35: case 36: return 8;
    case 1: case 6: case 7: case 27: return 16;
    case 0: case 3: case 8: case 33: return 32;
    case 9: case 10: case 11: case 16: return 64;
    case 13: case 17: return 128;
    default: return std::nullopt;
  }
}

std::vector<std::int64_t> layer_tensors(const std::vector<std::int64_t>& layers, std::int64_t tensors_per_layer) {
  std::vector<std::int64_t> tensors;
  for (const auto layer : layers)
    for (std::int64_t i = 0; i < tensors_per_layer; ++i) tensors.push_back(layer * tensors_per_layer + i);
  return tensors;
}

UnitGeometry unit_geometry(std::uint64_t num_tensors, const std::vector<std::int64_t>& shape, std::int64_t data_type) {
  const auto element = element_bits(data_type);
  if (!element) broken(data_type, " is no data type with a size");
  if (num_tensors < 1) broken("num_tensors is 0");
  if (shape.empty() || shape.size() > most_dims) broken("shape has ", shape.size(), " dimensions, not 1 to ", most_dims);
  for (const auto dim : shape)
    if (dim <= 0) broken("shape ", shown(shape), " has a dimension that is not positive");
  unsigned __int128 bits = *element;
  constexpr auto most = static_cast<unsigned __int128>(std::numeric_limits<std::int64_t>::max());
  for (const auto dim : shape) {
    bits *= static_cast<std::uint64_t>(dim);
    if ((bits + 7) / 8 > most) broken("a tensor of shape ", shown(shape), " has more than 2^63-1 bytes");
  }
  const auto count = static_cast<std::uint64_t>(shape[0]);
  const auto bytes = static_cast<std::uint64_t>((bits + 7) / 8);  // as the vendor counts: rounded up by the tensor
  if (bytes % count != 0)  // only of DT_INT4; what is moved is whole rows and blocks
    broken("a tensor of shape ", shown(shape), " of ", type_name(data_type), " has ", bytes, " bytes, which are not ", count,
           " rows or blocks of whole bytes: give each an even number of elements");
  return {bytes / count, count};
}

PullLayers pull_layers(std::optional<Layers> source, std::optional<Layers> destination, std::uint32_t num_tensors,
                       std::uint32_t tensors_per_layer) {
  source = unless_empty(source);
  destination = unless_empty(destination);
  if (!source && !destination) return {};
  check_whole_layers(num_tensors, tensors_per_layer);
  const std::int64_t layers = num_tensors / tensors_per_layer;
  if (!destination) {
    if (source->count() != layers) broken("src_layer_range has ", source->count(), " layers, the destination cache has ", layers);
    destination = Layers{0, layers};
  }
  if (source) check_equal_lengths(*source, *destination);
  if (destination->stop > layers) broken("dst_layer_range ends at ", destination->stop, ", the destination cache has ", layers, " layers");
  return {source, destination};
}

std::pair<Layers, Layers> push_layers(std::optional<Layers> source, std::optional<Layers> destination, std::uint32_t num_tensors,
                                      std::uint32_t tensors_per_layer) {
  const std::int64_t layers = num_tensors / tensors_per_layer;
  const Layers from = source.value_or(Layers{0, layers}), to = destination.value_or(Layers{0, layers});
  check_equal_lengths(from, to);
  if (from.count() > 0) check_whole_layers(num_tensors, tensors_per_layer);
  if (from.stop > layers) broken("src_layer_range ends at ", from.stop, ", the source cache has ", layers, " layers");
  return {from, to};
}

PullLayers pull_layers(Inclusive source, Inclusive destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer) {
  check_tensors_per_layer(tensors_per_layer);
  const auto from = given("src_layer_range", source), to = given("dst_layer_range", destination);
  if (!from || !to) return {};
  return pull_layers(from, to, num_tensors, tensors_per_layer);
}

std::pair<Layers, Layers> push_layers(Inclusive source, Inclusive destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer) {
  check_tensors_per_layer(tensors_per_layer);
  const auto from = given("src_layer_range", source), to = given("dst_layer_range", destination);
  if (num_tensors == 0) broken("num_tensors of the source cache is 0");
  if (num_tensors < tensors_per_layer) check_whole_layers(num_tensors, tensors_per_layer);
  if (std::int64_t{source.last} - source.first != std::int64_t{destination.last} - destination.first)
    broken("src_layer_range {", source.first, ", ", source.last, "} and dst_layer_range {", destination.first, ", ", destination.last,
           "} are not equally long");
  return push_layers(from, to, num_tensors, tensors_per_layer);
}

std::uint64_t copied_bytes(std::uint64_t offset, std::int64_t size, std::uint64_t source_row_bytes, std::uint64_t destination_row_bytes) {
  const std::pair<const char*, std::uint64_t> sides[] = {{"source", source_row_bytes}, {"destination", destination_row_bytes}};
  for (const auto& [side, row_bytes] : sides)
    if (offset >= row_bytes) broken("offset is ", offset, ", the ", side, "'s rows have ", row_bytes, " bytes");
  const std::uint64_t moved = size < 0 ? source_row_bytes - offset : static_cast<std::uint64_t>(size);
  for (const auto& [side, row_bytes] : sides)
    if (moved > row_bytes - offset) broken(moved, " bytes from offset ", offset, " do not fit in the ", side, "'s rows of ", row_bytes);
  return moved;
}

void check_blocks_of_row(std::uint64_t tensor_bytes, std::uint64_t block_bytes, std::uint64_t listed) {
  if (block_bytes == 0 || block_bytes >= tensor_bytes)
    broken("dst_block_memory_size is ", block_bytes, ", must be over 0 and under the source tensor's ", tensor_bytes, " bytes");
  const auto most = tensor_bytes / block_bytes + (tensor_bytes % block_bytes != 0);
  if (listed > most) broken(listed, " destination blocks are listed, the source tensor fills ", most);
}

}  // namespace llm_datadist::rules
