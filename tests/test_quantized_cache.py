"""The int8 KV cache: attention over what it stores, its bytes, and KIVI's experiment."""

import pytest
import torch
from helpers import SHAPES, Columns, assert_same_logits, is_one_sentence, lively_model, logits_through, random_prompt
from helpers import one_thread as one_thread
from torch import Tensor

from minillm.errors import MinillmError, UsageError
from minillm.evaluation import compare, prose
from minillm.model import Transformer
from minillm.roofline.counting import count
from minillm.sampling import greedy
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.quantization import quantize
from minillm.stages.quantized_cache import QuantizedKVCache, RoundedKVCache, relative_error, round_along

every_shape = pytest.mark.parametrize("shape", SHAPES)


def rounded(x: Tensor) -> Tensor:
    """Each head of each token (..., D) to its nearest of 255 values, with a scale in bf16; written from the definition."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).bfloat16().double()
    return torch.round(x.double() / scale) * scale


class RoundingCache(GroupedKVCache):
    """Stores in full precision what the int8 cache stands for."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().store(layer, rounded(k).to(k.dtype), rounded(v).to(v.dtype))


@every_shape
@pytest.mark.parametrize("size", [1, 4, 30], ids=["token by token", "chunks", "whole"])
def test_attention_is_that_over_the_rounded_keys_and_values(shape: str, size: int) -> None:
    # In float64 both caches hold the same numbers: a lost scale, a wrong slot or head would show.
    model, tokens = lively_model(SHAPES[shape], dtype=torch.float64), torch.tensor([random_prompt(30, 97)])
    actual = logits_through(model, tokens, QuantizedKVCache(model, 30), size)
    assert_same_logits(actual, logits_through(model, tokens, RoundingCache(model, 30), size))


@every_shape
def test_rounding_costs_little_and_not_nothing(shape: str) -> None:
    model, tokens = lively_model(SHAPES[shape]), torch.tensor([random_prompt(30, 97)])
    exact = logits_through(model, tokens, GroupedKVCache(model, 30), 30)
    actual = logits_through(model, tokens, QuantizedKVCache(model, 30), 30)
    assert 1e-4 < (actual - exact).abs().max() / exact.abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_batch_decodes_through_it_with_any_weights(dtype: torch.dtype, weights: str | None) -> None:
    model = lively_model(SHAPES["qwen2"], dtype=dtype)
    model = model if weights is None else quantize(model, weights)
    tokens = torch.tensor([random_prompt(7, 97, seed) for seed in range(3)])
    texts = []
    for make in (QuantizedKVCache, RoundingCache):  # s q fits into float32, and from there both round it to bf16
        recorder = Columns()
        with torch.inference_mode():
            prefill_and_decode(model, make(model, 16, batch=3), tokens, 10, greedy, recorder)  # type: ignore[arg-type]
        texts.append(recorder.rows)
    assert texts[0] == texts[1]
    assert [len(row) for row in texts[0]] == [10] * 3


def test_rows_of_a_batch_equal_rows_alone() -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    rows = [random_prompt(13, 97, seed) for seed in range(3)]
    together = logits_through(model, torch.tensor(rows), QuantizedKVCache(model, 13, batch=3), size=5)
    for row, logits in zip(rows, together, strict=True):
        alone = logits_through(model, torch.tensor([row]), QuantizedKVCache(model, 13), size=13)
        assert_same_logits(logits, alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_d_and_2_bytes_for_each_key_and_value(dtype: torch.dtype) -> None:
    model = lively_model(SHAPES["llama"], dtype=dtype)
    L, Hkv, D = 2, 2, 8
    cache = QuantizedKVCache(model, 50, batch=3)
    assert cache.nbytes == 2 * L * Hkv * (D + 2) * 50 * 3
    assert cache.keys.numel() == cache.values.numel() == 0  # nothing is kept twice


def test_a_step_reads_the_codes_and_moves_more_bytes_than_a_plain_cache() -> None:
    model = lively_model(SHAPES["llama"])
    L, Hkv, D, S = 2, 2, 8, 40
    costs = {}
    for make in (GroupedKVCache, QuantizedKVCache):
        cache = make(model, S)
        cache.length = S - 1
        costs[make] = count(lambda cache=cache: model(torch.zeros(1, 1, dtype=torch.int64), cache))
    plain, quantized = costs[GroupedKVCache], costs[QuantizedKVCache]
    saved = 2 * L * Hkv * S * (4 * D - (D + 2))  # of the part that no kernel could avoid
    assert plain.ideal_bytes - quantized.ideal_bytes == saved
    assert quantized.bytes > plain.bytes


def test_it_costs_the_same_on_meta() -> None:
    costs = []
    for device in ("cpu", "meta"):
        model = lively_model(SHAPES["llama"]).to(device)
        tokens = torch.zeros(1, 9, dtype=torch.int64, device=device)
        costs.append(count(lambda model=model, tokens=tokens: model(tokens, QuantizedKVCache(model, 9))))
    assert costs[0] == costs[1]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    model = lively_model(SHAPES["llama"])
    cache = QuantizedKVCache(model, 5)
    first = logits_through(model, torch.tensor([[1, 2, 3]]), cache, 3)
    with pytest.raises(MinillmError, match="full") as caught:
        cache.positions(3)
    assert is_one_sentence(str(caught.value))
    fresh = QuantizedKVCache(model, 5)
    assert torch.equal(logits_through(model, torch.tensor([[1, 2, 3]]), fresh, 3), first)
    rest = torch.tensor([[4, 5]])
    assert torch.equal(logits_through(model, rest, cache, 2), logits_through(model, rest, fresh, 2))


# --- KIVI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_rounding_moves_no_number_by_more_than_half_a_step(bits: int, axis: str) -> None:
    x = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(bits)) + 3
    dim = {"token": -1, "channel": -2}[axis]
    step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / (2**bits - 1)
    y = round_along(x, bits, axis)
    assert ((x - y).abs() <= step / 2 * (1 + 1e-5) + 1e-6).all()
    levels = y.movedim(dim, 0).flatten(1)  # (numbers that share a scale, all others)
    assert all(len(set(column.tolist())) <= 2**bits for column in levels.unbind(1))


def test_channels_that_are_large_in_every_token_want_scales_of_their_own() -> None:
    x = torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(0))
    x[..., 3] += 50
    assert relative_error(x, 4, "channel") < 0.2 * relative_error(x, 4, "token")
    assert relative_error(x.mT, 4, "token") < 0.2 * relative_error(x.mT, 4, "channel")
    assert relative_error(torch.ones(1, 1, 4, 4), 2, "token") == 0  # constants are kept


def test_relative_error_is_a_share_of_the_numbers_themselves() -> None:
    row = torch.tensor([[0.0, 1.0, 3.0]])  # to one bit: 0, 0, 3, which is wrong by 1 of sqrt(10)
    assert relative_error(row, 1, "token") == pytest.approx(10**-0.5)
    assert relative_error(row.T, 1, "channel") == pytest.approx(10**-0.5)
    assert relative_error(100 * row, 1, "token") == pytest.approx(10**-0.5)
    assert relative_error(row, 1, "channel") == 0  # one number a channel


@pytest.mark.parametrize(("keys", "values"), [("channel", None), (None, "token"), ("token", "channel")])
@pytest.mark.parametrize("bits", [1, 3])
def test_attention_sees_what_was_asked_rounded_and_the_rest_as_it_is(
    bits: int, keys: str | None, values: str | None
) -> None:
    class Rounding(GroupedKVCache):
        def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k, v = super().store(layer, k, v)
            return round_along(k, bits, keys) if keys else k, round_along(v, bits, values) if values else v

    model, tokens = lively_model(SHAPES["llama"], dtype=torch.float64), torch.tensor([random_prompt(20, 97)])
    expected = logits_through(model, tokens, Rounding(model, 20), 20)
    actual = logits_through(model, tokens, RoundedKVCache(model, 20, bits=bits, keys=keys, values=values), 20)
    assert_same_logits(actual, expected)


def test_keys_of_smollm2_want_a_scale_a_channel(smollm2: tuple[Transformer, object]) -> None:
    model, tokenizer = smollm2
    tokens = tokenizer.encode(prose())[:100]  # type: ignore[attr-defined]

    def kl(**axes: str) -> float:
        return compare(model, model, tokens, cache=lambda m, n: RoundedKVCache(m, n, bits=3, **axes)).kl

    assert kl(keys="channel") < 0.5 * kl(keys="token")


def test_no_axis_is_no_rounding() -> None:
    model, tokens = lively_model(SHAPES["llama"]), random_prompt(20, 97)
    assert compare(model, model, tokens, cache=lambda m, n: RoundedKVCache(m, n, bits=2)).kl == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"keys": "head"}, "axis 'head'"), ({"values": "tokens"}, "axis 'tokens'"), ({"bits": 0}, "bits is 0")],
)
def test_an_impossible_experiment_is_refused(wrong: dict[str, object], words: str) -> None:
    model = lively_model(SHAPES["llama"])
    with pytest.raises(UsageError, match=words) as caught:
        RoundedKVCache(model, 4, **({"bits": 2} | wrong))  # type: ignore[arg-type]
    assert is_one_sentence(str(caught.value))
