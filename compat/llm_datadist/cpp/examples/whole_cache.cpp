// Whole rows of a cache, between a prompt and a decoder:
//
//   whole_cache prompt 127.0.0.1:26000          (in one terminal)
//   whole_cache decoder 127.0.0.1:26000         (in another)
//
// The decoder links, pulls row 0 into its row 1, and says so by pushing its row 7. The prompt then pushes row 3 into the
// decoder's row 2, one layer after the other.
#include "steps.h"

using namespace steps;

static bool RunPrompt(LlmDataDist &datadist, const Cache &cache, const Memory &memory) {
  if (!Found("the decoder has pulled", memory.WaitFor(kTensors - 1, 7, kDecoderCluster, 7))) return false;
  const CacheIndex decoder_row{kDecoderCluster, 1, 2};
  KvCacheExtParam layer{};
  for (int32_t number : {0, 1}) {
    layer.src_layer_range = layer.dst_layer_range = {number, number};
    if (!Did("push a layer", datadist.PushKvCache(cache, decoder_row, 3, -1, layer))) return false;
  }
  WaitForEnd();
  return true;
}

static bool RunDecoder(LlmDataDist &datadist, const Cache &cache, const Memory &memory, const Arguments &arguments) {
  if (!Link(datadist, arguments)) return false;
  const CacheIndex prompt_row{kPromptCluster, 1};
  if (!Did("pull row 0 into row 1", datadist.PullKvCache(prompt_row, cache, 1))) return false;
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    const bool right = memory.Holds(tensor, 1, kPromptCluster, 0) && memory.Holds(tensor, 0, kDecoderCluster, 0);
    if (!Found("what was pulled", right)) return false;
  }
  if (!Did("push row 7", datadist.PushKvCache(cache, {kPromptCluster, 1, 7}, 7))) return false;
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    if (!Found("what was pushed", memory.WaitFor(tensor, 2, kPromptCluster, 3))) return false;
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
