"""Grader of chapter 3. Values are compared in float64 with a head-by-head reference; bytes are those that minillm counts."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import Wrong, ask, exercise, judge_guesses, moved_bytes, refuses
from minillm.grading.caches import GQA, MHA, MQA, Checked, attend_deep, compare, compare_two, run_real
from minillm.grading.counted import of_all_layers
from minillm.roofline.counting import count
from minillm.roofline.position import meta_twin
from minillm.stages import gqa, kv_cache


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


# --- which head reads which


@exercise(points=1)
def test_head_map(head_map):
    some = [(9, 3), (32, 8), (8, 1), (6, 6), (16, 2), (12, 4), (1, 1), (64, 8)]
    for n_heads, n_kv_heads in some + [(G * n, n) for n in (1, 2, 3, 5, 8, 22, 40) for G in (1, 2, 3, 5, 7, 16, 49)]:
        G = n_heads // n_kv_heads
        likely = {
            "Neighbours share: it is h // G, not h % Hkv, which is the order of repeat.": [
                h % n_kv_heads for h in range(n_heads)
            ],
            "A group has G = Hq / Hkv query heads: divide by G, not by Hkv.": [h // n_kv_heads for h in range(n_heads)],
            "There is one entry for each query head.": list(range(n_kv_heads)),
            "It should be the number of a KV head, from 0 on.": [1 + h // G for h in range(n_heads)],
            "That is the first query head of each group, not its KV head.": [h // G * G for h in range(n_heads)],
        }
        ask(head_map, n_heads, n_kv_heads).tokens([h // G for h in range(n_heads)], likely)


# --- attention


def attention(q: Tensor, k: Tensor, v: Tensor, mistake: str = "") -> Tensor:
    """Grouped attention in float64, a head and a query at a time, right or with a mistake in it."""
    (_, Hq, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    G = Hq // Hkv
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    scale = {"no scale": 1.0, "squared scale": 1 / D, "scale of G": (G * D) ** -0.5}.get(mistake, D**-0.5)
    for h in range(Hq):
        kv = h % Hkv if mistake == "heads" else h // G
        for i in range(T):
            t = (h % G * T + i) // G if mistake == "rows" else i  # which row of the mask it takes
            shift = {"itself": -1, "ahead": 1, "blind": S, "corner": T - S}.get(mistake, 0)
            seen = max(0, min(S, S - T + t + 1 + shift))  # keys 0 to seen - 1
            weights = (torch.einsum("bd,bsd->bs", q[:, h, i], k[:, kv, :seen]) * scale).softmax(-1)
            out[:, h, i] = torch.einsum("bs,bsd->bd", weights, v[:, kv, :seen])
    return out


MISTAKES = {
    "heads": "Query head h reads KV head h // G, not h % Hkv.",
    "rows": "The rows of the mask are in another order than the queries: T of the first head, T of the next (repeat).",
    "blind": "A query sees keys after itself: a chunk needs its mask.",
    "corner": "Its mask is aligned to the first keys; the T queries are the last T of the S positions.",
    "itself": "A query sees its own key as well.",
    "ahead": "A query sees the key after itself: the mask is off by one.",
    "no scale": "The scores are not divided by sqrt(D).",
    "squared scale": "The scores are divided by D, not by its root.",
    "scale of G": "The scores are divided by sqrt(G D): a row has D numbers, however many rows a group has.",
}  # fmt: skip


def measured(function, *args: object) -> int:
    """Bytes that a call moves, whose values are known to be right already."""
    try:
        return moved_bytes(function, *args)
    except Wrong as error:
        reason = (str(error).partition(") ")[2] or str(error)).rstrip(".")  # without the call that it is about
        raise Wrong(
            f"Its values are right, but counting its bytes {reason}. Give "
            "F.scaled_dot_product_attention tensors of four dimensions."
        ) from None


def within(moved: int, least: int, due: int, limit: float, what: str, hints: dict[float, str]) -> None:
    """`moved` must be `least` bytes or more, and below `limit` times the `due` ones. Hints go by the ratio, largest first."""
    if moved < least:
        raise Wrong(
            f"{what} seems to move {moved:,} bytes, fewer than the {least:,} that it is given and returns: "
            "compute with PyTorch's operators."
        )
    if moved >= limit * due:
        hint = next((text for ratio, text in hints.items() if moved >= ratio * due), "")
        raise Wrong(f"{what} moves {moved / due:.1f} times their bytes.{' ' if hint else ''}{hint}")


@exercise(points=4)
def test_grouped_attention(grouped_attention):
    shapes = [
        (1, 6, 2, 1, 9, 8),  # decode
        (2, 6, 2, 4, 11, 6),  # a chunk
        (2, 6, 3, 5, 5, 4),  # all new
        (3, 4, 4, 3, 7, 8),  # G = 1
        (1, 5, 1, 2, 8, 10),  # Hkv = 1
        (2, 8, 4, 1, 1, 4),  # one token
        (1, 9, 3, 6, 33, 16),
        (1, 8, 2, 4, 11, 6),  # as many tokens as above, and other heads: what was kept from there does not fit
        (1, 2, 1, 3, 5000, 2),  # a long text
    ]
    # Float64 is off by some 1e-15 on values of about 1, float32 by 1e-6, bfloat16 by 8e-3 for each of a few roundings.
    for B, Hq, Hkv, T, S, D in shapes:
        q, k, v = normal(B, Hq, T, D), normal(B, Hkv, S, D, seed=1), normal(B, Hkv, S, D, seed=2)
        answer = ask(grouped_attention, q, k, v)
        answer.label = f"grouped_attention with Hq = {Hq}, Hkv = {Hkv}, T = {T}, S = {S}, D = {D}"
        likely = {text: partial(attention, q, k, v, name) for name, text in MISTAKES.items()}
        answer.tensor(attention(q, k, v), likely, atol=1e-9, dtype=torch.float64)
    q, k, v = normal(1, 4, 6, 8) * 1000, normal(1, 2, 6, 8, seed=1) * 1000, normal(1, 2, 6, 8, seed=2)
    answer = ask(grouped_attention, q, k, v)  # scores of millions: exp of them is beyond float64, and -1e4 is not low
    answer.label = "grouped_attention of large scores"
    answer.tensor(attention(q, k, v), atol=1e-6)
    for dtype, atol in ((torch.bfloat16, 0.05), (torch.float32, 1e-5)):
        q, k, v = (
            normal(1, 4, 3, 8).to(dtype),
            normal(1, 2, 6, 8, seed=1).to(dtype),
            normal(1, 2, 6, 8, seed=2).to(dtype),
        )
        answer = ask(grouped_attention, q, k, v)
        answer.label = f"grouped_attention of {dtype}".replace("torch.", "")
        answer.tensor(attention(q, k, v), atol=atol, dtype=dtype)
    # Without a copy: 1.01 times the bytes of k and v with a fused kernel, 1.3 where scores are written out (2.1 with 4 tokens).
    # One copy of the keys alone, of no head twice, adds 1.0; a key loaded for each query head makes it G, copied heads 2 G + 1.
    for B, Hq, Hkv, T, S, D in [
        (1, 16, 2, 1, 600, 128),
        (2, 12, 3, 1, 400, 128),
        (1, 8, 1, 1, 700, 128),
        (1, 16, 2, 4, 600, 128),
    ]:
        G = Hq // Hkv
        q, k, v = (normal(B, H, n, D, seed=3).float() for H, n in ((Hq, T), (Hkv, S), (Hkv, S)))
        answer = ask(grouped_attention, q, k, v)
        answer.label = f"grouped_attention with Hq = {Hq}, Hkv = {Hkv}, T = {T}, S = {S}, D = {D}"
        answer.tensor(attention(q, k, v), atol=1e-5)
        others = normal(B, Hq, T, D, seed=6).float()  # so that a result that was kept is of no use
        moved = measured(grouped_attention, others, k, v)
        hints = {
            2 * G - 1.0: "It copies them for each query head, as repeat_interleave does, or a matrix product that broadcasts.",
            G - 0.5: f"Each is loaded for each of the {G} query heads of its group: make these the rows of one matrix.",
            1.9: "Something copies keys or values: read them where they lie.",
        }  # fmt: skip
        what = f"With {T} new token{'s' * (T > 1)} and {Hq} query heads on {Hkv} keys and values, it"
        due = k.nbytes + v.nbytes
        within(moved, due + 2 * q.nbytes, due, 1.9 if T == 1 else 4.0, what, hints)  # q and the result, too


# --- the cache

LONG = ModelConfig("long", 2, 64, 16, 2, 64, 8, 11, 8192)  # G = 8, to count bytes with


class Suspect:
    """A simple cache with one mistake in it, to tell which one a learner's logits come from."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.length = mistake, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, n_tokens: int) -> Tensor:
        start, self.length = self.length, self.length + n_tokens
        return torch.arange(start, self.length)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slot = 0 if self.mistake == "shared" else layer
        before = self.length - q.shape[2]
        if before and self.mistake != "forgets":
            k, v = (torch.cat([old[:, :, :before], new], 2) for old, new in zip(self.kept[slot], (k, v), strict=True))
        self.kept[slot] = (k, v)
        if self.mistake == "turned":
            k, v = v, k
        return attention(q, k, v, self.mistake).to(q.dtype)


CACHE_MISTAKES = MISTAKES | {
    "shared": "Each layer needs keys and values of its own.",
    "forgets": "A pass sees nothing of what the passes before it kept.",
    "turned": "Keys and values are exchanged.",
}
SUSPECTS = {sentence: partial(Suspect, mistake) for mistake, sentence in CACHE_MISTAKES.items()}


def count_decode(make) -> None:
    """One decode step over many tokens in a cache with room for far more: its values, then its bytes."""
    Hq, Hkv, D, S = LONG.n_heads, LONG.n_kv_heads, LONG.head_dim, 301
    cache = Checked(make, LONG, 8000)
    k, v = normal(2, 1, Hkv, S, D, seed=1).float(), normal(2, 1, Hkv, S, D, seed=2).float()  # (L, B, Hkv, S, D)
    q = normal(1, Hq, 1, D).float()
    cache.positions(S - 2)
    for layer in range(2):
        cache.attend(layer, q.expand(-1, -1, S - 2, -1).contiguous(), k[layer, :, :, :-2], v[layer, :, :, :-2])
    cache.positions(1)
    for layer in range(2):
        answer = ask(cache.cache.attend, layer, q, k[layer, :, :, -2:-1], v[layer, :, :, -2:-1])
        answer.label = f"GroupedKVCache.attend in decode over {S - 1} tokens"
        answer.tensor(attention(q, k[layer, :, :, :-1], v[layer, :, :, :-1]), atol=1e-5)
    cache.positions(1)
    G = Hq // Hkv
    for layer in range(2):
        moved = measured(cache.cache.attend, layer, q + 1, k[layer, :, :, -1:], v[layer, :, :, -1:])
        hints = {
            20.0: "It reads what is still empty, too: a step should not depend on the capacity.",
            2 * G - 1.0: "It copies heads before it attends.",
            G - 0.5: f"It reads a key and a value for each of the {Hq} query heads; k and v have {Hkv} heads, so keep {Hkv}.",
        }  # fmt: skip
        what = f"A decode step over {S} tokens, with {Hkv} keys and values each,"
        due = k[layer].nbytes + v[layer].nbytes
        within(moved, due + 2 * q.nbytes, due, 6.0, what, hints)


@exercise(points=3)
def test_grouped_cache(GroupedKVCache):
    for config in (GQA, MHA, MQA):
        compare(GroupedKVCache, config, 1, [7, 1, 1, 1], SUSPECTS)
    compare(GroupedKVCache, GQA, 2, [4, 1, 1], SUSPECTS)
    for sizes in ([2, 3, 4], [3, 3, 3], [1] * 5, [5, 4, 1, 3]):
        compare(GroupedKVCache, GQA, 1, sizes, SUSPECTS)
    compare(GroupedKVCache, MQA, 3, [6, 5, 1, 2], SUSPECTS)
    compare(GroupedKVCache, MHA, 1, [3, 2, 1], SUSPECTS, torch.bfloat16)
    compare(GroupedKVCache, GQA, 1, [3, 2, 1], SUSPECTS, torch.float64)
    compare_two(GroupedKVCache)
    refuses(Checked(GroupedKVCache, GQA, 2).cache.positions, 3, because="as it has room for 2 tokens")
    attend_deep(GroupedKVCache)
    count_decode(GroupedKVCache)
    return run_real(GroupedKVCache)


# --- fewer heads


def pooled(weight: Tensor, D: int, n: int, how: Callable[[Tensor], Tensor]) -> Tensor:
    """`how` makes one head (D, ...) of those of a group (G, D, ...)."""
    G = weight.shape[0] // D // n
    return torch.cat([how(torch.stack(weight[g * G * D : (g + 1) * G * D].split(D))) for g in range(n)])


@exercise(points=2)
def test_pool_heads(pool_heads):
    for H, D, C, n in [
        (6, 4, 5, 2),
        (9, 8, 3, 3),
        (8, 2, 7, 1),
        (4, 6, 10, 4),
        (12, 4, 6, 3),
        (8, 3, 0, 4),
        (16, 5, 1, 8),
    ]:
        weight = normal(H * D, C, seed=H) if C else normal(H * D, seed=H)  # C = 0: a bias
        G = H // n
        likely = {
            "It pools heads that are apart; those that become one head are neighbours.": lambda w=weight, G=G, n=n, D=D: (
                w.reshape(G, n * D, *w.shape[1:]).mean(0)
            ),
            "It pools neighbouring rows; a row goes with the same row of the other heads.": lambda w=weight, G=G, n=n, D=D: (
                w.reshape(n * D, G, *w.shape[1:]).mean(1)
            ),
            "It adds the heads up: the mean divides by how many there are.": partial(pooled, weight, D, n, lambda x: x.sum(0)),
            "It keeps the first head of each group; the mean is asked for.": partial(pooled, weight, D, n, lambda x: x[0]),
            "It keeps the first heads; the mean of each group is asked for.": lambda w=weight, n=n, D=D: w[: n * D],
            "It takes the median; the mean is asked for.": partial(pooled, weight, D, n, lambda x: x.median(0).values),
        }  # fmt: skip
        answer = ask(pool_heads, weight, D, n)
        answer.label = f"pool_heads of {tuple(weight.shape)} from {H} heads of {D} to {n}"
        answer.tensor(pooled(weight, D, n, lambda x: x.mean(0)), likely, atol=1e-12, dtype=torch.float64)
    weight = normal(24, 5).bfloat16()
    answer = ask(pool_heads, weight, 4, 2)
    answer.label = "pool_heads of bfloat16"
    answer.tensor(pooled(weight.double(), 4, 2, lambda x: x.mean(0)), atol=0.02, dtype=torch.bfloat16)
    for H, n in ((6, 4), (4, 6), (3, 2), (2, 4)):
        refuses(pool_heads, normal(H * 4, 5), 4, n, because=f"as {H} heads cannot be pooled into {n}")


def config_json(layers: int, heads: int, width: int, **others: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width} | others


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
CONFIGS = {  # what matters of each model's config.json on the Hugging Face hub
    "Llama-2-7B": config_json(32, 32, 4096, num_key_value_heads=32),
    "Llama-3-8B": config_json(32, 32, 4096, num_key_value_heads=8),
    "Qwen3-4B": config_json(36, 32, 2560, num_key_value_heads=8, head_dim=128),
    "SmolLM2-135M": config_json(30, 9, 576, num_key_value_heads=3),
    "OPT-30B": config_json(48, 56, 7168),
    "Gemma-2B": config_json(18, 8, 2048, num_key_value_heads=1, head_dim=256),
    "DeepSeek-V2-Lite": config_json(27, 16, 2048, num_key_value_heads=16, **MLA),
    "DeepSeek-V3": config_json(61, 128, 7168, num_key_value_heads=128, head_dim=64, **MLA),
    "MiniCPM3-4B": config_json(
        62, 40, 2560, num_key_value_heads=40, kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64
    ),
    "a model with MLA and one KV head": config_json(5, 12, 768, num_key_value_heads=1, **MLA | {"kv_lora_rank": 200}),
    "a model with MLA that names no KV heads": config_json(7, 6, 384, **MLA | {"qk_rope_head_dim": 48}),
}


@exercise(points=2)
def test_tokens_that_fit(tokens_that_fit):
    for name, config in CONFIGS.items():
        L, Hq = config["num_hidden_layers"], config["num_attention_heads"]
        Hkv, latent = config.get("num_key_value_heads", Hq), "kv_lora_rank" in config
        D = config.get("head_dim", config["hidden_size"] // Hq)
        d_c, d_r = config.get("kv_lora_rank", 0), config.get("qk_rope_head_dim", 0)
        d_nope, d_v = config.get("qk_nope_head_dim", 0), config.get("v_head_dim", 0)
        numbers = d_c + d_r if latent else 2 * Hkv * D
        for memory, size in (
            (16e9, 2.0),
            (1e9, 1.0),
            (2.5e9, 4.0),
            (7e8, 0.5),
            (37.0 * L * numbers * 2, 2.0),
            (3e9, 0.515625),  # 4 bits and a share of a scale
            (5e8, 1.003),
            (1e3, 2.0),
        ):

            def fits(numbers: int, layers: int = L, size: float = size, memory: float = memory) -> int:
                return int(Fraction(memory) // (layers * numbers * Fraction(size)))

            likely = {
                "Tokens are whole, and the last one must fit: round down.": memory / (L * numbers * size),
                "Half a token does not fit: round down.": fits(numbers) + 1,
                "A model with kv_lora_rank keeps latents, whatever num_key_value_heads says.": fits(2 * Hkv * D),
                "Keys and values of all heads are not kept: they follow from the latent.": fits(Hq * (d_nope + d_r + d_v) or 1),
                "The rotated key is kept beside the latent.": fits(d_c or 1),
                "There is one rotated key for all heads.": fits(d_c + Hq * d_r or 1),
                "A latent is key and value at once: it is kept once.": fits(2 * (d_c + d_r) or 1),
                "It keeps KV heads, not query heads.": fits(2 * Hq * D),
                "Where num_key_value_heads is missing, each query head has its own.": fits(2 * D),
                "A key and a value: 2 of them.": fits(Hkv * D),
                "head_dim, where the config has one, is not hidden_size / num_attention_heads.": fits(
                    2 * Hkv * (config["hidden_size"] // Hq)
                ),
                "Each layer keeps its own.": fits(numbers, layers=1),
                "It ignores the bytes of a number.": fits(numbers, size=2.0),
                "A GB is 1e9 bytes here, and `memory` is in bytes.": fits(numbers, memory=memory * 2**30 / 1e9),
            }  # fmt: skip
            answer = ask(tokens_that_fit, config, memory, size)
            answer.label = f"tokens_that_fit for {name}, {memory:.6g} bytes and {size:g} bytes a number,"
            answer.number(fits(numbers), likely, rtol=1e-12)


# --- intensity


def counted_intensity(Hq: int, Hkv: int, S: int, T: int, size: float) -> float:
    """FLOP per byte of a fused kernel, as minillm counts it on tensors without contents."""
    q, k, v = (torch.empty(1, H, n, 16, dtype=torch.bfloat16, device="meta") for H, n in ((Hq, T), (Hkv, S), (Hkv, S)))
    cost = count(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    return cost.flops / (cost.bytes / 2 * size)


@exercise(points=2)
def test_attention_intensity(attention_intensity):
    for Hq, Hkv in [(32, 8), (9, 3), (32, 32), (8, 1), (64, 8)]:
        for S, T, size in [(4096, 1, 2.0), (100, 1, 4.0), (512, 512, 2.0), (3000, 7, 1.0), (10, 1, 0.5), (1, 1, 2.0)]:
            expected, G = counted_intensity(Hq, Hkv, S, T, size), Hq // Hkv

            def formula(flops: int, numbers: int, size: float = size) -> float:
                return flops / (numbers * size)

            flops = 4 * Hq * S * T
            kv, qo = 2 * Hkv * S, 2 * Hq * T  # numbers of keys and values, of queries and results
            likely = {
                "Queries are read and results are written, too.": formula(flops, kv),
                "Results are written, too.": formula(flops, kv + qo // 2),
                "The query heads share: G of them do arithmetic with each key.": formula(flops // G, kv + qo),
                "There are queries and results for each query head.": formula(flops, kv + qo // G),
                "Keys and values are read once for a group, not for each query head.": formula(flops, G * kv + qo),
                "Keys and values are read: 2 of them.": formula(flops, kv // 2 + qo),
                "Attention multiplies with keys and with values, each time 2 FLOPs: 4.": formula(flops // 2, kv + qo),
                "A key is read once for all new tokens, each of which has a query.": formula(flops, kv * T + qo),
                "It ignores the bytes of a number.": formula(flops, kv + qo, 2.0),
                "It leaves out how many bytes a number takes.": formula(flops, kv + qo, 1.0),
                "That is upside down: FLOPs over bytes.": 1 / expected,
            }
            ask(attention_intensity, Hq, Hkv, S, T, size).number(expected, likely)


# --- latents


def latent_attention(
    q_nope: Tensor, q_rope: Tensor, c: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, mistake: str = ""
) -> Tensor:
    """The definition: keys and values of each head, made from the latents. Right, or with a mistake in it."""
    d_nope, d_r, d_c = q_nope.shape[-1], q_rope.shape[-1], c.shape[-1]
    numbers = {"of the latent": d_c + d_r, "of d_nope": d_nope, "of d_c": d_c, "of d_r": d_r, "no scale": 1}
    scale = numbers.get(mistake, d_nope + d_r) ** -0.5
    out = []
    for h in range(q_nope.shape[1]):
        head = 0 if mistake == "one head" else h
        k, v = c @ w_uk[head].T, c @ w_uv[head].T  # (B, S, d_nope), (B, S, d_v)
        positionless = torch.einsum("bn,bsn->bs", q_nope[:, h], k)
        rotated = torch.einsum("br,bsr->bs", q_rope[:, h], k_rope)
        if mistake == "no rope":
            rotated = torch.zeros_like(rotated)
        if mistake == "only rope":
            positionless = torch.zeros_like(positionless)
        if mistake == "two softmaxes":
            weights = ((positionless * scale).softmax(-1) + (rotated * scale).softmax(-1)) / 2
        elif mistake == "half scaled":
            weights = (positionless * scale + rotated).softmax(-1)
        elif mistake == "two scales":
            weights = (positionless * d_nope**-0.5 + rotated * d_r**-0.5).softmax(-1)
        else:
            weights = ((positionless + rotated) * scale).softmax(-1)
        out.append(torch.einsum("bs,bsv->bv", weights, v))
    return torch.stack(out, dim=1)  # (B, Hq, d_v)


LATENT_MISTAKES = {
    "of the latent": "Its scale is that of the latent, d_c + d_r; it is that of a head's query, d_nope + d_r, in both forms.",
    "of d_nope": "Its scale forgets the rotated part: the root of d_nope + d_r.",
    "of d_c": "Its scale is that of the latent, d_c; it is the root of d_nope + d_r.",
    "of d_r": "Its scale forgets the part without position: the root of d_nope + d_r.",
    "no scale": "The scores are not scaled: divide by the root of d_nope + d_r.",
    "no rope": "The rotated part of the score is missing: q_rope . k_rope.",
    "only rope": "The part of the score without position is missing.",
    "two softmaxes": "The two parts of a score are added before the softmax: there is one softmax.",
    "half scaled": "Both parts of the score are scaled.",
    "two scales": "Both parts of the score have one scale, the root of d_nope + d_r.",
    "one head": "Each head has a w_uk and a w_uv of its own.",
}


@exercise(points=3)
def test_absorbed_mla(absorbed_mla):
    def given(B: int, Hq: int, S: int, d_nope: int, d_r: int, d_c: int, d_v: int) -> tuple[Tensor, ...]:
        weights = normal(Hq, d_nope, d_c, seed=5) / d_c**0.5 * 2, normal(Hq, d_v, d_c, seed=6) / d_c**0.5
        return (
            normal(B, Hq, d_nope, seed=1),
            normal(B, Hq, d_r, seed=2),
            normal(B, S, d_c, seed=3),
            normal(B, S, d_r, seed=4),
            *weights,
        )

    sizes = [
        (1, 3, 7, 4, 2, 6, 5),
        (2, 4, 9, 8, 4, 24, 6),
        (3, 1, 5, 6, 6, 6, 6),
        (2, 5, 1, 4, 2, 12, 3),
        (1, 8, 33, 5, 3, 9, 9),
        (4, 2, 3, 2, 8, 16, 7),
    ]
    for B, Hq, S, d_nope, d_r, d_c, d_v in sizes:
        args = given(B, Hq, S, d_nope, d_r, d_c, d_v)
        answer = ask(absorbed_mla, *args)
        answer.label = f"absorbed_mla with Hq = {Hq}, S = {S}, d_nope = {d_nope}, d_r = {d_r}, d_c = {d_c}, d_v = {d_v}"
        likely = {text: partial(latent_attention, *args, name) for name, text in LATENT_MISTAKES.items()}
        answer.tensor(latent_attention(*args), likely, atol=1e-9, dtype=torch.float64)
    q_nope, q_rope, *rest = given(1, 2, 6, 8, 4, 10, 5)
    answer = ask(absorbed_mla, q_nope * 2000, q_rope * 2000, *rest)  # exp of these scores is beyond float64
    answer.label = "absorbed_mla of large scores"
    answer.tensor(latent_attention(q_nope * 2000, q_rope * 2000, *rest), atol=1e-6)
    # Bytes over those of what is cached: 2.6 as in the solution, 4.8 where latents and keys are joined first; expanding
    # the keys alone or the values alone makes it 9, both 16, a latent copied for each head as much.
    for B, Hq, S, d_nope, d_r, d_c, d_v in [(1, 8, 1500, 32, 16, 64, 32), (2, 8, 1000, 32, 8, 64, 48)]:
        args = tuple(x.float() for x in given(B, Hq, S, d_nope, d_r, d_c, d_v))
        answer = ask(absorbed_mla, *args)
        answer.label = f"absorbed_mla with Hq = {Hq}, S = {S}, d_nope = {d_nope}, d_r = {d_r}, d_c = {d_c}, d_v = {d_v}"
        answer.tensor(latent_attention(*(x.double() for x in args)), atol=1e-5)
        moved = measured(absorbed_mla, args[0] + 1, *args[1:])  # a result that was kept is of no use
        cached, given_bytes = args[2].nbytes + args[3].nbytes, sum(x.nbytes for x in args)
        hint = (
            "It makes keys or values, or copies latents, for each head: move w_uk to the query and w_uv to the weighted sum, "
            "and let no matrix product broadcast."
        )
        least = given_bytes + 4 * B * Hq * d_v
        within(moved, least, cached, 6.0, f"With {Hq} heads over {S} latents, it", {0.0: hint})


# --- what it gains


@cache
def step_bytes(make: type, context: int) -> float:
    """Bytes that one decode step of SmolLM2 in float32 moves. Layers are alike, so two are counted and the rest follows."""
    config, moved = KNOWN_MODELS["smollm2-135m"], []
    for n in (1, 2):
        twin = meta_twin(replace(config, n_layers=n), torch.float32, positions=context)
        store = make(twin, capacity=context)
        store.length = context - 1
        token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        moved.append(count(lambda twin=twin, store=store, token=token: twin(token, store)).bytes)
    return of_all_layers(*moved, config)


def counted_ratio(context: int) -> float:
    """How many times more a step of kv_cache moves than one of gqa: the speed-up, where moving bytes is what takes the time."""
    return step_bytes(kv_cache.KVCache, context) / step_bytes(gqa.GroupedKVCache, context)


def counted_context(ratio: float) -> float:
    """From how many tokens on that ratio is reached. The bytes of both stages grow in a straight line."""
    (a1, a2), (b1, b2) = [
        (step_bytes(make, 1000), step_bytes(make, 1001) - step_bytes(make, 1000))
        for make in (kv_cache.KVCache, gqa.GroupedKVCache)
    ]
    return 1000 + (ratio * b1 - a1) / (a2 - ratio * b2)


@exercise(points=1)
def test_sharing_guesses(sharing_guesses):
    right = counted_ratio(256), counted_ratio(8192), counted_context(1.5)
    reasons = [
        (
            "Over 256 tokens",
            "a step is a little faster, by what the cache adds to the weights",
            "weights are nearly all that it reads, and these are the same for both",
        ),
        (
            "Over 8,192 tokens",
            "kv_cache reads the keys and values G times, which is more than all weights by now",
            "both read the weights, so the ratio stays below G",
        ),
        (
            "For a step 1.5 times as fast",
            "at that length the weights still outweigh what sharing saves",
            "solve (W + G S KV) / (W + S KV) = 1.5 for S, KV being 2 x 30 x 3 x 64 x 4 bytes",
        ),
    ]
    what = "three numbers: the ratio over 256 tokens, over 8,192, and a number of tokens"
    value = judge_guesses(ask(sharing_guesses), right, 0.03, what, reasons)
    given, counted = (f"{a:.3f}, {b:.3f} and {c:,.0f} tokens" for a, b, c in (value, right))
    return f"You said {given}; counted by operators it is {counted}."
