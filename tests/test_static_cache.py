"""The cache of the kernels stage: everything lies at the same place at each token, and attention reads a bucket of it."""

import pytest
import torch
from helpers import (
    SHAPES,
    assert_same_logits,
    is_one_sentence,
    lively_model,
    logits_through,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from torch import Tensor

from minillm.errors import MinillmError
from minillm.stages import static_cache
from minillm.stages.gqa import decode_attention
from minillm.stages.static_cache import StaticKVCache, bucket

every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.mark.parametrize(("n", "columns"), [(1, 128), (127, 128), (128, 128), (129, 256), (256, 256), (257, 512)])
def test_a_bucket_is_the_next_power_of_two(n: int, columns: int) -> None:
    assert bucket(n) == columns


@every_shape
def test_chunks_of_every_size_equal_the_whole_text(shape: str, small_buckets: None) -> None:
    model, n = lively_model(SHAPES[shape], dtype=torch.float64), 19
    tokens = torch.tensor([random_prompt(n, 97, seed=3)])
    expected = logits_whole(model, tokens)
    for size in range(1, n + 1):
        assert_same_logits(logits_through(model, tokens, StaticKVCache(model, n), size), expected)


def test_rows_in_lockstep_equal_rows_alone(small_buckets: None) -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    rows = [random_prompt(13, 97, seed) for seed in range(3)]
    for size in (1, 5):
        together = logits_through(model, torch.tensor(rows), StaticKVCache(model, 13, batch=3), size)
        for row, logits in zip(rows, together, strict=True):
            assert_same_logits(logits, logits_whole(model, torch.tensor([row]))[0])


def test_a_full_cache_says_so_before_it_writes_and_stays_usable() -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    tokens = torch.tensor([random_prompt(6, 97)])
    cache = StaticKVCache(model, 6)  # whose columns are more, and are none to use
    model(tokens[:, :4], cache)
    with pytest.raises(MinillmError) as error:
        model(torch.ones(1, 3, dtype=torch.int64), cache)
    assert is_one_sentence(str(error.value)) and "holds 4 of 6 tokens and was asked for 3 more" in str(error.value)
    assert cache.length == 4
    assert_same_logits(model(tokens[:, 4:], cache), logits_whole(model, tokens)[:, 4:])


def test_a_step_finds_everything_at_the_same_place(small_buckets: None) -> None:
    model = lively_model(SHAPES["llama"])
    cache = StaticKVCache(model, 40)
    assert len(cache.layers) == 2 and cache.visible.shape == (1, 1, 1, 64)

    def places() -> list[int]:
        tensors = [cache.position, cache.lengths, cache.visible, *(layer.keys for layer in cache.layers)]
        return [tensor.data_ptr() for tensor in tensors]

    model(torch.tensor([[1, 2, 3]]), cache)
    before, shapes = places(), []
    for token in range(30):
        model(torch.tensor([[token]]), cache)
        assert places() == before
        shapes.append(cache.visible.shape[-1])
    assert shapes == [8] * 5 + [16] * 8 + [32] * 16 + [64]


def test_attention_of_a_step_takes_what_changes_from_tensors_alone(small_buckets: None) -> None:
    """As a step that was captured at another token does: what the host knew then is in it."""
    cache = StaticKVCache(lively_model(SHAPES["llama"], dtype=torch.float64), 8)
    q, k, v = (torch.randn(1, heads, 8, 8, dtype=torch.float64) for heads in (6, 2, 2))
    for i in range(8):
        cache.positions(1)
        known, cache.length = cache.length, 1
        new = cache.attend(1, *(x[:, :, i : i + 1] for x in (q, k, v)))
        torch.testing.assert_close(new, decode_attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]))
        cache.length = known


def by_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """What `split_attention` computes, row by row."""
    rows = []
    for b, length in enumerate(lengths.tolist()):
        seen = slice(0 if window is None else max(0, length - window), length)
        rows.append(decode_attention(q[b, None], k[b, None, :, seen], v[b, None, :, seen]))
    return torch.cat(rows)


@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_a_kernel_is_told_how_many_columns_each_sequence_sees(
    shape: str, small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_cache, "split_attention", by_lengths)
    model = lively_model(SHAPES[shape], dtype=torch.float64)
    tokens = torch.tensor([random_prompt(19, 97, seed) for seed in range(2)])
    cache = StaticKVCache(model, 19, batch=2)
    assert not cache.has_kernel  # on a CPU
    cache.has_kernel = True
    assert_same_logits(logits_through(model, tokens, cache, 1), logits_whole(model, tokens))
