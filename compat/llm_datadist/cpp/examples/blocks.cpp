// Blocks of a paged cache, between a prompt and a decoder:
//
//   blocks prompt 127.0.0.1:26000          (in one terminal)
//   blocks decoder 127.0.0.1:26000         (in another)
//
// The decoder links, pulls blocks 0 to 3 into its blocks 3 to 0, and says so by pushing its block 7. The prompt then pushes its
// blocks 4 and 5 into the decoder's 6 and 5, one layer after the other.
#include "steps.h"

using namespace steps;

static bool RunPrompt(LlmDataDist &datadist, const Cache &cache, const Memory &memory) {
  if (!Found("the decoder has pulled", memory.WaitFor(kTensors - 1, 7, kDecoderCluster, 7))) return false;
  const CacheIndex decoder{kDecoderCluster, 1};
  KvCacheExtParam layer{};
  for (int32_t number : {0, 1}) {
    layer.src_layer_range = layer.dst_layer_range = {number, number};
    if (!Did("push a layer", datadist.PushKvBlocks(cache, decoder, {4, 5}, {6, 5}, layer))) return false;
  }
  WaitForEnd();
  return true;
}

static bool RunDecoder(LlmDataDist &datadist, const Cache &cache, const Memory &memory, const Arguments &arguments) {
  if (!Link(datadist, arguments)) return false;
  const CacheIndex prompt{kPromptCluster, 1};
  if (!Did("pull blocks", datadist.PullKvBlocks(prompt, cache, {0, 1, 2, 3}, {3, 2, 1, 0}))) return false;
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    bool right = memory.Holds(tensor, 4, kDecoderCluster, 4);
    for (int64_t block = 0; block < 4; ++block) right &= memory.Holds(tensor, 3 - block, kPromptCluster, block);
    if (!Found("what was pulled", right)) return false;
  }
  if (!Did("push block 7", datadist.PushKvBlocks(cache, prompt, {7}, {7}))) return false;
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    const bool right = memory.WaitFor(tensor, 6, kPromptCluster, 4) && memory.WaitFor(tensor, 5, kPromptCluster, 5);
    if (!Found("what was pushed", right)) return false;
  }
  return Unlink(datadist, arguments);
}

int main(int argc, char **argv) {
  const Arguments arguments = Parse(argc, argv);
  const uint64_t cluster = arguments.is_prompt ? kPromptCluster : kDecoderCluster;
  Memory memory(cluster);
  LlmDataDist datadist(cluster, arguments.is_prompt ? LlmRole::kPrompt : LlmRole::kDecoder);
  Cache cache;
  const bool well = Start(datadist, arguments) && Register(datadist, memory, cache) &&
                    (arguments.is_prompt ? RunPrompt(datadist, cache, memory) : RunDecoder(datadist, cache, memory, arguments));
  return End(datadist, cache, well);
}
