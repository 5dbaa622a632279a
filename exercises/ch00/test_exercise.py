"""Grader of chapter 0. Every expected value is computed here, in its own way, and not taken from the solution."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import ask, exercise
from minillm.grading.counted import decode_step_s
from minillm.roofline.hardware import known_hardware

# Requests: when sent, and when each token was ready. Clocks that do not begin at 0, equal times, a stall, parts
# of a millisecond. All are sums of powers of 2, so that floats hold them, and their differences, exactly.
REQUESTS = [
    (10.0, [10.5, 10.625, 10.875]),
    (0.0, [0.25, 0.5, 0.5, 0.5, 3.0, 3.125]),
    (1e6, [1e6 + 2.0, 1e6 + 2.0625]),
    (-4.0, [-1.5, -1.0, 2.0, 2.25, 2.375]),
    (2.0, [2.0009765625, 2.03125, 2.0615234375]),
    (7.25, [7.25, 7.75, 8.25, 8.5, 8.625, 8.75, 8.8125, 11.0]),
]
SINGLE = (3.0, [3.75])

# Shapes that differ in everything: tied and untied, groups of 1 to 4, heads wider than d_model / n_heads.
MODELS = [KNOWN_MODELS[name] for name in ("smollm2-135m", "llama-3-8b", "qwen3-0.6b", "llama-2-13b", "qwen3-8b")]
ODD = ModelConfig("odd", 3, 40, 6, 2, 10, 56, 101, 512)


@exercise(points=1)
def test_ttft(ttft):
    for start, tokens in [*REQUESTS, SINGLE]:
        likely = {
            "That is the end of the first token on the clock: take the start off.": tokens[0],
            "That is the time to the last token, end-to-end latency.": tokens[-1] - start,
            "That is a gap between tokens; TTFT begins when the request is sent.": (tokens + tokens)[1] - tokens[0],
            "That is negative: first token minus start, not the other way round.": start - tokens[0],
        }
        ask(ttft, start, tokens).number(tokens[0] - start, likely)


@exercise(points=1)
def test_itl(itl):
    for _, tokens in [*REQUESTS, SINGLE]:
        gaps = np.diff(np.array(tokens)).tolist()
        likely = {
            "It holds a gap before the first token as well; that wait is TTFT.": [tokens[0], *gaps],
            "It begins with a 0 for the first token, which has no gap: n tokens have n - 1 gaps.": [0.0, *gaps],
            "Later minus earlier, not the other way round.": [-gap for gap in gaps],
            "Those are times since the first token; a gap is from one token to the next.": [
                t - tokens[0] for t in tokens[1:]
            ],
            "The gaps must stay in the order in which they occurred.": sorted(gaps),
            "Gaps of 0 count too: tokens that arrive together have them.": [gap for gap in gaps if gap],
            "A gap ends at every token but the first: the last one is missing.": gaps[:-1],
        }
        ask(itl, tokens).numbers(gaps, likely)


@exercise(points=1)
def test_tpot(tpot):
    for start, tokens in REQUESTS:
        n, end_to_end = len(tokens), tokens[-1] - start
        gaps = [b - a for a, b in itertools.pairwise(tokens)]
        likely = {
            "It is the mean over all n tokens, the wait for the first included; that wait is TTFT.": end_to_end / n,
            "It divides by n: n tokens have n - 1 gaps.": (tokens[-1] - tokens[0]) / n,
            "TTFT is still in it: take it off above the line too.": end_to_end / (n - 1),
            "That is the median gap; TPOT is the mean, in which a stall shows.": statistics.median(gaps),
            "That is tokens per second, its inverse.": (n - 1) / (tokens[-1] - tokens[0]),
        }
        ask(tpot, start, tokens).number(math.fsum(gaps) / (n - 1), likely)
    ask(tpot, *SINGLE).number(
        None,
        {
            "A single token has no gap, so there is no mean of gaps, not even 0.": 0.0,
            "A single token's time is its TTFT.": SINGLE[1][0] - SINGLE[0],
        },
    )


# Lengths on both sides of 100, where P99 leaves the largest value, and one that a slip of rounding would show in.
LENGTHS = (1, 2, 3, 50, 99, 100, 101, 150, 200, 201, 1000)


def samples(n: int) -> list[float]:
    """n values without order, with ties, whose largest ones are far apart."""
    rng = np.random.default_rng(n)
    return [
        round(float(x), 3)
        for x in rng.permutation(np.concatenate([rng.exponential(0.05, n - n // 4), np.full(n // 4, 0.125)]))
    ]


def nearest(ordered: list[float], place: int) -> float:
    return ordered[min(max(place, 0), len(ordered) - 1)]


@exercise(points=1)
def test_p99_interpolated(p99_interpolated):
    for values in [[float(x) for x in range(100, 0, -1)], *map(samples, LENGTHS)]:
        n, ordered = len(values), sorted(values)
        expected = float(np.percentile(np.array(values), 99))
        likely = {
            "It does not sort the values first.": float(np.interp(0.99 * (n - 1), range(n), values)),
            "That is the largest value.": ordered[-1],
            "That is the other rule, without interpolation.": nearest(ordered, n * 99 // 100),
            "Place 0.99 n is one too far: n values have the places 0 to n - 1.": float(
                np.interp(0.99 * n, range(n), ordered)
            ),
            "The fraction of the place must weigh the two neighbours.": nearest(ordered, int(0.99 * (n - 1))),
            "P99 is a threshold, not the mean of the slowest values.": float(
                np.mean(ordered[n * 99 // 100 :] or ordered[-1:])
            ),
        }
        ask(p99_interpolated, values).number(expected, likely, rtol=1e-9)


@exercise(points=1)
def test_p99_nearest(p99_nearest):
    for values in [[float(x) for x in range(100, 0, -1)], *map(samples, LENGTHS)]:
        n, ordered = len(values), sorted(values)
        expected = ordered[math.floor(Fraction(99 * n, 100))]
        likely = {
            "It does not sort the values first.": values[n * 99 // 100],
            "That is the rule of textbooks, ceil(0.99 n) - 1: one place lower.": nearest(
                ordered, math.ceil(99 * n / 100) - 1
            ),
            "That is the interpolated rule.": float(np.percentile(np.array(values), 99)),
            "That is the largest value.": ordered[-1],
            "0.99 (n - 1) belongs to the interpolated rule; here it is 0.99 n, rounded down.": nearest(
                ordered, math.floor(0.99 * (n - 1))
            ),
            "Round down, not to the nearest place.": nearest(ordered, round(0.99 * n)),
        }
        ask(p99_nearest, values).number(expected, likely, rtol=1e-9)


@exercise(points=1)
def test_usd_per_million(usd_per_million):
    for price, rate, busy in [(2.5, 100.0, 1.0), (2.5, 3000.0, 0.4), (98.32, 41_000.0, 0.85), (0.35, 7.5, 0.05)]:
        expected = float(Fraction(price) * 10**6 / (3600 * Fraction(rate) * Fraction(busy)))
        likely = {
            "An idle machine is paid too: tokens leave it only while it is busy.": expected * busy,
            "A machine that is busy half of the time makes tokens dearer, not cheaper.": expected * busy * busy,
            "That is for one token.": expected / 1e6,
            "An hour has 3600 seconds.": expected * 60,
            "The price is per hour and the rate per second.": expected * 3600,
            "That is tokens per dollar, the inverse.": 1e6 / expected,
        }
        ask(usd_per_million, price, rate, busy).number(expected, likely)
    ask(usd_per_million, 3.6, 1000.0).number(1.0)


@exercise(points=2)
def test_linear_intensity(linear_intensity):
    cases = [
        (32, 4096, 1024, 0.5, 2.0),
        (2048, 4096, 4096, 2.0, 2.0),
        (1, 4096, 4096, 2.0, 2.0),
        (7, 576, 1536, 4.0, 4.0),
        (300, 14336, 4096, 1.0, 2.0),
        (5, 3, 11, 2.0, 4.0),
    ]
    for rows, d_in, d_out, w, a in cases:
        flops = 2.0 * rows * d_in * d_out
        weights, x, y = d_in * d_out * w, rows * d_in * a, rows * d_out * a
        likely = {
            "It counts the weights alone: input and output are moved too.": flops / weights,
            "A multiplication and an addition are 2 FLOPs.": flops / 2 / (weights + x + y),
            "The output is written, and that counts.": flops / (weights + x),
            "The input is read, and that counts.": flops / (weights + y),
            "Weights and activations have precisions of their own.": flops
            / (w * (d_in * d_out + rows * (d_in + d_out))),
            "It gives the weights the precision of the activations.": flops
            / (a * (d_in * d_out + rows * (d_in + d_out))),
            "The weights are read once, not once a row: that is what a batch gains.": flops / (rows * weights + x + y),
            "The formula N d / (2 N + d) is for a square layer in one precision.": rows * d_in / (2 * rows + d_in),
            "That is bytes per FLOP, the inverse.": (weights + x + y) / flops,
        }
        ask(linear_intensity, rows, d_in, d_out, w, a).number(flops / (weights + x + y), likely)


MACHINES = [(989.4e12, 3.35e12), (65e12, 320e9), (1e11, 2e10), (8.1e12, 9.36e11)]


@exercise(points=1)
def test_ridge(ridge):
    for peak, bandwidth in MACHINES:
        likely = {
            "That is upside down: FLOP/s over bytes/s is FLOP per byte.": bandwidth / peak,
            "It needs no factor for the bytes of an element: bandwidth is in bytes already.": peak / bandwidth / 2,
            "The ridge is where compute and memory take equally long, in FLOP per byte.": peak * bandwidth,
        }
        ask(ridge, peak, bandwidth).number(peak / bandwidth, likely)


@exercise(points=1)
def test_attainable(attainable):
    for peak, bandwidth in MACHINES:
        for share in (1e-3, 0.2, 0.999, 1.0, 1.001, 7.0, 400.0):  # of the ridge
            intensity = share * peak / bandwidth
            slope = intensity * bandwidth
            expected = slope if share <= 1 else peak
            likely = {
                "No intensity lifts it above the peak.": slope,
                "Left of the ridge, bandwidth holds it below the peak.": peak,
                "That is a share of the peak; FLOP/s are asked for.": expected / peak,
                "Two limits one of which binds do not add up.": 1 / (1 / peak + 1 / slope),
            }
            ask(attainable, intensity, peak, bandwidth).number(expected, likely)


@exercise(points=2)
def test_binding_limit(binding_limit):
    cases = [  # milliseconds of compute and of memory, operators, and milliseconds of overhead for each
        (0.01, 0.5, 1, 3.0, "overhead"),
        (10.0, 1.0, 100, 1e-3, "compute"),
        (1.0, 20.0, 100, 1e-3, "memory"),
        (0.01, 0.5, 600, 5e-3, "overhead"),
        (3.0, 2.0, 200, 5e-3, "compute"),
        (3.0, 2.0, 900, 5e-3, "overhead"),  # 4.5 ms: intensity above the ridge all the same
        (3.0, 1.0, 400, 5e-3, "compute"),  # 2 ms: more overhead than memory, and still compute
        (1.0, 2.0, 900, 1e-3, "memory"),  # 0.9 ms
        (1.0, 2.0, 1, 1.5, "memory"),
        (1e-3, 1.0, 2000, 0.0, "memory"),
    ]
    for peak, bandwidth in MACHINES:
        for compute_ms, memory_ms, operators, overhead_ms, expected in cases:
            flops, moved, overhead = compute_ms * 1e-3 * peak, memory_ms * 1e-3 * bandwidth, overhead_ms * 1e-3
            total = {"compute": compute_ms, "memory": memory_ms, "overhead": operators * overhead_ms}
            single = {**total, "overhead": overhead_ms}
            both = {name: total[name] for name in ("compute", "memory")}
            likely = {
                "Every operator pays the overhead, so it counts `operators` times.": max(
                    single, key=single.__getitem__
                ),
                "A roofline without the overhead misses the third limit.": max(both, key=both.__getitem__),
                "The limit that takes longest binds, not the shortest.": min(total, key=total.__getitem__),
            }
            ask(binding_limit, flops, moved, operators, peak, bandwidth, overhead).text(expected, likely)


@exercise(points=3)
def test_decode_seconds(decode_seconds):
    cases = [
        ("llama-3-8b", "h100-sxm", "bf16", 2),
        ("smollm2-135m", "t4", "fp16", 2),
        ("qwen3-8b", "a100-80", "bf16", 2),
    ]
    for model, hardware, dtype, size in [*cases, ("qwen3-0.6b", "epyc-9654", "fp32", 4)]:
        config, ceilings = KNOWN_MODELS[model], known_hardware(hardware).ceilings(dtype)
        counted = decode_step_s(config, ceilings, context=16)
        bandwidth, embedding = ceilings.bandwidth, config.vocab_size * config.d_model
        all_s = config.parameter_count * size / bandwidth
        likely = {
            "The input embedding is in memory but a step reads one row of it: what is resident is not what is read.": all_s,
            "A tied embedding is the head, and that is read.": (config.parameter_count - embedding) * size / bandwidth,
            "It leaves out how many bytes a weight takes.": config.streamed_params / bandwidth,
            "A step reads each weight once.": 2 * config.streamed_params * size / bandwidth,
            "That is the time of the FLOPs; the bytes take longer.": 2 * config.streamed_params / ceilings.peak,
            "The head is a matrix of weights too.": config.n_layers * config.layer_matmul_params * size / bandwidth,
        }
        answer = ask(decode_seconds, config, bandwidth, size)
        answer.label += f" ({hardware})"
        answer.number(counted, likely, rtol=0.02)
    # Within 2 % of the count, and exactly in proportion: half the bytes, half the time.
    config = MODELS[1]
    whole = ask(decode_seconds, config, 1e12, 2.0).number(config.streamed_params * 2.0 / 1e12, rtol=0.02)
    ask(decode_seconds, config, 1e12, 0.5).number(whole / 4, {"It ignores the bytes per weight.": whole}, rtol=1e-6)
    ask(decode_seconds, config, 4e12, 2.0).number(whole / 4, {"It ignores the bandwidth.": whole}, rtol=1e-6)


@exercise(points=1)
def test_decode_guess_ms(decode_guess_ms):
    config = KNOWN_MODELS["qwen3-8b"]
    counted = 1e3 * decode_step_s(config, known_hardware("a100-80").ceilings("bf16"), context=16)
    bandwidth = 2039e9
    likely = {
        "One row of the input embedding is read, not all of it: take 151936 x 4096 off.": 8.19e9 * 2 / bandwidth * 1e3,
        "Milliseconds are asked for.": counted / 1e3,
        "A 16-bit weight takes 2 bytes.": counted / 2,
        "Each weight is read once: 2 bytes, not 4.": counted * 2,
        "That is the time of its FLOPs; reading takes longer.": 2 * 7.57e9 / 312e12 * 1e3,
    }
    answer = ask(decode_guess_ms)
    guess = answer.number(counted, likely, rtol=0.04)
    return f"You said {guess:.3g} ms, minillm predicts {counted:.3g} ms."


def step_costs(config: ModelConfig, context: int, size: float) -> tuple[float, float, float, float]:
    """One user's FLOPs in linear layers and in attention, and the bytes of the weights and of its keys and values."""
    C, D, F = config.d_model, config.head_dim, config.d_ff
    layer = C * D * config.n_heads * 2 + C * D * config.n_kv_heads * 2 + 3 * C * F
    weights = config.n_layers * layer + config.vocab_size * C
    scores_and_sums = 2 * (2 * config.n_heads * D * context) * config.n_layers
    keys_and_values = 2 * config.n_layers * config.n_kv_heads * D * context * size
    return 2.0 * weights, float(scores_and_sums), weights * size, keys_and_values


@exercise(points=2)
def test_step_intensity(step_intensity):
    for config in [*MODELS, ODD]:
        for batch, context, size in [(32, 4096, 2.0), (256, 512, 1.0), (3, 2048, 4.0), (1, 16, 2.0), (8, 900, 0.5)]:
            linear, attention, weights, kv = step_costs(config, context, size)
            G, L = config.group_size, config.n_layers
            flops, moved = batch * (linear + attention), weights + batch * kv
            likely = {
                "Every user reads keys and values of its own: they grow with the batch.": flops / (weights + kv),
                "Keys and values are read too, and they do not get shared.": flops / weights,
                "The weights are read once for the whole batch.": flops / (batch * (weights + kv)),
                "Attention computes too: 4 A x context in each layer.": batch * linear / moved,
                "Keys and values are stored for KV heads, not for query heads.": flops / (weights + batch * kv * G),
                "Attention computes for every query head.": batch * (linear + attention / G) / moved,
                "Attention runs in each of the L layers.": batch * (linear + attention / L) / moved,
                "Keys and values of every layer are read.": flops / (weights + batch * kv / L),
                "A cache holds keys and values: 2 of them.": flops / (weights + batch * kv / 2),
                "Attention multiplies with the keys and with the values: 4 A.": batch
                * (linear + attention / 2)
                / moved,
                "The FLOPs grow with the batch.": flops / batch / moved,
                "A multiplication and an addition are 2 FLOPs a weight.": batch * (linear / 2 + attention) / moved,
                "It ignores the bytes of an element.": flops / moved * size / 2,
            }
            ask(step_intensity, config, batch, context, size).number(flops / moved, likely)


@exercise(points=2)
def test_step_intensity_limit(step_intensity_limit):
    for config in [*MODELS, ODD]:
        for context, size in [(512, 2.0), (4096, 2.0), (100, 1.0), (33, 4.0), (700, 0.5)]:
            linear, attention, weights, kv = step_costs(config, context, size)
            batch = 1e12  # the limit, computed as what it is: off by 4e-9 of itself at most
            expected = batch * (linear + attention) / (weights + batch * kv)
            likely = {
                "Attention computes too; its FLOPs stay in the limit.": linear / kv,
                "The linear layers compute too; their FLOPs stay in the limit.": attention / kv,
                "Each user's keys and values are those of all its context.": (linear + attention) / (kv / context),
                "The weights drop out: an endless batch shares them.": (linear + attention) / (weights + kv),
                "Keys and values are stored for KV heads, not for query heads.": (linear + attention)
                / (kv * config.group_size),
                "The limit does not depend on the machine's ridge or the weights' size alone.": linear / weights,
                "Attention runs in each of the L layers.": (linear + attention / config.n_layers) / kv,
                "A cache holds keys and values: 2 of them.": (linear + attention) / (kv / 2),
                "It ignores the bytes of an element.": (linear + attention) / kv * size / 2,
            }
            ask(step_intensity_limit, config, context, size).number(expected, likely)
