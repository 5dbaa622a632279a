"""Grader of chapter 8. A static layer is judged by recordings of its steps, kernels by what they leave in memory."""

import math
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.grading import (
    PROMPT,
    Answer,
    Evidence,
    Wrong,
    ask,
    captured,
    continued,
    example_model,
    exercise,
    moved_bytes,
    needs_triton,
)
from minillm.grading.caches import attention
from minillm.model import Transformer
from minillm.roofline.counting import count
from minillm.stages import naive
from minillm.stages.quantizers import dequantize_int4, group_int4, pack_nibbles
from minillm.stages.triton_kernels import split_attention, split_size

# --- overhead


@exercise(points=2)
def test_launch_gains(launch_gains):
    generator = np.random.default_rng(8)
    cases: list[tuple[list[float], list[int], float, float]] = [
        ([3e-6, 30e-6, 8e-6, 1e-6, 90e-6, 2e-6], [2, 1, 3], 10e-6, 2e-6),
        ([1e-6, 2e-6, 3e-6, 4e-6], [4], 10e-6, 2e-6),  # overhead is all of it
        ([40e-6, 1e-6, 50e-6, 2e-6], [1, 1, 1, 1], 10e-6, 1e-6),  # nothing is fused
        ([300e-6, 500e-6], [2], 10e-6, 1e-6),  # overhead is nothing: none gains
        ([8e-6, 8e-6, 8e-6], [2, 1], 10e-6, 1e-6),  # a fused kernel works for longer than it takes to launch
        ([5e-6] * 20, [1, 9, 5, 5], 5e-6, 2e-6),
    ]
    for _ in range(6):
        kernels = generator.integers(1, 6, 8).tolist()
        work = (10.0 ** generator.uniform(-7, -4, sum(kernels))).tolist()
        cases.append((work, kernels, float(generator.uniform(5e-6, 2e-5)), float(generator.uniform(5e-7, 3e-6))))
    evidence = {name: Evidence(rtol=1e-6) for name in ("compiled", "captured", "both")}
    for work, kernels, overhead, replay in cases:
        operators = iter(work)
        fused = [math.fsum(islice(operators, n)) for n in kernels]
        eager = math.fsum(max(w, overhead) for w in work)

        def gain(parts: list[float], floor: float, eager: float = eager) -> float:
            return eager / math.fsum(max(part, floor) for part in parts)

        def added(parts: list[float], floor: float, work: list[float] = work, overhead: float = overhead) -> float:
            return (math.fsum(work) + len(work) * overhead) / (math.fsum(parts) + len(parts) * floor)

        def summed(parts: list[float], floor: float, work: list[float] = work, overhead: float = overhead) -> float:
            return max(math.fsum(work), len(work) * overhead) / max(math.fsum(parts), len(parts) * floor)

        answer = ask(launch_gains, work, kernels, overhead, replay)
        value = answer.value
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            raise answer.wrong("must return three numbers: compiled, captured, and both.")
        ways = {"compiled": (fused, overhead), "captured": (work, replay), "both": (fused, replay)}
        for (name, (parts, floor)), number in zip(ways.items(), value, strict=True):
            due = gain(parts, floor)
            likely = {
                "While the host launches, the device works: the longer of the two counts, not their sum.": added(
                    parts, floor
                ),
                "The longer of the two counts for each launch, not for the whole step.": summed(parts, floor),
                "That is upside down: the eager step's time over the other's.": 1 / due,
                "A graph launches what the compiler made: both together.": gain(work, replay),
                "In a graph a launch takes `replay` seconds, not `overhead`.": gain(parts, overhead),
                "A graph's launches take time as well.": gain(parts, 0.0),
                "A kernel of several operators does the work of all of them.": eager
                / math.fsum(max(w, floor) for w in [work[sum(kernels[:j])] for j in range(len(kernels))]),
                "Compared with the eager step, not with the compiled one.": due / gain(fused, overhead),
            }
            evidence[name].add(Answer(f"{answer.label}, {name},", number), due, likely)
    for found in evidence.values():
        found.judge()


def fewest_steps(
    prompt: int, eager: float, compiled: float, compile_s: float, smallest: int,
    programs: str = "each", shift: int = 0, from_prompt: bool = True,
) -> int | None:  # fmt: skip
    """The steps after which compiling has paid; with one of the mistakes in it, if any is asked for."""
    if compiled >= eager:
        return None
    known: set[int] = set()
    waited = 0.0
    for n in range(1, 3_000_000):
        columns = (prompt if from_prompt else 0) + n + shift
        bucket = smallest
        while bucket < columns:
            bucket *= 2
        if not known or (programs == "each" and bucket not in known):
            waited += compile_s
        known.add(bucket)
        if waited + n * compiled <= n * eager:
            return n
    return None


@exercise(points=2)
def test_break_even(break_even):
    cases = [
        (1000, 0.05, 0.049, 2.0007, 128),
        (5, 0.03, 0.02, 0.555, 128),  # in the first bucket
        (100, 0.03, 0.02, 0.255, 128),  # before the first bucket ends
        (100, 0.03, 0.02, 0.555, 128),  # the second bucket begins before the first program has paid
        (127, 0.03, 0.02, 0.105, 128),  # one step in the first bucket
        (128, 0.03, 0.02, 0.105, 128),  # none in it
        (0, 0.05, 0.01, 20.01, 128),
        (5, 0.03, 0.03, 1.0, 128),  # nothing gained
        (5, 0.03, 0.031, 1.0, 128),
        (300, 1.0, 0.25, 0.5, 512),  # the first step pays
        (10, 0.5, 0.25, 1.125, 4),
        (60, 0.5, 0.25, 1.125, 4),
        (511, 0.5, 0.25, 3.125, 512),
        (2, 0.004, 0.002, 9.001, 256),
        (3, 0.5, 0.25, 0.5, 2),  # both have taken as long
    ]
    evidence = Evidence(rtol=1e-9)
    for case in cases:
        eager, compiled, compile_s = case[1:4]
        due = fewest_steps(*case)
        gains = eager > compiled
        likely = {
            "Each bucket has a program of its own, which is waited for once.": fewest_steps(*case, programs="one"),
            "The prompt's tokens fill columns as well.": fewest_steps(*case, from_prompt=False),
            "The first step attends over prompt + 1 columns, its own token included.": fewest_steps(*case, shift=-1),
            "A step over 128 columns is in the bucket of 128: prompt + 1 in the first step, not prompt + 2.": (
                fewest_steps(*case, shift=1)
            ),
            "Steps of a program take time as well: each gains eager - compiled.": math.ceil(compile_s / eager),
            "The number of steps is a whole one.": compile_s / (eager - compiled) if gains else None,
            "A step that gains nothing never pays: None.": due if gains else 0,
            "The smallest bucket is `smallest`, not 128.": fewest_steps(*case[:4], 128),
            "No bucket is smaller than `smallest`.": fewest_steps(*case[:4], 1),
        }
        evidence.add(ask(break_even, *case), due, likely)
    evidence.judge()


# --- a cache that is the same at every step


def power_of_two(n: int, smallest: int) -> int:
    return next(2**i for i in range(40) if 2**i >= max(n, smallest))


@exercise(points=1)
def test_visible_columns(visible_columns):
    cases: list[tuple[Any, ...]] = [
        (5,), (1,), (127,), (128,), (129,), (256,), (257,), (1000,), (4096,), (4097,),
        (5, None, 8), (8, None, 8), (9, None, 8), (1, None, 1), (2, None, 1), (3, None, 1), (7, None, 4),
        (100, 20), (300, 129), (10, 20), (20, 20), (21, 20), (513, 1), (6, 3, 2), (8, 8, 2), (9, 8, 16),
    ]  # fmt: skip
    for case in cases:
        length, window, smallest = (*case, *(None, 128)[len(case) - 1 :])
        first = 0 if window is None else max(0, length - window)
        S = power_of_two(length, smallest)
        answer = ask(visible_columns, *case)
        value = answer.value
        if not isinstance(value, Tensor):
            raise answer.wrong("must return a tensor of bool.")
        if value.shape != (S,):
            hint = ""
            if value.shape == (power_of_two(length + 1, smallest),):
                hint = f" A bucket of {S} columns has room for {S} tokens."
            elif value.shape == (power_of_two(length, 1),):
                hint = f" A bucket has {smallest} columns at least."
            elif value.shape == (length,):
                hint = " A mask of another length for each token would need another program for each."
            raise answer.wrong(f"has shape {tuple(value.shape)} where {(S,)} is due.{hint}")
        if value.dtype != torch.bool:
            raise answer.wrong(f"is {value.dtype} where torch.bool is due, True where the token sees.")
        due = torch.tensor([first <= i < length for i in range(S)])
        if not torch.equal(value, due):
            masks = {
                "Columns beyond the length are hidden: nothing has been written there.": (first, S),
                "The new token sees itself, in column length - 1.": (first, length - 1),
                "Columns count from 0: the last that is filled is length - 1.": (first, length + 1),
                "The window counts the new token itself.": (max(0, length - (window or length) - 1), length),
                "The window holds as many tokens as it says.": (min(length, first + 1), length),
                "A window hides the columns before it.": (0, length),
            }
            columns = torch.arange(S)
            hint = next(
                (f" {text}" for text, (a, b) in masks.items() if torch.equal(value, (columns >= a) & (columns < b))), ""
            )
            hint = " True is where the token sees." if torch.equal(value, ~due) else hint
            seen = value.nonzero().flatten().tolist()
            shown = f"columns {seen[0]} to {seen[-1]}" if seen else "no column"
            raise answer.wrong(f"shows {shown} where {first} to {length - 1} are right.{hint}")


class Recorded:
    """A cache of layers of the learner's, as a model sees it: a decode step is recorded once for each bucket, then repeated."""

    def __init__(self, StaticLayer, config: ModelConfig, columns: int, batch: int, smallest: int) -> None:
        shape = (batch, config.n_kv_heads, columns, config.head_dim)
        self.layers = [StaticLayer(*shape) for _ in range(config.n_layers)]
        if not all(hasattr(layer, "attend") for layer in self.layers):  # a plain value
            raise Wrong("StaticLayer(batch, n_kv_heads, columns, head_dim) must make an object with the method attend.")
        self.smallest, self.window = smallest, config.sliding_window
        self.programs: dict[tuple[int, int], Any] = {}  # by layer and bucket
        self.length = 0

    def positions(self, n_tokens: int) -> Tensor:
        self.length += n_tokens
        return torch.tensor([[self.length - 1]])

    def visible(self) -> Tensor:
        column = torch.arange(power_of_two(self.length, self.smallest))
        first = 0 if self.window is None else self.length - self.window
        return ((first <= column) & (column < self.length)).view(1, 1, 1, -1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = self.visible()
        args = (q.contiguous(), k.contiguous(), v.contiguous(), torch.tensor([self.length - 1]), visible)
        program = (layer, visible.shape[-1])
        recording = program not in self.programs
        if recording:
            self.programs[program] = captured(self.layers[layer].attend, *args)
        answer = ask(self.programs[program], *args)  # the recording wrote the same numbers into the same column
        how = "recorded" if recording else "repeated from a recording"
        answer.label = f"StaticLayer.attend, {how}, with {self.length} tokens in {visible.shape[-1]} columns,"
        if not isinstance(answer.value, Tensor):
            raise answer.wrong("must return a tensor, the attention of the new token.")
        if answer.value.shape != q.shape:
            raise answer.wrong(f"has shape {tuple(answer.value.shape)} where {tuple(q.shape)} is due, that of q.")
        return answer.value


@exercise(points=3)
def test_static_attend(StaticLayer):
    generator = torch.Generator().manual_seed(18)
    # batch, Hq, Hkv, D, columns, smallest bucket, window, tokens; the text begins anew where a second number stands
    cases = [
        (1, 4, 2, 8, 16, 4, None, (11,)),
        (2, 3, 3, 4, 8, 8, None, (8,)),
        (2, 4, 1, 8, 32, 2, None, (19,)),
        (3, 6, 2, 6, 8, 4, 3, (8,)),
        (1, 2, 2, 8, 16, 8, None, (10, 4)),  # what a text before it left is hidden
    ]
    for B, Hq, Hkv, D, columns, smallest, window, texts in cases:
        config = ModelConfig("static", 1, Hq * D, Hq, Hkv, D, 8, 8, columns, sliding_window=window)
        cache = Recorded(StaticLayer, config, columns, B, smallest)
        for n in texts:
            cache.length = 0
            q, k, v = (2 * torch.randn(B, heads, n, D, generator=generator) for heads in (Hq, Hkv, Hkv))
            for i in range(n):
                now = slice(i, i + 1)
                cache.positions(1)
                got = cache.attend(0, q[:, :, now], k[:, :, now], v[:, :, now])
                first = 0 if window is None else max(0, i + 1 - window)
                seen = slice(first, i + 1)
                due = attention(q[:, :, now], k[:, :, seen], v[:, :, seen])
                # Float32 is off by some 1e-6 on values below 8.
                if not bool(torch.isfinite(got).all()) or float((got - due).abs().max()) > 1e-4:
                    heads = f"{Hq} query heads on {Hkv}"
                    raise Wrong(
                        f"StaticLayer.attend ({heads}, {columns} columns, buckets from {smallest} on) is wrong at token {i}, "
                        f"as a recording gives it.{static_hint(got, q, k, v, i, first, cache.visible().shape[-1])}"
                    )
    bounded_bytes(StaticLayer)
    return static_text(StaticLayer)


def static_hint(got: Tensor, q: Tensor, k: Tensor, v: Tensor, i: int, first: int, S: int) -> str:
    """A sentence on what went wrong at token i, in a bucket of S columns, where that can be told."""
    empty = torch.zeros(*k.shape[:2], S - i - 1, k.shape[3])
    now, seen = slice(i, i + 1), slice(first, i + 1)
    if not bool(torch.isfinite(got).all()):
        return " It holds NaN: hidden columns must hold finite numbers, and a column is seen that was written."
    G = q.shape[1] // k.shape[1]
    others = {
        "Query head h reads KV head h // G.": (
            q[:, :, now].unflatten(1, (G, -1)).transpose(1, 2).flatten(1, 2), k[:, :, seen], v[:, :, seen]
        ),
        "Scores are divided by sqrt(D).": (q[:, :, now] * q.shape[-1] ** 0.5, k[:, :, seen], v[:, :, seen]),
        "A window hides columns: `visible` says which.": (q[:, :, now], k[:, :, : i + 1], v[:, :, : i + 1]),
        "Columns are hidden that hold nothing yet: `visible` says which.": (
            q[:, :, now], torch.cat([k[:, :, : i + 1], empty], 2), torch.cat([v[:, :, : i + 1], empty], 2)
        ),
    }  # fmt: skip
    for text, (queries, keys, values) in others.items():
        wrong = attention(queries, keys, values)
        if text.startswith("Query"):
            wrong = wrong.unflatten(1, (-1, G)).transpose(1, 2).flatten(1, 2)
        if float((wrong - got).abs().max()) <= 1e-4:
            return f" {text}"
    if i:
        return (
            " A recording repeats operators on the tensors it was made with: what Python counts, and a tensor that is made "
            "anew, stays as it was when it was recorded."
        )
    return ""


def bounded_bytes(StaticLayer) -> None:
    """A step reads the columns that are given, once for each KV head, and writes one."""
    B, Hq, Hkv, D, S, columns = 2, 4, 2, 64, 256, 1024
    q, k, v = (torch.randn(B, heads, 1, D, generator=torch.Generator().manual_seed(1)) for heads in (Hq, Hkv, Hkv))
    args = (q, k, v, torch.tensor([200]), (torch.arange(S) <= 200).view(1, 1, 1, -1))
    moved, without_more = (moved_bytes(StaticLayer(B, Hkv, n, D).attend, *args) for n in (columns, S))
    due = 2 * B * Hkv * S * D * 4
    if moved > 1.5 * due:
        hint = "copy none of them, not even once for each query head"
        if moved - without_more > due:
            hint = "read no further than S, however many columns there are"
        raise Wrong(
            f"StaticLayer.attend gives what it should but moves {moved:,} bytes where the keys and values of {S} columns have "
            f"{due:,}: {hint}."
        )


def static_text(StaticLayer) -> str:
    model, tokenizer, which = example_model()
    prompt, n = tokenizer.encode(PROMPT), 4
    with torch.inference_mode():
        new = run_recorded(StaticLayer, model, prompt, n)
    if new != naive.generate(model, prompt, n).tokens:
        raise Wrong(
            f"With StaticLayer, {which} writes {tokenizer.decode(new)!r}, which is not what it writes without a cache."
        )
    return f"Your recorded steps just ran {which}: {continued(PROMPT, new)}"


def run_recorded(StaticLayer, model: Transformer, prompt: list[int], n: int) -> list[int]:
    cache = Recorded(StaticLayer, model.config, 128, 1, 128)
    text = list(prompt)
    for i in range(len(prompt) + n - 1):
        logits = model(torch.tensor([text[i : i + 1]]), cache)
        if i + 1 == len(text):
            text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


# --- attention in splits

LOWEST = -3e38


def partial_results(scores: Tensor, values: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tops, totals and mixes of splits: scores (B, Hq, S), -inf where nothing is seen, values (B, Hq, S, D), in float64."""
    tops, totals, mixes = [], [], []
    for s, v in zip(scores.tensor_split(cuts, -1), values.tensor_split(cuts, -2), strict=True):
        top = s.amax(-1) if s.shape[-1] else torch.full(s.shape[:-1], -torch.inf, dtype=s.dtype)
        top = torch.where(top == -torch.inf, LOWEST, top)
        weights = (s - top[..., None]).exp()
        tops.append(top)
        totals.append(weights.sum(-1))
        mixes.append((weights[..., None] * v).sum(-2))
    return torch.stack(tops, -1).float(), torch.stack(totals, -1).float(), torch.stack(mixes, -2).float()


WHOLE_ROWS = [
    (1, 1, 6, 3, [3], 1.0, 0.0, 6),
    (2, 3, 40, 4, [10, 20, 30], 2.0, 0.0, 40),
    (1, 2, 30, 5, [1, 4, 25], 2.0, 0.0, 30),  # ragged
    (2, 2, 12, 4, [], 1.0, 0.0, 12),  # one split alone
    (1, 2, 20, 4, [5, 10, 15], 40.0, 900.0, 20),  # exp overflows
    (1, 2, 20, 4, [5, 10, 15], 40.0, -900.0, 20),  # and underflows
    (2, 2, 32, 4, [8, 16, 24], 1.0, 0.0, 9),  # the last splits saw nothing
    (2, 2, 32, 4, [8, 16, 24], 1.0, -50.0, 9),  # whose top must not be taken for the highest
    (1, 2, 32, 3, [8, 16, 24], 1.0, 0.0, 0),  # nobody saw anything
    (1, 2, 64, 3, list(range(1, 64)), 3.0, 10.0, 64),
]


@exercise(points=2)
def test_combine_splits(combine_splits):
    generator = torch.Generator().manual_seed(28)
    # B, Hq, S, D, where it is cut, size of the scores, their mean, columns that are seen, and how many before them are not
    cases: list[tuple[int, int, int, int, list[int], float, float, int, int]] = [
        *((*case, 0) for case in WHOLE_ROWS),
        (1, 2, 32, 4, [8, 16, 24], 1.0, 0.0, 12, 18),  # the first splits saw nothing: a window
        (1, 2, 24, 4, [8, 16], 1.0, 20.0, 8, 8),  # nor did the last
    ]
    for B, Hq, S, D, cuts, size, mean, n_seen, n_hidden in cases:
        scores = torch.randn(B, Hq, S, generator=generator, dtype=torch.float64) * size + mean
        seen = slice(n_hidden, n_hidden + n_seen)
        scores[..., :n_hidden] = scores[..., seen.stop :] = -torch.inf
        if n_hidden:
            scores[..., seen] += torch.arange(n_seen) * 20  # later splits have far higher scores
        values = torch.randn(B, Hq, S, D, generator=generator, dtype=torch.float64) + 1
        tops, totals, mixes = partial_results(scores, values, cuts)
        due = (scores[..., seen].softmax(-1)[..., None] * values[..., seen, :]).sum(-2)
        t, n, m = tops.double(), totals.double(), mixes.double()
        share = (t - t.amax(-1, keepdim=True)).exp()
        own = m / n.clamp_min(1e-30)[..., None]
        likely = {
            "The splits' totals count: one that saw more columns, or nearer ones, has more weight.": lambda own=own: (
                own.mean(-2)
            ),
            "A split's weight is its share times its total.": lambda share=share, own=own: (
                (share / share.sum(-1, keepdim=True))[..., None] * own
            ).sum(-2),
            "Totals shrink by the same shares as mixes.": lambda share=share, m=m, n=n: (
                (share[..., None] * m).sum(-2) / n.sum(-1, keepdim=True).clamp_min(1)
            ),
            "Mixes shrink by the same shares as totals.": lambda share=share, m=m, n=n: (
                m.sum(-2) / (share * n).sum(-1, keepdim=True).clamp_min(1)
            ),
            "Divide by the total of all splits.": lambda share=share, m=m: (share[..., None] * m).sum(-2),
            "Totals and mixes stand for their own split's top: weigh them by exp(top - highest top).": lambda m=m, n=n: (
                m.sum(-2) / n.sum(-1, keepdim=True).clamp_min(1)
            ),
        }
        answer = ask(combine_splits, tops, totals, mixes)
        answer.label = f"combine_splits of {len(cuts) + 1} splits, {n_seen} of {S} columns seen, scores near {mean:g},"
        answer.tensor(due, likely, atol=2e-4)  # a score near 900 is known to 6e-5 in float32, and so is its weight


def counted_bytes(B: int, S: int, Hq: int, Hkv: int, D: int, size: int) -> int:
    """What minillm counts for `split_attention`, on tensors of shapes alone."""
    with torch.device("meta"):
        dtype = torch.float32 if size == 4 else torch.bfloat16
        q, k, v = (torch.empty(shape, dtype=dtype) for shape in ((B, Hq, 1, D), (B, Hkv, S, D), (B, Hkv, S, D)))
        lengths = torch.empty(B, dtype=torch.int64)
    return count(lambda: split_attention(q, k, v, lengths)).bytes


@exercise(points=2)
def test_split_attention_cost(split_attention_cost):
    # B, S, Hq, Hkv, D, bytes of a number, columns of a split: minillm's own choice where there is none
    cases = [
        (1, 8192, 32, 8, 128, 2, 0), (1, 1000, 9, 3, 64, 4, 0), (4, 512, 16, 16, 64, 2, 0), (2, 2048, 32, 4, 80, 2, 0),
        (16, 100, 8, 2, 64, 2, 0), (1, 32768, 32, 8, 128, 2, 0), (3, 65, 6, 1, 32, 4, 0), (8, 8000, 64, 8, 128, 2, 0),
        (1, 8192, 32, 8, 128, 2, 3000), (2, 700, 12, 4, 64, 4, 100), (1, 64, 4, 4, 16, 2, 1000), (3, 129, 6, 2, 32, 2, 64),
    ]  # fmt: skip
    evidence = {"bytes": Evidence(rtol=1e-9), "programs": Evidence(rtol=1e-9)}
    for B, S, Hq, Hkv, D, size, chosen in cases:
        split = chosen or split_size(B, Hkv, S)
        splits = math.ceil(S / split)
        kv, partial = 2 * B * Hkv * S * D * size, 4 * B * Hq * splits * (D + 2)
        ends = 2 * B * Hq * D * size + 8 * B
        due = ends + kv + 2 * partial if chosen else counted_bytes(B, S, Hq, Hkv, D, size)
        likely = {
            "What the first kernel writes the second one reads.": ends + kv + partial,
            "Tops, totals and mixes are written and read as well.": ends + kv,
            "Keys and values are read once for each KV head, not for each query head.": ends
            + kv * Hq // Hkv
            + 2 * partial,
            "Each query head has its own top, total and mix.": ends + kv + 2 * partial * Hkv // Hq,
            "A top and a total go with each mix: D + 2 numbers.": ends + kv + 2 * partial * D // (D + 2),
            "There are keys and values.": ends + kv // 2 + 2 * partial,
            "Tops, totals and mixes are float32, whatever the rest is.": ends + kv + 2 * partial * size // 4,
            "Queries are read, and the output written.": 8 * B + kv + 2 * partial,
            "The output is written as well.": ends - B * Hq * D * size + kv + 2 * partial,
            "Each sequence's length has 8 bytes.": ends - 8 * B + kv + 2 * partial,
            "The last split is a short one, and counts.": ends + kv + 2 * partial // splits * (S // split),
            "A short split reads its own columns only.": ends + kv * splits * split // S + 2 * partial,
            "Count all sequences of the batch.": (ends + kv + 2 * partial) // B,
        }
        answer = ask(split_attention_cost, B, S, Hq, Hkv, D, split, size)
        value = answer.value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise answer.wrong("must return two numbers: bytes, and programs.")
        evidence["bytes"].add(Answer(f"{answer.label}, bytes,", value[0]), due, likely)
        programs = {
            "A program takes all query heads of a KV head.": B * Hq * splits,
            "The last split is a short one, and counts.": B * Hkv * (S // split),
            "Each sequence has programs of its own.": Hkv * splits,
            "Each split has a program of its own.": B * Hkv,
            "Those of the first kernel.": B * Hkv * splits + B * Hq,
        }
        evidence["programs"].add(Answer(f"{answer.label}, programs,", value[1]), B * Hkv * splits, programs)
    for found in evidence.values():
        found.judge()


@exercise(points=3)
def test_attend_split(attend_split, attend_in_splits):
    needs_triton()
    generator = torch.Generator().manual_seed(38)
    # B, Hq, Hkv, D, S, lengths, window, split
    cases = [
        (1, 4, 2, 8, 24, [24], 99, 24),  # which head reads which
        (1, 6, 2, 4, 20, [20], 99, 8),  # three rows in a tile of four, a last split that is short
        (2, 2, 2, 8, 32, [32, 11], 99, 12),  # ragged; splits begin and end inside a block, and one sees nothing
        (2, 4, 1, 4, 30, [25, 7], 10, 10),  # a window that begins inside a split
        (2, 2, 1, 8, 16, [40, 0], 99, 5),  # a length that is stale, and one of 0
        (1, 3, 3, 4, 24, [17], 1, 8),
        (1, 4, 2, 4, 24, [16], 8, 8),  # a window that is one split
    ]
    for B, Hq, Hkv, D, S, lengths, window, split in cases:
        q = torch.randn(B, Hq, 1, D, generator=generator)
        k, v = torch.randn(2, B, Hkv, S, D, generator=generator)
        G = Hq // Hkv
        column = torch.arange(S)
        held = torch.tensor(lengths).clamp_max(S)[:, None]
        seen = (column < held) & (column >= held - window)  # (B, S)
        wide = seen[:, None].expand(B, Hq, S)
        scores = torch.einsum("bhd,bhsd->bhs", q[:, :, 0].double(), k.double().repeat_interleave(G, 1)) / D**0.5
        values = v.double().repeat_interleave(G, 1)
        due = partial_results(scores.masked_fill(~wide, -torch.inf), values, list(range(split, S, split)))
        for x in (k, v):
            x.masked_fill_(~seen[:, None, :, None], torch.nan)  # what is not seen is not read
        label = f"Your kernel, with {Hq} query heads on {Hkv}, lengths {lengths} of {S}, window {window}, splits of {split},"
        value = ask(attend_in_splits, q, k, v, torch.tensor(lengths), window, split).value
        if not isinstance(value, (list, tuple)) or len(value) != 3:
            raise Wrong("attend_in_splits must return tops, totals and mixes: leave it as it was.")
        shared = torch.einsum("bhd,bhsd->bhs", q[:, :, 0].double(), torch.nan_to_num(k).double().repeat(1, G, 1, 1))
        swapped = partial_results(
            (shared / D**0.5).masked_fill(~wide, -torch.inf), values, list(range(split, S, split))
        )
        for name, got, right, other in zip(("tops", "totals", "mixes"), value, due, swapped, strict=True):
            answer = Answer(f"{label} makes {name} that", got)
            if not isinstance(got, Tensor) or got.shape != right.shape:
                raise Wrong("attend_in_splits must return tops, totals and mixes: leave it as it was.")
            if bool(got.isnan().any()):
                unread = "are NaN: it leaves some unwritten, or reads a column that is not seen."
                raise Wrong(f"{label} makes {name} that {unread}")
            # Float32 over a few columns is off by some 1e-6. A split that saw nothing may have any top far below all scores.
            if not torch.allclose(got.clamp_min(-1e30), right.clamp_min(-1e30), rtol=1e-5, atol=1e-5):
                hint = " Query head h reads KV head h // G." if torch.allclose(got, other, rtol=1e-3, atol=1e-3) else ""
                where = (got.double() - right.double()).abs().flatten().argmax()
                place = tuple(int(i) for i in torch.unravel_index(where, right.shape))
                raise Wrong(
                    f"{answer.label} are wrong: at {place} (sequence, head, split{', d' if name == 'mixes' else ''}) "
                    f"{float(got[place]):.4g} where {float(right[place]):.4g} is right.{hint}"
                )


# --- a product in int4


@exercise(points=3)
def test_int4_row(int4_row, int4_product):
    needs_triton()
    generator = torch.Generator().manual_seed(48)
    # N, K, columns of a group, dtype of x
    cases = [
        (1, 32, 32, torch.float32),
        (8, 128, 32, torch.float32),  # all of it full
        (9, 160, 32, torch.float32),  # a row and a group more
        (33, 384, 64, torch.float32),
        (3, 384, 128, torch.float16),
        (5, 448, 64, torch.float16),
    ]
    for N, K, g, dtype in cases:
        weight = torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator) + 0.5
        codes, scales, zeros = group_int4(weight, g)
        scales, zeros = scales.float(), zeros.float()
        x = (torch.randn(K, generator=generator) + 0.3).to(dtype)
        answer = ask(int4_product, x, pack_nibbles(codes), scales, zeros)
        answer.label = f"Your kernel, x ({K},) in {str(dtype)[6:]}, {N} rows, {K // g} groups of {g} columns,"
        value = answer.value
        if not isinstance(value, Tensor) or value.shape != (N + 128,):
            raise Wrong("int4_product must return N + 128 numbers: leave it as it was.")
        out = value[64 : 64 + N]
        if not bool(torch.cat([value[:64], value[64 + N :]]).isnan().all()):
            raise answer.wrong("writes outside of its output.")
        if bool(out.isnan().any()):
            raise answer.wrong("gives NaN: it reads numbers behind the last group, or beyond the last row: mask them.")
        W, X = dequantize_int4(codes, scales, zeros).double(), x.double()

        def product(q: Tensor = codes, s: Tensor = scales, z: Tensor = zeros, offset: int = 8, X: Tensor = X) -> Tensor:
            groups = q.double().unflatten(-1, (s.shape[-1], -1)) - offset
            return (groups * s.double()[..., None] + z.double()[..., None]).flatten(-2) @ X

        swapped = codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        likely = {
            "The even column is in the upper half of a byte.": lambda f=product, q=swapped: f(q),
            "The weight is s (q - 8) + z: 8 s is taken off for each column.": lambda f=product: f(offset=0),
            "Each column adds z x as well.": lambda f=product, z=zeros: f(z=torch.zeros_like(z)),
            "Codes lie 8 above: neither 7 nor 9.": lambda f=product: f(offset=7),
            "z is added, not taken off.": lambda f=product, z=zeros: f(z=-z),
            "Each group has a scale of its own.": lambda f=product, s=scales: f(s=s[:, :1].expand_as(s)),
            "Each group has a zero of its own.": lambda f=product, z=zeros: f(z=z[:, :1].expand_as(z)),
        }
        scale = float((W.abs() @ X.abs()).max())  # float32 rounds each product, and each sum, by 6e-8 of it at most
        Answer(answer.label, out).tensor(W @ X, likely, atol=1e-5 * scale)
