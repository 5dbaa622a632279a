"""Grader of chapter 1. Every expected value is computed here, in float64 and by brute force, not taken from the solution."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import PROMPT, Answer, Wrong, ask, continued, example_model, exercise
from minillm.roofline.position import count_run, meta_twin
from minillm.stages import naive

ODD = ModelConfig("odd", 3, 40, 6, 2, 10, 56, 101, 512)  # A is not C, and no two of its numbers are alike
WIDE = ModelConfig("wide", 1, 5, 99, 99, 2, 3, 6, 512)  # odd weights: FLOPs that no float64 holds


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape)).float()


# --- attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Callable[[int, int, int], bool] = lambda i, j, offset: j <= offset + i,
    scale: float | None = None,
    hidden: float = -math.inf,
) -> Tensor:
    """Key by key: query i of T sees key j of S if `sees(i, j, S - T)`. A query that sees nothing gives 0."""
    q64, k64, v64 = (x.double().numpy() for x in (q, k, v))
    T, S, D = q.shape[2], k.shape[2], q.shape[3]
    out = np.zeros(q.shape)
    for i in range(T):
        scores = np.einsum("bhd,bhsd->bhs", q64[:, :, i], k64) * (D**-0.5 if scale is None else scale)
        visible = np.array([sees(i, j, S - T) for j in range(S)])
        if not visible.any() and hidden == -math.inf:
            continue
        scores = np.where(visible, scores, hidden)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, i] = np.einsum("bhs,bhsd->bhd", weights / weights.sum(-1, keepdims=True), v64)
    return torch.from_numpy(out)


def attention_mistakes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    S, D = k.shape[2], q.shape[3]
    return {
        "Every query sees every key: the mask is missing.": lambda: attention(q, k, v, lambda i, j, o: True),
        "Its mask is aligned to the first keys; the T queries are the last T of the S positions.": lambda: attention(
            q, k, v, lambda i, j, o: j <= i
        ),
        "A query sees its own key as well.": lambda: attention(q, k, v, lambda i, j, o: j < o + i),
        "A query sees the key after itself: the mask is off by one.": lambda: attention(
            q, k, v, lambda i, j, o: j <= o + i + 1
        ),
        "Its mask is turned round: a query sees what comes before it.": lambda: attention(
            q, k, v, lambda i, j, o: j >= o + i
        ),
        "The scores are not divided by sqrt(D).": lambda: attention(q, k, v, scale=1.0),
        "The scores are divided by D, not by its root.": lambda: attention(q, k, v, scale=1 / D),
        "They are divided by sqrt(S); it is the head size D.": lambda: attention(q, k, v, scale=S**-0.5),
        "A hidden score must become -inf before the softmax: with 0 it still gets weight.": lambda: attention(
            q, k, v, hidden=0.0
        ),
        "It gives a hidden key weight: mask before the softmax, not after.": lambda: late_mask(q, k, v),
        "The softmax runs over the keys, the last dimension, not over the queries.": lambda: over_queries(q, k, v),
    }


def late_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    weights = (q.double() @ k.double().transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1)
    return (weights * torch.ones(T, S).tril(S - T)) @ v.double()


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    scores = q.double() @ k.double().transpose(2, 3) / q.shape[3] ** 0.5
    return scores.masked_fill(~torch.ones(T, S).tril(S - T).bool(), -torch.inf).softmax(-2) @ v.double()


@exercise(points=3)
def test_causal_attention(causal_attention):
    shapes = [(2, 3, 5, 5, 8), (1, 2, 3, 8, 6), (2, 2, 1, 7, 4), (1, 1, 1, 1, 2), (3, 1, 4, 5, 16), (1, 4, 2, 33, 10)]
    # Float32 is off by some 1e-6 on values of about 1, bfloat16 by half a unit, 8e-3, for each of a few roundings.
    for B, H, T, S, D in shapes:
        q, k, v = normal(B, H, T, D), normal(B, H, S, D, seed=1), normal(B, H, S, D, seed=2)
        answer = ask(causal_attention, q, k, v)
        answer.label = f"causal_attention with T = {T}, S = {S}, D = {D}"
        answer.tensor(attention(q, k, v), attention_mistakes(q, k, v), atol=2e-5, dtype=torch.float32)
    q, k, v = normal(1, 2, 4, 8) * 1000, normal(1, 2, 6, 8, seed=1) * 1000, normal(1, 2, 6, 8, seed=2)
    answer = ask(causal_attention, q, k, v)  # scores of millions: exp of them is beyond float32, and -1e4 is not low
    answer.label = "causal_attention of large scores"
    answer.tensor(attention(q, k, v), attention_mistakes(q, k, v), atol=1e-3)
    q, k, v = (normal(1, 2, 6, 8, seed=seed).bfloat16() for seed in range(3))
    answer = ask(causal_attention, q, k, v)
    answer.label = "causal_attention of bfloat16"
    answer.tensor(attention(q, k, v), atol=0.05, dtype=torch.bfloat16)


# --- rope


def turned(
    x: Tensor,
    positions: Tensor,
    theta: float,
    interleaved: bool = False,
    sign: float = 1.0,
    exponent: Callable[[int, int], float] = lambda i, D: 2 * i / D,
    shift: int = 0,
) -> Tensor:
    """Each pair as a complex number, multiplied by e^(i angle)."""
    D = x.shape[-1]
    out = x.double().numpy().copy()
    for i in range(D // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + D // 2)
        angle = (positions.double().numpy() + shift) * theta ** -exponent(i, D) * sign
        pair = (out[..., a] + 1j * out[..., b]) * np.exp(1j * angle)[:, None, :]
        out[..., a], out[..., b] = pair.real, pair.imag
    return torch.from_numpy(out)


@exercise(points=3)
def test_rope(rope):
    cases = [
        ((1, 2, 5, 8), [[2, 3, 4, 5, 6]], 1e4),
        ((2, 3, 4, 16), [[4, 5, 6, 7], [37, 38, 39, 40]], 1e5),  # rows that stand at positions of their own
        ((1, 1, 1, 64), [[501]], 1e6),
        ((2, 1, 3, 2), [[7, 2, 90], [5, 1, 0]], 1e4),  # one pair a head; positions in no order
        ((1, 4, 1, 6), [[0]], 1e4),
        ((1, 2, 3, 32), [[2047, 4999, 8191]], 5e5),  # a long text
    ]
    for shape, rows, theta in cases:
        x, positions = normal(*shape), torch.tensor(rows)
        count_up = torch.arange(shape[2]).expand(positions.shape)
        turn = partial(turned, x, positions, theta)
        likely = {
            "It pairs neighbours (2i, 2i + 1); in the half-split order i goes with i + D/2.": partial(
                turn, interleaved=True
            ),
            "It turns the other way round: mind the signs of the sines.": partial(turn, sign=-1.0),
            "The exponent is -2 i / D; yours is half of that.": partial(turn, exponent=lambda i, D: i / D),
            "The exponent is negative: later pairs turn more slowly.": partial(turn, exponent=lambda i, D: -2 * i / D),
            "It counts from 0 and ignores the positions that it is given.": partial(turned, x, count_up, theta),
            "Its positions are one too large: the first position is 0.": partial(turn, shift=1),
            "It ignores theta.": partial(turned, x, positions, 1e4),
            "Each row of the batch has positions of its own.": partial(
                turned, x, positions[:1].expand_as(positions), theta
            ),
        }
        # In float32 a frequency theta^-e is off by (e ln theta + 3) 2^-24 of itself, so the angle of position p by p 2^-22.
        atol = 1e-5 + 2**-22 * max(map(max, rows)) * 2**0.5 * float(x.abs().max())
        answer = ask(rope, x, positions, theta)
        answer.label = f"rope at positions {rows} with theta {theta:g}"
        answer.tensor(turned(x, positions, theta), likely, atol, dtype=torch.float32)
    x, positions = normal(1, 2, 3, 32).bfloat16(), torch.tensor([[300, 301, 302]])
    answer = ask(rope, x, positions)
    answer.label = "rope of bfloat16 at positions 300 to 302, with angles in float32,"
    answer.tensor(turned(x, positions, 1e4), atol=0.02, dtype=torch.bfloat16)  # half a unit of numbers below 8 is 0.016


# --- sampling


@exercise(points=1)
def test_greedy(greedy):
    masked = normal(2, 9)
    masked[:, ::2] = -torch.inf
    low = -5 - normal(3, 4, seed=3).abs()
    whole = normal(2, 50_000, seed=6)  # a whole vocabulary, whose ids need more than 16 bits
    whole[0, 49_151] = 9.0
    for logits in [
        normal(4, 6),
        normal(1, 7, seed=1),
        normal(5, 97, seed=2),
        low,
        masked,
        whole,
        torch.tensor([[-2.5], [1.0]]),
        torch.tensor([[9.999, 10.0, 1.0, 10.001], [8.0, 8.001, 8.0005, -9.0]]),  # bfloat16 cannot tell them apart
    ]:
        answer = ask(greedy, logits)
        expected = [max(range(len(row)), key=row.__getitem__) for row in logits.tolist()]
        if isinstance(answer.value, Tensor) and answer.value.is_floating_point():
            raise answer.wrong("returns logits or probabilities where token ids are due: whole numbers.")
        likely = {
            "It takes the least probable token.": lambda x=logits: x.argmin(-1),
            "It compares the rows with each other: go along the vocabulary, the last dimension.": lambda x=logits: x.argmax(0),
            "It compares magnitudes: a logit far below 0 is improbable.": lambda x=logits: x.abs().argmax(-1),
        }  # fmt: skip
        answer.tensor(torch.tensor(expected), likely, atol=0)


def nucleus(row: list[float], p: float, crossing: bool = True, scaled: bool = True) -> list[float]:
    """Top-p of one row of logits, token by token from the most probable down."""
    largest = max(row)
    mass = [math.exp(x - largest) for x in row]
    probabilities = [x / math.fsum(mass) for x in mass]
    kept: dict[int, float] = {}
    reached = 0.0
    for token in sorted(range(len(row)), key=lambda token: -probabilities[token]):
        reached += probabilities[token]
        if reached >= p and not crossing and kept:
            break
        kept[token] = probabilities[token]
        if reached >= p:
            break
    total = math.fsum(kept.values()) if scaled else 1.0
    return [kept.get(token, 0.0) / total for token in range(len(row))]


@exercise(points=2)
def test_top_p(top_p):
    peaked = torch.tensor([[0.5, 3.0, -1.0, 2.0, 1.25], [4.0, 0.0, 0.25, -3.0, 1.0]])
    cases = [
        (peaked, 0.75),
        (peaked, 0.95),
        (normal(3, 50) * 2, 0.9),
        (normal(1, 11, seed=1), 0.3),
        (peaked, 1e-6),
        (peaked, 0.0),
        (normal(2, 7, seed=2), 1.0),
        (torch.tensor([[2.0]]), 0.5),
        (normal(2, 400, seed=4) * 30 + 500, 0.99),  # large logits: exp of them is beyond float32
        (normal(2, 300, seed=5).bfloat16(), 0.8),
    ]
    for logits, p in cases:
        rows = logits.tolist()

        def table(rows=rows, p=p, **options) -> Tensor:
            return torch.tensor([nucleus(row, p, **options) for row in rows])

        expected = table()
        order = logits.argsort(dim=-1, descending=True)
        kept = [sum(x > 0 for x in row) for row in expected.tolist()]
        likely = {
            "It drops the token that crosses p, which still belongs to the nucleus.": lambda t=table: t(crossing=False),
            "What is kept must be scaled to sum to 1 again.": lambda t=table: t(scaled=False),
            "It leaves the tokens in sorted order: put each back to its own id.": lambda e=expected, o=order: e.gather(
                -1, o
            ),
            "It is the whole distribution: nothing was cut off.": lambda t=table, r=rows: t(r, 1.0),
        }
        answer = ask(top_p, logits, p)
        kind = " of bfloat16" if logits.dtype == torch.bfloat16 else ""
        answer.label = f"top_p with p = {p:g} over {logits.shape[1]} tokens{kind}"
        if isinstance(answer.value, Tensor) and bool(answer.value.isnan().any()):
            raise answer.wrong("gives NaN: no token is left. The most probable one is always kept.")
        answer.tensor(expected, likely, atol=2e-5, dtype=torch.float32)  # float32 is off by some 1e-6, bfloat16 by 4e-3
        if p < 1 and [int((row > 0).sum()) for row in answer.value] != kept:
            raise answer.wrong(f"keeps another number of tokens than {kept}: all outside the nucleus get 0.")
    answer = ask(top_p, torch.zeros(1, 4), 0.5)  # four quarters, exact in binary: the second reaches 0.5
    answer.label = "top_p with p = 0.5 over four tokens of 0.25"
    if not isinstance(answer.value, Tensor) or sorted(answer.value.flatten().tolist()) != [0.0, 0.0, 0.5, 0.5]:
        raise answer.wrong("must keep two of them: tokens that add up to p exactly have reached it.")


ROWS = 20_000


@exercise(points=2)
def test_draw(draw):
    kinds = torch.tensor(
        [[0.1, 0.0, 0.5, 0.25, 0.0, 0.15], [0.7, 0.3, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
    )
    probabilities = kinds.repeat(ROWS, 1)  # kinds of row in turn
    first = drawn(draw, probabilities, 1)
    for kind, row in enumerate(kinds.tolist()):
        tokens = first[kind :: len(kinds)]
        for token, p in enumerate(row):
            n = int((tokens == token).sum())
            if p == 0 and n:
                raise Wrong(f"draw takes a token of probability 0, {n} times of {ROWS}: it must never come up.")
            # Six standard deviations: a right answer leaves them once in 500 million draws.
            if abs(n - p * ROWS) > 6 * (ROWS * p * (1 - p)) ** 0.5:
                raise Wrong(
                    f"draw takes a token of probability {p:g} in {n / ROWS:.1%} of {ROWS:,} rows, which chance does not "
                    f"explain.{explain(tokens, row, token, n / ROWS)}"
                )
    second, third = first[0::3] == 2, first[1::3] == 0  # of probability 0.5 and 0.7
    for one, other, p in ((third[:-1], third[1:], 0.49), (second, third, 0.35)):
        if abs(int((one & other).sum()) - p * len(one)) > 6 * (len(one) * p * (1 - p)) ** 0.5:
            raise Wrong("draw gives neighbouring rows tokens that depend on each other: draw afresh for each row.")
    if not torch.equal(first, drawn(draw, probabilities, 1)):
        raise Wrong("draw gives other tokens for the same seed: make a generator from the seed in each call.")
    if torch.equal(first, drawn(draw, probabilities, 2)):
        raise Wrong("draw gives the same tokens for another seed: use the seed.")
    drawn(draw, kinds[1:2], 3)


def drawn(draw, probabilities: Tensor, seed: int) -> Tensor:
    """The learner's tokens (B,), which must be ids of the vocabulary."""
    answer = ask(draw, probabilities, seed)
    any_ids = torch.zeros(len(probabilities), dtype=torch.int64)
    answer.tensor(any_ids, atol=math.inf, dtype=torch.int64)  # the shape and the dtype
    if int(answer.value.min()) < 0 or int(answer.value.max()) >= probabilities.shape[1]:
        raise answer.wrong("returns ids outside the vocabulary.")
    return answer.value


def explain(tokens: Tensor, row: list[float], token: int, share: float) -> str:
    again = torch.tensor(row).softmax(-1)[token].item()
    if len(tokens.unique()) == 1:
        likeliest = int(tokens[0]) == max(range(len(row)), key=row.__getitem__)
        return (
            " Every row gets the likeliest token: that is greedy." if likeliest else " Every row gets the same token."
        )
    if abs(share - again) < 0.02:
        return " It takes the softmax of what are probabilities already."
    if abs(share - 1 / sum(p > 0 for p in row)) < 0.02:
        return " All possible tokens come up equally often."
    return ""


# --- the loop


class Script:
    """A model whose next token depends on every token before it, and whose other positions say something else."""

    def __init__(self, vocabulary: int = 29) -> None:
        self.vocabulary = vocabulary
        self.lengths: list[int] = []

    def next_token(self, tokens: list[int]) -> int:
        value = 7
        for token in tokens:
            value = (value * 31 + token + 3) % 1_000_003
        return value % self.vocabulary

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (1, T, V) for token ids (1, T)."""
        if not isinstance(tokens, Tensor):
            raise Wrong("generate gives forward something else than a tensor: it takes token ids of shape (1, T).")
        if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.dtype not in (torch.int64, torch.int32):
            shape, dtype = tuple(tokens.shape), str(tokens.dtype).removeprefix("torch.")
            raise Wrong(f"generate gives forward a tensor {shape} of {dtype}: it takes token ids (1, T), int64.")
        ids = tokens[0].tolist()
        self.lengths.append(len(ids))
        logits = torch.zeros(1, len(ids), self.vocabulary)
        for i in range(len(ids)):
            logits[0, i, self.next_token(ids[: i + 1])] = 5.0
            logits[0, i, (self.next_token(ids[: i + 1]) + 9) % self.vocabulary] = -8.0
        return logits

    def continuation(self, prompt: list[int], n: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


@exercise(points=3)
def test_generate(generate):
    for prompt, n in [([5, 1, 4], 6), ([2], 1), ([9, 9, 0, 3, 22, 17, 8], 12), ([0], 9)]:
        script = Script()
        whole = script.continuation(prompt, n)
        absent = next(token for token in range(29) if token not in whole)
        position = n // 2
        stop = next((token for token in whole[position:] if whole.index(token) >= position), whole[-1])
        cut = whole[: whole.index(stop) + 1]
        for stops, expected in [
            ((), whole),
            ([absent], whole),
            ([absent, stop], cut),
            ({stop, absent}, cut),
            ([whole[0]], whole[:1]),
            ([prompt[0]], whole[: whole.index(prompt[0]) + 1] if prompt[0] in whole else whole),
        ]:
            script.lengths.clear()
            answer = ask(generate, script.forward, list(prompt), n, stops)
            answer.label = f"generate after {prompt}, {n} new tokens, stop tokens {list(stops)}"
            one_more = script.continuation(prompt, len(expected) + 1)
            first = [script.next_token(prompt[:1])] * len(expected)
            likely = {
                "The prompt does not belong to the result.": [*prompt, *expected],
                "The stop token itself still belongs to the result.": expected[:-1],
                "It runs on after a stop token.": whole,
                "That is one token too many.": one_more,
                "It reads the logits of the first position: the last one speaks of the next token.": first,
                "It feeds the newest token alone; the model needs all tokens so far.": alone(
                    script, prompt, len(expected)
                ),
                "It never appends the new token to what the model sees.": expected[:1] * len(expected),
            }
            answer.tokens(expected, likely)
            passes = list(range(len(prompt), len(prompt) + len(expected)))
            if script.lengths != passes:
                raise answer.wrong(
                    f"runs forward over {script.lengths} tokens where {passes} are due: once for each new token."
                )
    script = Script()
    long = [i * i % 29 for i in range(300)]
    answer = ask(generate, script.forward, list(long), 2)
    answer.label = "generate of 2 tokens after a prompt of 300, all of which the model needs,"
    answer.tokens(script.continuation(long, 2))
    return real_text(generate)


def alone(script: Script, prompt: list[int], n: int) -> list[int]:
    tokens = [script.next_token(prompt)]
    while len(tokens) < n:
        tokens.append(script.next_token(tokens[-1:]))
    return tokens


def real_text(generate) -> str:
    model, tokenizer, which = example_model()
    prompt = tokenizer.encode(PROMPT)

    def forward(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(tokens, naive.NoCache(model))

    answer = Answer(f"generate with {which}", generate(forward, prompt, 8, sorted(tokenizer.stop_tokens)))
    due = naive.generate(model, prompt, 8, stop_tokens=tokenizer.stop_tokens).tokens
    answer.tokens(due)
    return f"Your loop just ran {which}: {continued(PROMPT, due)}"


# --- what it costs


@exercise(points=3)
def test_naive_flops(naive_flops):
    small = [(ODD, 1, 5), (ODD, 7, 4), (KNOWN_MODELS["tiny"], 3, 1)]
    large = [(KNOWN_MODELS[name], 37, 100) for name in ("smollm2-135m", "qwen3-0.6b", "llama-3-8b")]
    for config, T, n in [*small, *large, (KNOWN_MODELS["llama-3-8b"], 1, 2048), (WIDE, 1, 60_001)]:
        P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers

        def total(first: int, passes: int, P=P, AL=A * L, scores=4) -> int:
            return sum(2 * P * i + scores * AL * i * i for i in range(first, first + passes))

        expected = total(T, n)
        if (config, T, n) in small:  # operator by operator, on shapes alone
            expected = count_run(naive, meta_twin(config, torch.float32), T, n).flops
        body = config.n_layers * config.layer_matmul_params
        likely = {
            "The first pass sees the prompt alone: it runs over T tokens, not T + 1.": total(T + 1, n),
            "It has one pass too many: the last new token is never fed back.": total(T, n + 1),
            "Those are the leading terms; the exact sum has smaller ones too.": P * n**2 + 4 * A * L * n**3 / 3,
            "It forgets the prompt, over which every pass runs too.": total(1, n),
            "The head computes too: it is in P.": total(T, n, P=body),
            "Attention multiplies twice, q k^T and then the weights with v: 4 A.": total(T, n, scores=2),
            "Attention runs in each of the L layers.": total(T, n, AL=A),
            "A is the width of all query heads, which is not that of the model.": total(T, n, AL=config.d_model * L),
            "A multiplication and an addition are 2 FLOPs a weight.": total(T, n, P=P / 2),
            "A pass over i tokens has i queries, each with i keys: i^2.": sum(
                2 * P * i + 4 * A * L * i for i in range(T, T + n)
            ),
            "Without a cache every pass runs over all tokens so far.": 2 * P * (T + n - 1)
            + sum(4 * A * L * i for i in range(1, T + n)),
        }
        answer = ask(naive_flops, config, T, n)
        if answer.number(expected, likely, rtol=1e-12) != expected:
            raise answer.wrong("is close but not exact: beyond 2^53 a float rounds, so stay with whole numbers and //.")


@exercise(points=2)
def test_crossover(crossover):
    for name in ("smollm2-135m", "qwen3-0.6b", "llama-3-8b", "smollm2-1.7b", "llama-2-13b"):
        config = KNOWN_MODELS[name]
        P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
        low, high = 1.0, 1e7  # by bisection, on the two terms themselves
        while high - low > 1e-6:
            n = (low + high) / 2
            low, high = (n, high) if P * n**2 > 4 / 3 * A * L * n**3 else (low, n)
        likely = {
            "That is where one pass's attention overtakes; summed over all passes it takes longer.": P / (2 * A * L),
            "That is upside down.": 1 / low,
            "The factor is 3/4, not 4/3.": low * 16 / 9,
            "The factor 3/4 is missing.": low * 4 / 3,
            "Attention runs in each of the L layers.": low * L,
            "A is the width of all query heads, which is not that of the model.": 3 * P / (4 * config.d_model * L),
            "The head computes too: it is in P.": 3 * L * config.layer_matmul_params / (4 * A * L),
            "Queries count in A, not KV heads.": low * config.group_size,
            "P leaves out the input embedding, which is a gather.": 3 * config.parameter_count / (4 * A * L),
        }
        ask(crossover, config).number(low, likely, rtol=1e-3)  # a whole number will do: the smallest of these is 5,800
