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

}  // namespace

std::vector<std::int64_t> layer_tensors(const std::vector<std::int64_t>& layers, std::int64_t tensors_per_layer) {
  std::vector<std::int64_t> tensors;
  for (const auto layer : layers)
    for (std::int64_t i = 0; i < tensors_per_layer; ++i) tensors.push_back(layer * tensors_per_layer + i);
  return tensors;
}

UnitGeometry unit_geometry(std::uint64_t num_tensors, const std::vector<std::int64_t>& shape, std::uint64_t element_bytes) {
  if (num_tensors < 1) broken("num_tensors is 0");
  if (shape.empty() || shape.size() > most_dims) broken("shape has ", shape.size(), " dimensions, not 1 to ", most_dims);
  for (const auto dim : shape)
    if (dim <= 0) broken("shape ", shown(shape), " has a dimension that is not positive");
  std::uint64_t unit_bytes = element_bytes, tensor_bytes = 0;
  bool over = false;
  for (std::size_t i = 1; i < shape.size(); ++i) over |= __builtin_mul_overflow(unit_bytes, static_cast<std::uint64_t>(shape[i]), &unit_bytes);
  const auto count = static_cast<std::uint64_t>(shape[0]);
  over |= __builtin_mul_overflow(unit_bytes, count, &tensor_bytes);
  if (over || tensor_bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    broken("a tensor of shape ", shown(shape), " has more than 2^63-1 bytes");
  return {unit_bytes, count};
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
