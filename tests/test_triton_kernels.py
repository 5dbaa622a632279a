"""Triton kernels: values against float64 in Triton's interpreter, cost against closed forms, machine code for GPUs not at hand.

Triton decides when it defines a kernel whether to interpret it, so the interpreter has a process of its own; this one compiles.
With TRITON_INTERPRET=1 this one interprets, as mutation testing wants it, and what is compiled is left out.
"""

import copy
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import PLAIN_STAGES, assert_same_logits, is_one_sentence, lively_model, logits_whole, random_prompt
from helpers import one_thread as one_thread
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.roofline.counting import Cost, count
from minillm.roofline.position import count_run, meta_twin
from minillm.stages import triton_kernels
from minillm.stages.gqa import decode_attention
from minillm.stages.quantization import quantize
from minillm.stages.quantized_linear import FastInt4Linear, Int4Linear, Int8Linear, W8A8Linear
from minillm.stages.quantizers import absmax_int8, dequantize_int4, dequantize_int8, group_int4, pack_nibbles
from minillm.stages.triton_kernels import (
    TritonInt4Linear,
    TritonInt8Linear,
    check_kernels,
    int4_linear,
    int8_linear,
    split_attention,
    split_size,
    triton_is_here,
    with_triton_kernels,
)

pytestmark = pytest.mark.skipif(not triton_is_here(), reason="triton is not installed")
on_gpu = pytest.mark.gpu
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"  # this process, too
U32 = 2.0**-24  # unit roundoff
UNITS = {torch.float32: U32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])

Run = Callable[..., Any]  # of a function and its arguments, somewhere
CONFIG = ModelConfig("kernels", 2, 64, 6, 2, 16, 96, 97, 192, tied_embeddings=True)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def release(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Run]:
    """Calls a function where Triton interprets its kernels, in another process, unless it does in this one.

    Of the functions of this file: the other process imports it.
    """
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 does not work with NumPy 2.4")  # for loops whose bounds are loaded
    if INTERPRETS:
        yield lambda fn, *args: fn(*args)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_interpret) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result(timeout=600)


def op(name: str, *args: Any) -> Tensor:
    """An operator of ours by its name, which goes to another process where the operator itself does not."""
    return getattr(torch.ops.minillm, name)(*args)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Attention --------------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """Arguments of `split_attention`, k and v in layouts of their own. What may not be seen or lies around them is NaN."""

    q: Tensor  # (B, Hq, 1, D)
    k: Tensor  # (B, Hkv, S, D)
    v: Tensor
    lengths: Tensor  # (B,)
    window: int | None = None


def attention_case(
    lengths: list[int], S: int, Hkv: int, G: int, D: int, dtype: torch.dtype, window: int | None = None
) -> Attention:
    B = len(lengths)
    q = noise(B, 1, Hkv * G, D).to(dtype).transpose(1, 2)  # as the model has it: (B, 1, Hq, D), seen as (B, Hq, 1, D)
    k = torch.full((B + 1, Hkv + 1, S + 3, D + 8), torch.nan).to(dtype)[1:, :Hkv, 2 : S + 2, :D]
    v = torch.full((B + 1, S + 3, Hkv + 1, D + 16), torch.nan).to(dtype)[1:, 2 : S + 2, :Hkv, :D].transpose(1, 2)
    for b, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        k[b, :, first:length] = noise(Hkv, min(length, S) - first, D, seed=1 + b)
        v[b, :, first:length] = noise(Hkv, min(length, S) - first, D, seed=101 + b)
    return Attention(q, k, v, torch.tensor(lengths), window)


def check_attention(case: Attention, actual: Tensor) -> None:
    """Against float64 on the same numbers, row by row over what the row sees, within what rounding can do.

    A score is off by at most (D + 2) u of sum |q k| / sqrt(D); its weight by that and a few u for exp and the shrinking,
    relative to itself; the sum over n columns by n u more. An error of e in every weight moves the mean of values by
    2 e max |v|. In 16 bits a weight is rounded once more on its way into the product with the values, and so is the result.
    """
    q, k, v, lengths, window = case
    unit = UNITS[q.dtype]
    low = unit if q.dtype is not torch.float32 else 0.0
    assert actual.dtype is q.dtype and actual.shape == q.shape
    for b, length in enumerate(lengths.clamp(max=k.shape[2]).tolist()):
        seen = slice(0 if window is None else max(0, length - window), length)
        query, keys, values = q[b, None].double(), k[b, None, :, seen].double(), v[b, None, :, seen].double()
        expected = decode_attention(query, keys, values)[0]
        D, n = q.shape[3], keys.shape[2]
        groups = query.abs().view(-1, q.shape[1] // k.shape[1], D)
        score = ((D + 2) * U32 * (groups @ keys.abs()[0].mT).max() / D**0.5).item()
        bound = (2 * (score + 8 * U32) + n * U32 + low) * values.abs().max().item()
        torch.testing.assert_close(actual[b].double(), expected, rtol=unit, atol=bound)


ATTENTIONS = {
    "one token": ([1], 1, 1, 1, 64),
    "as SmolLM2": ([130], 130, 3, 3, 64),
    "seven to a group": ([77, 1, 64], 77, 2, 7, 128),
    "a head of 80": ([65, 128, 63], 128, 1, 2, 80),
    "a head of 96, and of 16 queries": ([5, 90], 100, 2, 8, 96),
    "splits that nobody sees": ([3, 200, 129], 300, 1, 3, 16),
}
every_attention = pytest.mark.parametrize("shape", ATTENTIONS.values(), ids=ATTENTIONS)


@both_dtypes
@every_attention
def test_split_attention_equals_plain_attention(interpreter: Run, shape: Any, dtype: torch.dtype) -> None:
    case = attention_case(*shape, dtype)
    check_attention(case, interpreter(op, "split_attention", *case))


@pytest.mark.parametrize("window", [1, 2, 64, 70, 500])
def test_a_window_counts_the_new_token_itself(interpreter: Run, window: int) -> None:
    case = attention_case([1, 64, 130, 150], 150, 2, 3, 32, torch.float32, window)
    check_attention(case, interpreter(op, "split_attention", *case))


def test_lengths_may_be_int32(interpreter: Run) -> None:
    case = attention_case([9, 70], 80, 2, 3, 32, torch.float32)
    check_attention(case, interpreter(op, "split_attention", *case._replace(lengths=case.lengths.int())))


def test_scores_far_apart_neither_overflow_nor_vanish(interpreter: Run) -> None:
    # Scores of up to some hundreds, the highest in another split for each head: exp of a difference is all that is taken.
    case = attention_case([200], 200, 1, 4, 32, torch.float32)
    case.q.mul_(60)
    check_attention(case, interpreter(op, "split_attention", *case))


def test_a_row_without_columns_gets_zeros_and_a_stale_length_sees_all_columns(interpreter: Run) -> None:
    case = attention_case([0, 70, 90, 5], 90, 2, 3, 32, torch.float32)
    lengths = torch.tensor([0, 70, 5000, 5])
    out = interpreter(op, "split_attention", *case._replace(lengths=lengths))
    assert torch.equal(out[0], torch.zeros(6, 1, 32))
    check_attention(Attention(*(x[1:] for x in case[:4])), out[1:])


def test_splits_fill_a_gpu_and_are_chosen_from_shapes_alone() -> None:
    for B, Hkv, S in ((1, 8, 512), (1, 8, 32768), (1, 1, 131072), (64, 8, 4096), (3, 5, 777), (1, 1, 1)):
        size = split_size(B, Hkv, S)
        n = -(-S // size)
        assert size % triton_kernels.SPLIT == 0 and n <= triton_kernels.MOST_SPLITS
        # No more programs than one a block and about `PROGRAMS`, and no fewer than half of what could be had.
        possible = min(
            -(-S // triton_kernels.SPLIT), triton_kernels.MOST_SPLITS, -(-triton_kernels.PROGRAMS // (B * Hkv))
        )
        assert possible / 2 < n <= possible


@pytest.mark.parametrize(
    ("B", "Hkv", "S", "columns"),
    [
        (1, 1, 1, 64),
        (1, 1, 128 * 64, 64),  # 128 splits at most
        (1, 1, 128 * 64 + 1, 2 * 64),
        (2, 3, 86 * 64, 64),  # 86 splits make 516 programs, and 85 not 512
        (2, 3, 86 * 64 + 1, 2 * 64),
        (73, 7, 4096, 2048),  # 511 programs are one fewer than wanted
        (64, 8, 4096, 4096),  # 512 are enough
    ],
)
def test_columns_of_a_split(B: int, Hkv: int, S: int, columns: int) -> None:
    assert split_size(B, Hkv, S) == columns
    assert isinstance(split_size(B, Hkv, S), int)


def test_a_split_is_chosen_for_the_keys_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.stages import triton_attention

    sizes = []
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    monkeypatch.setattr(triton_attention, "run", lambda q, *rest: sizes.append(rest[-1]) or q.clone())
    keys = torch.zeros(2, 3, 86 * 64 + 1, 16)
    split_attention(torch.zeros(2, 6, 1, 16), keys, keys, torch.ones(2, dtype=torch.int64))
    assert sizes == [2 * 64]


# --- Linear layers ----------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    x: Tensor  # (M, K)
    weight: Tensor  # (N, K) that the codes stand for, in float64
    parts: Tensor  # (N, K) of how large the numbers are that add up to it
    arguments: tuple[Tensor, ...]  # codes, scales and, of int4, zeros


def int8_case(M: int, N: int, K: int, dtype: torch.dtype) -> Product:
    codes, scales = absmax_int8(noise(N, K))
    weight = dequantize_int8(codes, scales).double()
    return Product(noise(M, K, seed=1).to(dtype), weight, weight.abs(), (codes, scales))


def int4_case(M: int, N: int, K: int, dtype: torch.dtype, group_size: int) -> Product:
    codes, scales, zeros = group_int4(noise(N, K) + 0.5, group_size)
    s, z = (part.double().repeat_interleave(group_size, dim=1) for part in (scales, zeros))
    weight = dequantize_int4(codes, scales, zeros).double()
    return Product(
        noise(M, K, seed=1).to(dtype), weight, s * codes + (z - 8 * s).abs(), (pack_nibbles(codes), scales, zeros)
    )


def check_product(case: Product, actual: Tensor) -> None:
    """Against float64: K additions in float32 and a few roundings of each product; the result, and with several rows the
    weight too, are rounded to the dtype of the activations."""
    x, unit = case.x, UNITS[case.x.dtype]
    assert actual.dtype is x.dtype and actual.shape == (len(x), len(case.weight))
    bound = (x.shape[1] + 8) * U32 * (x.double().abs() @ case.parts.T)
    if len(x) > 1:
        bound += unit * (x.double().abs() @ case.weight.abs().T)
    expected = x.double() @ case.weight.T
    assert ((actual.double() - expected).abs() <= bound + unit * expected.abs()).all()


@both_dtypes
@pytest.mark.parametrize("M", [1, 5, 16])
@pytest.mark.parametrize("N, K", [(1, 32), (33, 1100)])
def test_int8_linear_equals_the_product_with_the_weight(
    interpreter: Run, M: int, N: int, K: int, dtype: torch.dtype
) -> None:
    case = int8_case(M, N, K, dtype)
    check_product(case, interpreter(op, "int8_linear", case.x, *case.arguments))


@both_dtypes
@pytest.mark.parametrize("M", [1, 3, 16])
@pytest.mark.parametrize("N, K, group_size", [(1, 32, 32), (33, 1152, 64), (9, 384, 128)])
def test_int4_linear_equals_the_product_with_the_weight(
    interpreter: Run, M: int, N: int, K: int, group_size: int, dtype: torch.dtype
) -> None:
    case = int4_case(M, N, K, dtype, group_size)
    check_product(case, interpreter(op, "int4_linear", case.x, *case.arguments))


def test_tensors_that_are_not_contiguous_give_the_same(interpreter: Run) -> None:
    for name, case in (
        ("int8_linear", int8_case(3, 20, 64, torch.float32)),
        ("int4_linear", int4_case(3, 20, 64, torch.float32, 32)),
    ):
        arguments = [tensor.T.contiguous().T for tensor in (case.x, *case.arguments)]
        check_product(case, interpreter(op, name, *arguments))


# --- Memory -----------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """How often a kernel touched each element of one of its tensors."""

    loads: Tensor
    stores: Tensor


class Watch:
    """Counts what one launch loads and stores, and raises IndexError for what lies in none of its tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        offsets = [
            torch.arange(x.untyped_storage().nbytes() // x.itemsize).as_strided(x.shape, x.stride(), x.storage_offset())
            for x in tensors.values()
        ]
        places = [
            (x.untyped_storage().data_ptr() + x.itemsize * offset).flatten()
            for x, offset in zip(tensors.values(), offsets, strict=True)
        ]
        self.places, self.order = torch.cat(places).sort()
        self.counts = {kind: torch.zeros(len(self.places), dtype=torch.int64) for kind in ("load", "store")}

    def note(self, kind: str, pointers: Any, mask: Any) -> None:
        addresses = torch.from_numpy(pointers.data[mask.data].astype("int64"))
        found = torch.searchsorted(self.places, addresses).clamp(max=len(self.places) - 1)
        if not torch.equal(self.places[found], addresses):
            raise IndexError(f"A kernel would {kind} what it was not given.")
        self.counts[kind].index_add_(0, self.order[found], torch.ones_like(addresses))

    def traffic(self) -> dict[str, Traffic]:
        sizes = [x.numel() for x in self.tensors.values()]
        loads, stores = (self.counts[kind].split(sizes) for kind in ("load", "store"))
        return {
            name: Traffic(loads[i].view(x.shape), stores[i].view(x.shape))
            for i, (name, x) in enumerate(self.tensors.items())
        }


def watched(name: str, arguments: tuple[Any, ...]) -> tuple[Tensor, list[dict[str, Traffic]]]:
    """The result of an operator, and the traffic of each kernel that it launched, by the names of the kernel's arguments."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    watches: list[Watch] = []
    launch, load, store = (
        GridExecutor.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store,
    )  # fmt: skip

    def watched_launch(executor: Any, *given: Any, **options: Any) -> None:
        named = zip(executor.arg_names, given, strict=False)
        watches.append(Watch({name: x for name, x in named if isinstance(x, Tensor)}))
        launch(executor, *given, **options)

    def watched_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watches[-1].note("load", pointers, mask)
        return load(builder, pointers, mask, *rest)

    def watched_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watches[-1].note("store", pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", watched_launch)
        patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
        result = op(name, *arguments)
    return result, [watch.traffic() for watch in watches]


@pytest.mark.parametrize(
    ("name", "M", "K"), [("int8", 1, 1025), ("int8", 5, 65), ("int4", 1, 33 * 32), ("int4", 5, 3 * 32)]
)
def test_a_product_loads_each_code_once_and_touches_nothing_that_is_not_its_own(
    interpreter: Run, name: str, M: int, K: int
) -> None:
    N = 33
    case = int8_case(M, N, K, torch.float32) if name == "int8" else int4_case(M, N, K, torch.float32, 32)
    result, (traffic,) = interpreter(watched, f"{name}_linear", (case.x, *case.arguments))
    check_product(case, result)
    for argument, (loads, stores) in traffic.items():
        assert (stores == (argument == "out")).all(), argument
        if argument == "x":
            assert (loads == loads[0, 0]).all()  # once for each program
        else:
            assert (loads == (argument != "out")).all(), argument


@pytest.mark.parametrize("window", [None, 70])
def test_attention_loads_each_key_and_value_it_sees_once_and_touches_nothing_else(
    interpreter: Run, window: int | None
) -> None:
    lengths, S, Hkv, G, D = [3, 130, 129], 150, 2, 3, 20
    case = attention_case(lengths, S, Hkv, G, D, torch.float32, window)
    result, (split, combine) = interpreter(watched, "split_attention", tuple(case))
    check_attention(case, result)
    seen = ~case.k[:, :, :, :1].isnan()  # as the case has it
    for name in ("k", "v"):
        assert (split[name].loads == seen).all() and not split[name].stores.any()
    for name in ("tops", "totals", "mixes"):
        assert (split[name].stores == 1).all() and not split[name].loads.any()
        assert (combine[name].loads == 1).all() and not combine[name].stores.any()
    assert (split["q"].loads == 3).all() and (split["lengths"].loads == 3 * Hkv).all()  # once for each split
    assert (combine["out"].stores == 1).all() and not combine["out"].loads.any()


# --- Operators of PyTorch ---------------------------------------------------------------------------------------------


def checked_as_an_operator(name: str, arguments: tuple[Any, ...]) -> dict[str, str]:
    """What PyTorch's own check of custom operators says: the schema, the fake result beside the real one, tracing."""
    return torch.library.opcheck(getattr(torch.ops.minillm, name).default, arguments)


def test_pytorch_accepts_the_operators(interpreter: Run) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        "split_attention": attention_case([3, 70], 90, 2, 3, 16, torch.float32),
        "int8_linear": (noise(2, 64), *int8_case(2, 20, 64, torch.float32).arguments),
        "int4_linear": (noise(2, 64), *int4_case(2, 20, 64, torch.float32, 32).arguments),
    }
    for name, arguments in calls.items():
        assert set(interpreter(checked_as_an_operator, name, tuple(arguments)).values()) == {"SUCCESS"}


def cost_of(name: str, arguments: tuple[Any, ...]) -> Cost:
    return count(lambda: op(name, *arguments))


def on_meta(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


@pytest.mark.parametrize("window", [None, 50, 1000])
def test_the_cost_of_attention_is_exact_and_the_same_on_meta(interpreter: Run, window: int | None) -> None:
    B, Hkv, G, S, D = 2, 2, 3, 150, 32
    case = attention_case([3, 150], S, Hkv, G, D, torch.float16, window)
    cost = interpreter(cost_of, "split_attention", tuple(case))
    assert cost == cost_of("split_attention", on_meta(case))
    seen = min(S, window or S)
    # 3 splits of 64: tops, totals and mixes in float32, written once and read once.
    partial = 4 * B * Hkv * G * 3 * (D + 2)
    assert cost.n_operators == 1
    assert cost.flops == 4 * B * Hkv * G * seen * D
    assert cost.bytes == 2 * (2 * B * Hkv * seen * D) + 2 * (2 * B * Hkv * G * D) + 8 * B + 2 * partial


def test_the_cost_of_a_product_is_exact_and_the_same_on_meta(interpreter: Run) -> None:
    for M in (1, 5):
        N, K, g = 40, 96, 32
        for name, case, weight in (
            ("int8_linear", int8_case(M, N, K, torch.float16), N * K + 2 * N),
            ("int4_linear", int4_case(M, N, K, torch.float16, g), N * K // 2 + 2 * 2 * N * K // g),
        ):
            arguments = (case.x, *case.arguments)
            cost = interpreter(cost_of, name, arguments)
            assert cost == cost_of(name, on_meta(arguments))
            assert cost.n_operators == 1
            assert cost.flops == 2 * M * N * K
            assert cost.bytes == weight + 2 * M * K + 2 * M * N


def test_the_cost_counts_what_the_kernels_are_given(interpreter: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch of the splits is what the launch really allocates."""
    B, Hkv, G, S, D = 2, 3, 2, 86 * 64 + 1, 32  # so many that a split is two blocks
    case = attention_case([3, S], S, Hkv, G, D, torch.float16)
    launches = launched(monkeypatch, split_attention_launch, *on_meta(case))
    tops, totals, mixes = launches[1].arguments[:3]
    assert tops.shape == (B, Hkv * G, 44)
    plain = 2 * (2 * B * Hkv * S * D) + 2 * (2 * B * Hkv * G * D) + 8 * B
    assert cost_of("split_attention", on_meta(case)).bytes == plain + 2 * (tops.nbytes + totals.nbytes + mixes.nbytes)


# --- Layers and models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("readable", [False, True], ids=["fast", "readable"])
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, qkv_bias=True, tied_embeddings=False)], ids=["tied", "bias"]
)
def test_layers_keep_the_codes_of_those_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, scheme: str, readable: bool, config: ModelConfig
) -> None:
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    given = quantize(lively_model(config), scheme, readable=readable)
    new = with_triton_kernels(given)
    kind = {"int8": TritonInt8Linear, "int4": TritonInt4Linear}[scheme]
    replaced = 0
    for before, after in zip(given.modules(), new.modules(), strict=True):
        if isinstance(before, (Int8Linear, Int4Linear, FastInt4Linear)):
            assert type(after) is kind and type(before) is not kind
            assert torch.equal(before.dequantize(), after.dequantize())
            assert (after.bias is None) == (before.bias is None)
            assert after.bias is None or after.bias.data_ptr() == before.bias.data_ptr()
            replaced += 1
    assert replaced == 2 * 4 + 1
    assert new.embed.weight.data_ptr() == given.embed.weight.data_ptr() and new.config is given.config


def logits_by_kernels(model: Transformer, tokens: Tensor) -> Tensor:
    return logits_whole(with_triton_kernels(model), tokens)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("n_tokens", [1, 3, 16, 17])
def test_a_model_by_kernels_equals_the_readable_one(interpreter: Run, scheme: str, n_tokens: int) -> None:
    model = lively_model(replace(CONFIG, qkv_bias=True, architecture="qwen2"))
    quantized = quantize(model, scheme, readable=True)
    tokens = torch.tensor([random_prompt(n_tokens, 97)])
    assert_same_logits(interpreter(logits_by_kernels, quantized, tokens), logits_whole(quantized, tokens))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_model_in_fp16_runs_by_kernels(interpreter: Run, scheme: str) -> None:
    """What a GPU without bf16 can do: readable layers in fp16, then kernels."""
    weights = lively_model(CONFIG, dtype=torch.float16)
    half = quantize(weights, scheme, readable=True)
    exact = quantize(copy.deepcopy(weights).float(), scheme, readable=True)  # from the same weights the same codes
    tokens = torch.tensor([random_prompt(9, 97)])
    expected = logits_whole(exact, tokens)
    actual = interpreter(logits_by_kernels, half, tokens).float()
    # The bound of test_model.test_sixteen_bit_logits_stay_near_float32.
    assert (actual - expected).abs().max() <= 90 * 2.0**-12 * expected.abs().max()


def test_readable_layers_ask_no_capability_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(CONFIG, dtype=torch.float16)
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for scheme in ("int8", "int4"):
        assert "needs a GPU of compute capability 8.0" in refusal(quantize, model, scheme)
        assert isinstance(quantize(model, scheme, readable=True).head, (Int8Linear, Int4Linear))


def test_many_rows_take_the_plain_product_with_the_weight_dequantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    for scheme in ("int8", "int4"):
        quantized = quantize(lively_model(CONFIG), scheme, readable=True)
        new, tokens = with_triton_kernels(quantized), torch.tensor([random_prompt(17, 97)])
        assert torch.equal(logits_whole(new, tokens), logits_whole(quantized, tokens))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_kernel_is_called_for_up_to_16_rows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    head = with_triton_kernels(quantize(lively_model(CONFIG), scheme)).head
    given = []
    product = lambda x, *codes: given.append(len(x)) or x @ head.dequantize().T  # noqa: E731
    monkeypatch.setattr(triton_kernels, f"{scheme}_linear", product)
    for rows in (1, 16, 17):
        x = noise(rows, 64)
        torch.testing.assert_close(head(x), x @ head.dequantize().T)
    assert given == [1, 16]


def test_other_models_are_returned_as_they_are() -> None:
    model = lively_model(CONFIG)
    for other in (model, quantize(model, "w8a8"), quantize(model, "fp8")):
        assert with_triton_kernels(other) is other


def test_only_int8_and_int4_layers_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    mixed = with_triton_kernels(quantize(lively_model(CONFIG), "int4", head="w8a8"))
    assert isinstance(mixed.head, W8A8Linear) and type(mixed.blocks[0].mlp.down) is TritonInt4Linear


def test_a_model_is_predicted_on_meta_with_the_bytes_of_its_codes() -> None:
    for scheme, bits in (("int8", 8), ("int4", 4 + 32 / 32)):
        twin = with_triton_kernels(quantize(meta_twin(CONFIG, torch.float16), scheme, readable=True))
        cost = count_run(PLAIN_STAGES["gqa"], twin, 1, 1)
        N_K = [(m.out_features, m.in_features) for m in twin.modules() if isinstance(m, (Int8Linear, Int4Linear))]
        codes = sum(N * K * bits / 8 + (2 * N if scheme == "int8" else 0) for N, K in N_K)
        products = [(op, n) for op, n in cost if op.name.endswith(f"{scheme}_linear")]
        assert sum(n for _, n in products) == len(N_K) == 2 * 4 + 1
        assert sum(n * op.ideal for op, n in products) == codes


# --- Where they do not run --------------------------------------------------------------------------------------------


def refusal(fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(MinillmError) as error:
        fn(*args)
    assert is_one_sentence(str(error.value))
    return str(error.value)


def test_the_cpu_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.stages import triton_linear

    if INTERPRETS:
        monkeypatch.setattr(triton_linear, "INTERPRETED", False)
    case, product = attention_case([3], 5, 1, 1, 16, torch.float32), int8_case(1, 4, 32, torch.float32)
    message = refusal(split_attention, *case)
    assert "run on CUDA and not on cpu" in message and "TRITON_INTERPRET=1" in message
    assert refusal(int8_linear, product.x, *product.arguments) == message
    assert refusal(int4_linear, noise(1, 32), *int4_case(1, 4, 32, torch.float32, 32).arguments) == message
    assert refusal(with_triton_kernels, quantize(lively_model(CONFIG), "int8")) == message


def test_neither_triton_nor_its_interpreter_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.stages import triton_linear

    monkeypatch.setattr(triton_linear, "INTERPRETED", True)
    cpu, cuda, other = map(torch.device, ("cpu", "cuda", "mps"))
    check_kernels(cpu, torch.float16)
    check_kernels(cuda, torch.bfloat16)
    assert "run on CUDA and not on mps" in refusal(check_kernels, other, torch.float32)
    monkeypatch.setattr(triton_kernels, "triton_is_here", lambda: False)
    for device in (cpu, cuda):
        assert "pip install triton" in refusal(check_kernels, device, torch.float32)
    check_kernels(torch.device("meta"), torch.float32)


def test_what_the_kernels_do_not_take_is_refused_in_one_sentence(interpreter: Run) -> None:
    for name, case in (
        ("int8_linear", int8_case(17, 4, 32, torch.float32)),
        ("int4_linear", int4_case(17, 4, 32, torch.float32, 32)),
    ):
        assert "up to 16 rows and were given 17" in refusal(interpreter, op, name, case.x, *case.arguments)
    attention = attention_case([3], 5, 1, 1, 16, torch.float32)
    for name in ("q", "k", "v"):
        wrong = {name: getattr(attention, name).mT.contiguous().mT if name != "q" else noise(1, 1, 1, 32)[..., ::2]}
        assert "last dimension has stride 1" in refusal(
            interpreter, op, "split_attention", *attention._replace(**wrong)
        )
    assert "multiplies no bf16" in refusal(interpreter, op, "int8_linear", *bf16_call())


def bf16_call() -> tuple[Tensor, ...]:
    case = int8_case(2, 4, 32, torch.bfloat16)
    return (case.x, *case.arguments)


def test_without_triton_everything_but_the_kernels_works() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.stages.quantization import quantize
from minillm.stages.triton_kernels import split_attention, triton_is_here, with_triton_kernels
assert not triton_is_here()
model = quantize(Transformer(ModelConfig("kernels", 1, 32, 2, 1, 16, 32, 97, 192)), "int8")
q = torch.ones(1, 1, 1, 16)
assert split_attention(q.to("meta"), q.to("meta"), q.to("meta"), torch.ones(1).to("meta")).shape == q.shape
for ask in (lambda: with_triton_kernels(model), lambda: split_attention(q, q, q, torch.ones(1).int())):
    try:
        ask()
    except MinillmError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert "pip install triton" in lines[0] and is_one_sentence(lines[0])


# --- Machine code -----------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def launched(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], *args: Any, tensor_cores: bool = True
) -> list[Launch]:
    """What `run` launches, on `meta` tensors: the kernels are not run."""
    from minillm.stages import triton_attention, triton_linear

    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: launches.append(Launch(self.kernel, grid, arguments, options))

    with monkeypatch.context() as patch:
        for module, names in (
            (triton_attention, ("attend_split", "combine_splits")),
            (triton_linear, ("int8_row", "int8_rows", "int4_row", "int4_rows")),
        ):
            patch.setattr(module, "has_tensor_cores", lambda x: tensor_cores)
            for name in names:
                patch.setattr(module, name, Recorder(getattr(module, name)))
        run(*args)
    return launches


def split_attention_launch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None) -> None:
    from minillm.stages import triton_attention

    triton_attention.run(q, k, v, lengths, window, split_size(len(k), k.shape[1], k.shape[2]))


def int8_launch(*args: Tensor) -> None:
    from minillm.stages import triton_linear

    triton_linear.run_int8(*args)


def int4_launch(*args: Tensor) -> None:
    from minillm.stages import triton_linear

    triton_linear.run_int4(*args)


@pytest.mark.parametrize(
    ("tensor_cores", "D", "block", "block_d"),
    [(True, 8, 64, 16), (True, 64, 64, 64), (True, 80, 64, 128), (True, 256, 32, 256), (False, 64, 16, 64)],
)
def test_tiles_of_attention(
    tensor_cores: bool, D: int, block: int, block_d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 64 columns and 2^13 numbers with tensor cores, else 16 columns."""
    case = attention_case([300], 300, 2, 3, D, torch.float16)
    split, combine = launched(monkeypatch, split_attention_launch, *on_meta(case), tensor_cores=tensor_cores)
    tile = {name: split.options[name] for name in ("G", "D", "ROWS", "BLOCK", "BLOCK_D")}
    assert tile == {"G": 3, "D": D, "ROWS": 4, "BLOCK": block, "BLOCK_D": block_d}
    assert all(isinstance(side, int) for side in tile.values())
    assert split.grid == (5, 2, 1) and combine.grid == (6,)
    assert combine.options == {"D": D, "SPLITS": 8, "BLOCK_D": block_d, "num_warps": 8}


@pytest.mark.parametrize(
    ("scheme", "M", "tensor_cores", "kernel", "programs", "tile"),
    [
        ("int8", 1, True, "int8_row", 8, {"BLOCK_N": 8, "BLOCK_K": 1024}),
        ("int8", 5, True, "int8_rows", 2, {"ROWS": 8, "BLOCK_N": 32, "BLOCK_K": 128}),
        ("int8", 16, False, "int8_rows", 2, {"ROWS": 16, "BLOCK_N": 32, "BLOCK_K": 64}),
        ("int4", 1, True, "int4_row", 8, {"BLOCK_N": 8, "GROUPS": 32, "HALF": 16}),
        ("int4", 5, True, "int4_rows", 2, {"ROWS": 8, "BLOCK_N": 32, "GROUPS": 4, "HALF": 16}),
        ("int4", 16, False, "int4_rows", 2, {"ROWS": 16, "BLOCK_N": 32, "GROUPS": 2, "HALF": 16}),
    ],
)
def test_tiles_of_a_product(
    scheme: str, M: int, tensor_cores: bool, kernel: str, programs: int, tile: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    N, K = 64, 256  # eight programs of 8 rows, two of 32
    case = int8_case(M, N, K, torch.float16) if scheme == "int8" else int4_case(M, N, K, torch.float16, 32)
    run = int8_launch if scheme == "int8" else int4_launch
    (launch,) = launched(monkeypatch, run, *on_meta((case.x, *case.arguments)), tensor_cores=tensor_cores)
    assert (launch.kernel.__name__, launch.grid, launch.options) == (kernel, (programs,), tile)
    assert all(isinstance(side, int) for side in tile.values())


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "capability", "expected"),
    [
        (True, torch.float16, (8, 0), True),
        (True, torch.bfloat16, (9, 0), True),
        (True, torch.float16, (7, 5), False),
        (True, torch.float32, (8, 0), False),
        (False, torch.float16, (8, 0), False),
    ],
)
def test_tensor_cores_are_used_in_16_bits_from_capability_8_on(
    is_cuda: bool, dtype: torch.dtype, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.stages.triton_linear import has_tensor_cores

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda")
    assert has_tensor_cores(x) is expected


TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int64: "*i64",
}  # fmt: skip


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel for a GPU that is not here, with what Triton would take for constants or know to divide by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, names = launch.kernel, launch.kernel.arg_names
    options = {name: value for name, value in launch.options.items() if name not in names}
    constants = {name: value for name, value in launch.options.items() if name in names}
    signature, attributes = dict.fromkeys(names, "constexpr"), {}
    for i, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes, folder: Any) -> str:
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    return subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(INTERPRETS, reason="this process interprets kernels and compiles none")
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_every_kernel_compiles_for_gpus_old_and_new_without_spilling(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled here and now
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    attention = on_meta(Attention(noise(1, 8, 1, 128), noise(1, 2, 999, 128), noise(1, 2, 999, 128), torch.tensor([9])))
    q, k, v = (x.to(dtype) for x in attention[:3])
    calls = [(split_attention_launch, (q, k, v, *attention[3:]))]
    for M in (1, 8):
        calls.append((int8_launch, on_meta((noise(M, 4096), *int8_case(M, 128, 4096, dtype).arguments))))
        calls.append((int4_launch, on_meta((noise(M, 4096), *int4_case(M, 128, 4096, dtype, 32).arguments))))
    names = []
    for launch_one, arguments in calls:
        arguments = tuple(x.to(dtype) if i == 0 else x for i, x in enumerate(arguments))
        for launch in launched(monkeypatch, launch_one, *arguments, tensor_cores=capability >= 80):
            kernel = compiled(launch, capability)
            name = launch.kernel.__name__
            usage = resources(kernel.asm["cubin"], tmp_path)
            assert re.search(r"REG:\d+ STACK:0 ", usage), f"{name} spills on sm_{capability}: {usage}"
            products = "mma.sync" in kernel.asm["ptx"] or "wgmma" in kernel.asm["ptx"]
            assert products == (capability >= 80 and name in ("attend_split", "int8_rows", "int4_rows"))
            names.append(name)
    assert names == ["attend_split", "combine_splits", "int8_row", "int4_row", "int8_rows", "int4_rows"]


# --- On a GPU ---------------------------------------------------------------------------------------------------------


def cuda(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values on the GPU, views of memory that is laid out as it was."""
    moved = []
    for x in arguments:
        if isinstance(x, Tensor):
            base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            x = base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        moved.append(x)
    return tuple(moved)


def gpu_dtypes() -> list[torch.dtype]:
    bf16 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return [torch.float32, torch.float16, *([torch.bfloat16] if bf16 else [])]


@on_gpu
@every_attention
def test_split_attention_on_cuda_equals_plain_attention(shape: Any) -> None:
    for dtype in gpu_dtypes():
        for window in (None, 70):
            case = attention_case(*shape, dtype, window)
            check_attention(case, split_attention(*cuda(case)).cpu())


@on_gpu
@pytest.mark.parametrize("M", [1, 2, 7, 16])
def test_linear_kernels_on_cuda_equal_the_product_with_the_weight(M: int) -> None:
    for dtype in gpu_dtypes():
        for N, K in ((1, 128), (50, 1152), (4096, 4096)):
            int8, int4 = int8_case(M, N, K, dtype), int4_case(M, N, K, dtype, 32)
            check_product(int8, int8_linear(*cuda((int8.x, *int8.arguments))).cpu())
            check_product(int4, int4_linear(*cuda((int4.x, *int4.arguments))).cpu())


@on_gpu
def test_a_captured_graph_sees_the_lengths_of_its_replay_and_nobody_waits() -> None:
    case = attention_case([70, 150], 150, 2, 3, 64, torch.float16)
    q, k, v, lengths, _ = cuda(case)
    split_attention(q, k, v, lengths)  # compiled before the capture
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        split_attention(q, k, v, lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = split_attention(q, k, v, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for new in ([1, 150], [70, 64], [66, 1]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        check_attention(case._replace(lengths=torch.tensor(new)), out.cpu())


@on_gpu
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_model_by_kernels_on_cuda_equals_the_readable_one(scheme: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    model = lively_model(CONFIG).to("cuda")
    readable = quantize(model, scheme, readable=True)
    for n_tokens in (1, 3, 16, 17):
        tokens = torch.tensor([random_prompt(n_tokens, 97)], device="cuda")
        assert_same_logits(logits_whole(with_triton_kernels(readable), tokens), logits_whole(readable, tokens))
    torch.backends.cuda.matmul.allow_tf32 = before
