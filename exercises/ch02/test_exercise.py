"""Grader of chapter 2. A cache is judged by the logits of models that run on it; how it stores things is not looked at."""

from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import Wrong, ask, exercise, judge_guesses, refuses
from minillm.grading.caches import (
    GQA,
    MHA,
    MQA,
    Checked,
    attend_deep,
    compare,
    compare_two,
    lively,
    run,
    run_real,
    tokens_for,
)
from minillm.grading.channel import Refused
from minillm.grading.counted import speedup
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.hardware import known_hardware
from minillm.stages import naive


class Suspect:
    """A simple cache with one mistake in it, to tell which one a learner's logits come from."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.length = mistake, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, n_tokens: int) -> Tensor:
        start = self.length
        self.length += n_tokens
        if self.mistake == "late" and start:
            start += 1
        if self.mistake == "early" and start:
            start -= 1
        if self.mistake == "zero":
            start = 0
        if self.mistake == "one":
            start += 1
        return torch.arange(start, start + n_tokens)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slot = 0 if self.mistake == "shared" else layer
        if slot in self.kept and self.mistake != "forgets":
            old_k, old_v = self.kept[slot]
            if self.mistake == "overwrites":
                old_k, old_v = old_k[:, :, :-1], old_v[:, :, :-1]
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        if slot not in self.kept or self.mistake != "never keeps":
            self.kept[slot] = (k, v)
        T, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        if self.mistake == "heads":
            k, v = k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1)
        else:
            k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
        if self.mistake == "turned":
            k, v = v, k
        offsets = {
            "corner": 0,
            "chunk corner": 0 if T > 1 else S - T,
            "blind": S,
            "chunk blind": S if S > T else 0,
            "itself": S - T - 1,
            "chunk itself": S - T - 1 if S > T > 1 else S - T,
            "ahead": S - T + 1,
        }
        offset = offsets.get(self.mistake, S - T)
        scores = q @ k.transpose(2, 3) / (1.0 if self.mistake == "scale" else q.shape[3] ** 0.5)
        hidden = ~torch.ones(T, S, dtype=torch.bool).tril(offset)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


MISTAKES = {
    "late": "A new token's position is one too large: it is the number of tokens before it.",
    "early": "A new token's position is one too small: it is the number of tokens before it.",
    "zero": "Every pass counts its positions from 0 again: go on from the tokens so far.",
    "one": "The first position is 0, not 1.",
    "heads": "Query head h reads KV head h // G: that is repeat_interleave, not repeat.",
    "shared": "Each layer needs keys and values of its own.",
    "forgets": "A pass sees nothing of what the passes before it kept.",
    "overwrites": "A new token takes the place of the one before it: append.",
    "never keeps": "It keeps the first pass only: what later passes bring must be appended too.",
    "turned": "Keys and values are exchanged.",
    "blind": "Inside a pass, a token sees tokens after itself: mask them.",
    "corner": "Its mask starts at the first key: new token i sees all tokens before this pass, and the new ones up to i.",
    "chunk corner": "Its mask starts at the first key: new token i of a later chunk sees all tokens of the chunks before.",
    "chunk blind": "Inside a later chunk, a token sees tokens after itself: a pass of several tokens always needs a mask.",
    "itself": "A token sees itself as well.",
    "chunk itself": "In a later chunk a token does not see itself: the mask is off by one.",
    "ahead": "A token sees the one after itself: the mask is off by one.",
    "scale": "Scores are divided by sqrt(D).",
}
SUSPECTS = {sentence: partial(Suspect, mistake) for mistake, sentence in MISTAKES.items()}


@exercise(points=2)
def test_positions(KVCache):
    for config, batch, sizes in [(GQA, 1, [5, 1, 1, 1]), (MHA, 2, [1, 3, 4, 1]), (MQA, 1, [2, 2])]:
        model, cache = lively(config), Checked(KVCache, config, 40, batch)
        expected = 0
        for size in sizes:
            run(model, cache, tokens_for(config, batch, size), [size])
            due, got = list(range(expected, expected + size)), cache.seen[-1]
            if got != due:
                hints = {
                    "A pass counts on from the tokens so far, not from 0.": list(range(size)),
                    "The first position is 0: a token's position is the number of tokens before it.": [
                        x + 1 for x in due
                    ],
                    "They are one too small: a token's position is the number of tokens before it.": [
                        x - 1 for x in due
                    ],
                }
                hint = next((f" {text}" for text, wrong in hints.items() if wrong == got), "")
                raise Wrong(f"KVCache.positions({size}) after {expected} tokens should give {due}, not {got}.{hint}")
            expected += size


@exercise(points=4)
def test_cache_decode(KVCache):
    for config in (GQA, MHA, MQA):
        compare(KVCache, config, 1, [7, 1, 1, 1, 1], SUSPECTS)
    compare(KVCache, GQA, 2, [4, 1, 1], SUSPECTS)
    compare(KVCache, MHA, 3, [1] * 6, SUSPECTS)
    compare(KVCache, GQA, 1, [20] + [1] * 12, SUSPECTS)
    compare(KVCache, MHA, 1, [5, 1, 1], SUSPECTS, torch.bfloat16)
    compare_two(KVCache)
    attend_deep(KVCache)
    return run_real(KVCache)


@exercise(points=3)
def test_cache_chunks(KVCache):
    for size in range(2, 8):
        whole, rest = divmod(9, size)
        compare(KVCache, GQA, 1, [size] * whole + [rest] * (rest > 0), SUSPECTS)
    compare(KVCache, MHA, 2, [3, 1, 4, 1], SUSPECTS)
    compare(KVCache, MQA, 1, [6, 5, 1, 1, 2], SUSPECTS)
    compare(KVCache, GQA, 1, [2, 3], SUSPECTS, torch.bfloat16)


@exercise(points=2)
def test_cache_full(KVCache):
    config, model = GQA, lively(GQA)
    tokens = tokens_for(config, 1, 6)
    with torch.inference_mode():
        right = model(tokens, naive.NoCache(model))
    cache = Checked(KVCache, config, 6)
    got = [run(model, cache, tokens[:, :4], [4])]
    with torch.inference_mode():
        must_refuse(model, cache, tokens[:, :3], "3 tokens more", 4, 6)
        try:
            got += [model(tokens[:, 4:5], cache), model(tokens[:, 5:], cache)]
        except Refused:
            raise Wrong(
                "A KVCache with room for 6 tokens must hold 6, also after it refused a pass that was too long."
            ) from None
        if float((torch.cat(got, 1) - right).abs().max()) > 1e-3 * float(right.abs().max()):
            raise Wrong("After a KVCache refused a pass, its logits are wrong: refuse before anything changes.")
        must_refuse(model, cache, tokens[:, :1], "1 token more", 6, 6)
        must_refuse(model, Checked(KVCache, config, 3), tokens[:, :4], "4 tokens", 0, 3)
        try:
            model(tokens[:, :5], Checked(KVCache, config, 5))
        except Refused:
            raise Wrong("A KVCache with room for 5 tokens must take a prompt of 5.") from None
    refuses(Checked(KVCache, config, 2).cache.positions, 3, because="as it has room for 2 tokens")


def must_refuse(model: Transformer, cache: Checked, tokens: Tensor, what: str, held: int, capacity: int) -> None:
    try:
        model(tokens, cache)
    except Refused:
        return
    raise Wrong(
        f"A KVCache with {held} of {capacity} tokens takes {what}: it must raise a ValueError and store nothing."
    )


# --- what it takes

MODELS = [KNOWN_MODELS[name] for name in ("smollm2-135m", "llama-3-8b", "llama-2-13b", "qwen3-0.6b", "smollm2-1.7b")]


@exercise(points=1)
def test_kv_bytes_per_token(kv_bytes_per_token):
    for config in [*MODELS, GQA, MHA, MQA]:
        for size in (2.0, 1.0, 4.0, 0.5):
            key = config.n_layers * config.n_kv_heads * config.head_dim
            expected = (key + key) * size
            likely = {
                "A key and a value: twice that.": key * size,
                "It stores KV heads, not query heads.": expected * config.group_size,
                "Each layer keeps its own.": expected / config.n_layers,
                "It ignores the bytes of an element.": (key + key) * 2.0,
                "KV heads are n_kv_heads x head_dim wide, which is not the model.": 2 * config.n_layers * config.d_model * size,
                "n_layers is the number of layers; n_heads counts heads.": expected / config.n_layers * config.n_heads,
            }  # fmt: skip
            ask(kv_bytes_per_token, config, size).number(expected, likely)


@exercise(points=2)
def test_largest_batch(largest_batch):
    cases = [
        (KNOWN_MODELS["llama-3-8b"], 80e9, 4096, 2.0, 2.0),
        (KNOWN_MODELS["llama-2-13b"], 80e9, 4096, 2.0, 2.0),
        (KNOWN_MODELS["llama-3-8b"], 24e9, 8192, 1.0, 2.0),
        (KNOWN_MODELS["qwen3-0.6b"], 16e9, 1000, 2.0, 1.0),
        (KNOWN_MODELS["llama-2-13b"], 24e9, 2048, 2.0, 2.0),  # the weights alone do not fit
        (KNOWN_MODELS["llama-2-13b"], 27e9, 4096, 2.0, 2.0),  # nor does one user beside them
        (KNOWN_MODELS["smollm2-135m"], 15.84e9, 8192, 4.0, 4.0),
        (KNOWN_MODELS["llama-3-8b"], 80e9, 500, 0.5, 0.5),  # 4 bits each, and thousands of users
    ]
    exact = KNOWN_MODELS["smollm2-1.7b"]  # fits to the byte
    cases.append((exact, float(exact.parameter_count * 2 + 7 * 512 * 196_608), 512, 2.0, 2.0))
    for config, memory, context, w, size in cases:
        token = Fraction(2 * config.n_layers * config.n_kv_heads * config.head_dim) * Fraction(size)

        def fits(parameters: int, token: Fraction = token, memory=memory, context=context, w=w) -> int:
            users = (Fraction(memory) - Fraction(w) * parameters) / (context * token)
            return users.numerator // users.denominator

        P, group = config.parameter_count, config.group_size
        exactly = (memory - P * w) / float(context * token)
        expected = max(0, fits(P))
        likely = {
            "Users are whole, and the last one must fit: round down.": expected + 1,
            "A part of a user does not fit: round down to a whole number.": exactly,
            "Weights that do not fit leave room for 0 users, not for fewer.": min(int(exactly), -1),
            "The weights need room too.": fits(0),
            "The input embedding stays in memory too: every parameter counts.": max(0, fits(config.streamed_params)),
            "It stores KV heads, not query heads.": max(0, fits(P, token * group)),
            "A key and a value: 2 of them.": max(0, fits(P, token / 2)),
            "Every user brings all its context.": max(0, int(exactly * context)),
            "A GB is 1e9 bytes here, and `memory` is in bytes.": max(0, fits(P, memory=memory * 2**30 / 1e9)),
        }
        answer = ask(largest_batch, config, memory, context, w, size)
        answer.number(expected, likely, rtol=1e-9)


# --- what it gains

LAPTOP = Ceilings("a laptop's CPU", "fp32", bandwidth=20e9, peak=100e9, overhead=0.0)


def steps(config: ModelConfig, n: int, peak: float, bandwidth: float, size: float) -> dict[str, Tensor]:
    """Seconds of compute and of reading for steps 1 to n, without a cache and with one."""
    i = torch.arange(1, n + 1, dtype=torch.float64)
    P, AL = float(config.matmul_params), float(config.n_heads * config.head_dim * config.n_layers)
    kv = 2.0 * config.n_layers * config.n_kv_heads * config.head_dim * size
    return {
        "naive_compute": (2 * P * i + 4 * AL * i**2) / peak,
        "naive_read": torch.full_like(i, P * size / bandwidth),
        "cached_compute": (2 * P + 4 * AL * i) / peak,
        "cached_read": (P * size + kv * i) / bandwidth,
    }


@exercise(points=3)
def test_predict_speedup(predict_speedup):
    h100, t4, a100 = (989.4e12, 3.35e12), (24e12, 320e9), (312e12, 2.039e12)
    cases = [
        ("smollm2-135m", 512, (100e9, 20e9), 4.0),
        ("llama-3-8b", 200, h100, 2.0),
        ("llama-3-8b", 2048, h100, 2.0),
        ("smollm2-135m", 200, t4, 2.0),
        ("qwen3-0.6b", 512, a100, 2.0),
        ("smollm2-1.7b", 3000, (1e12, 1e12), 2.0),
        ("smollm2-135m", 64, (100e9, 20e9), 4.0),
        ("llama-3-8b", 20_000, h100, 2.0),  # so long that attention counts, and P does not cancel
        ("smollm2-1.7b", 900, (1e11, 1e12), 4.0),  # a low ridge: with a cache a step computes for longer than it reads
        ("smollm2-135m", 3000, (1e18, 1e12), 2.0),  # a high ridge: every step reads, on both sides
        ("smollm2-360m", 700, (3e11, 1e12), 2.0),  # and one where it depends on the length
    ]
    for name, n, (peak, bandwidth), size in cases:
        config = KNOWN_MODELS[name]
        s = steps(config, n, peak, bandwidth, size)
        naive_s = torch.maximum(s["naive_compute"], s["naive_read"])
        cached_s = torch.maximum(s["cached_compute"], s["cached_read"])
        total_naive = torch.maximum(s["naive_compute"].sum(), s["naive_read"].sum())
        total_cached = torch.maximum(s["cached_compute"].sum(), s["cached_read"].sum())
        computing = s["naive_compute"].sum() / s["cached_compute"].sum()
        reading = s["naive_read"].sum() / s["cached_read"].sum()
        both = (s["naive_compute"] + s["naive_read"]).sum() / (s["cached_compute"] + s["cached_read"]).sum()
        likely = {
            "That compares FLOPs alone; with a cache a step waits for the weights to be read.": float(computing),
            "That compares bytes alone; a long pass without a cache computes for longer than it reads.": float(reading),
            "That is the last step alone: add up all of them.": float(naive_s[-1] / cached_s[-1]),
            "Take the longer of the two limits in each step, not of the sums.": float(total_naive / total_cached),
            "In each step the longer limit counts, not both together.": float(both),
            "Without a cache there are no keys and values to read: a pass reads the weights alone.": float(
                torch.maximum(s["naive_compute"], s["cached_read"]).sum() / cached_s.sum()
            ),
            "That is upside down: naive over cached.": float(cached_s.sum() / naive_s.sum()),
        }
        answer = ask(predict_speedup, config, n, peak, bandwidth, size)
        answer.number(float(naive_s.sum() / cached_s.sum()), likely, rtol=0.01)


@exercise(points=2)
def test_speedup_guesses(speedup_guesses):
    laptop = speedup(KNOWN_MODELS["smollm2-135m"], LAPTOP, 512)
    h100 = speedup(KNOWN_MODELS["llama-3-8b"], known_hardware("h100-sxm").ceilings("bf16"), 200)
    reasons = [
        (
            "On the CPU",
            "the ridge is at 5 FLOP per byte, so each pass computes",
            "a step with a cache still reads every weight",
        ),
        (
            "On the H100",
            "nothing makes passes without a cache faster",
            "up to some 300 tokens a pass only waits for the weights",
        ),
    ]
    what = "two numbers: the ratio on the CPU and the ratio on the H100"
    value = judge_guesses(ask(speedup_guesses), (laptop, h100), 0.25, what, reasons)
    return f"You said {value[0]:.3g} and {value[1]:.3g}; counted by operators it is {laptop:.3g} and {h100:.3g}."
