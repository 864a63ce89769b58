"""The demo's KV cache: attention works in the tensors that it was given, and computes what it would elsewhere."""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.deadline(120)]

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM = 4, 12, 16, 2, 32


def storage() -> list:
    import torch

    shape = (BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
    return [torch.full(shape, float("nan")) for _ in range(2 * LAYERS)]


def new_tokens(count: int):
    import torch

    return torch.arange(HEADS * count * HEAD_DIM, dtype=torch.float32).view(1, HEADS, count, HEAD_DIM)


def test_what_attention_reads_is_the_storage_itself() -> None:
    from demo.paged import PagedCache

    tensors = storage()
    cache = PagedCache(tensors, blocks=range(3, 7))
    keys, values = cache.update(new_tokens(20), -new_tokens(20), 1)
    for seen, tensor in ((keys, tensors[2]), (values, tensors[3])):
        assert seen.shape == (1, HEADS, 20, HEAD_DIM)
        assert seen.data_ptr() == tensor[3].data_ptr()
        assert seen.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    tensors[2][3, 5] = 7.0
    assert (keys[0, :, 5] == 7.0).all()


def test_new_tokens_lie_in_their_blocks_and_nowhere_else() -> None:
    from demo.paged import PagedCache

    tensors = storage()
    PagedCache(tensors, blocks=range(3, 7)).update(new_tokens(20), -new_tokens(20), 0)
    expected = new_tokens(20)[0].transpose(0, 1)
    assert tensors[0][3].equal(expected[:16])
    assert tensors[0][4, :4].equal(expected[16:])
    assert tensors[1][3].equal(-expected[:16])
    assert int(tensors[0].isnan().sum()) == tensors[0].numel() - expected.numel()
    assert all(bool(tensor.isnan().all()) for tensor in tensors[2:])


def test_a_layer_is_announced_once_its_keys_and_values_are_in_place() -> None:
    from demo.paged import PagedCache

    tensors = storage()
    seen = []

    def written(layer: int) -> None:
        seen.append((layer, *(not bool(tensors[2 * layer + i][0].isnan().any()) for i in (0, 1))))

    cache = PagedCache(tensors, blocks=[0], layer_written=written)
    for layer in range(LAYERS):
        cache.update(new_tokens(16), new_tokens(16), layer)
    assert seen == [(layer, True, True) for layer in range(LAYERS)]


@pytest.mark.parametrize("blocks", [[3, 5], [4, 3], [11, 12], [-1, 0], [2, 2]])
def test_blocks_that_no_view_can_show_are_refused(blocks: list[int]) -> None:
    from demo.paged import PagedCache

    with pytest.raises(ValueError, match="neighbouring blocks out of 12"):
        PagedCache(storage(), blocks)


def test_more_tokens_than_the_blocks_hold_are_refused_before_any_is_written() -> None:
    from demo.paged import PagedCache

    tensors = storage()
    cache = PagedCache(tensors, blocks=[2])
    with pytest.raises(ValueError, match="17 tokens do not fit the 16"):
        cache.update(new_tokens(17), new_tokens(17), 0)
    assert bool(tensors[0].isnan().all())


def test_decoding_from_moved_blocks_gives_the_very_tokens_of_transformers_own_cache() -> None:
    from demo import model
    from demo.paged import PagedCache

    tiny = model.load(model.TINY)
    assert model.kv_shape(tiny) == (shape := model.KvShape(LAYERS, HEADS, HEAD_DIM))
    assert shape.tensors == 2 * LAYERS
    ids = model.prompt_ids(tiny, None, room_for=8)[:100]
    here, there = storage(), storage()
    model.forward(tiny, ids[:-1], PagedCache(here, blocks=range(1, 8)))
    for mine, theirs in zip(here, there, strict=True):
        theirs[4:11] = mine[1:8]
    cache = PagedCache(there, blocks=range(4, 12), filled=len(ids) - 1)
    assert model.decode(tiny, ids[-1], cache, 8) == model.undivided(tiny, ids, 8)
    assert cache.get_seq_length() == len(ids) - 1 + 8


def test_a_prompt_leaves_room_for_what_is_decoded() -> None:
    from demo import model

    tiny = model.load(model.TINY)
    context = tiny.config.max_position_embeddings
    assert len(model.prompt_ids(tiny, None, room_for=context - 100)) == 100
    with pytest.raises(model.UnfitModelError, match="no room"):
        model.prompt_ids(tiny, None, room_for=context)


def test_a_model_with_other_than_full_attention_is_refused_by_name() -> None:
    from demo import model
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sliding = MistralForCausalLM(MistralConfig(vocab_size=16, num_hidden_layers=1, sliding_window=8, **sizes))
    with pytest.raises(model.UnfitModelError, match="full attention only"):
        model.kv_shape(sliding)
