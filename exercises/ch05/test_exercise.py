"""Grader of chapter 5. Codes are judged in float64 by the law that they promise to keep, so any of several may be right."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil, floor

import numpy as np
import torch
from torch import Tensor

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import Answer, ask, exercise, judge_guesses, refuses
from minillm.grading.counted import of_all_layers
from minillm.roofline.hardware import known_hardware
from minillm.roofline.position import predict_stage
from minillm.stages import Stage, gqa
from minillm.stages.quantization import quantize

SLACK = 1e-3  # of a step: what rounding in float32 adds to half a step, with room
LARGER = 1.005  # a scale that was rounded to bfloat16 is this much larger at most


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape)).float()


# --- numbers into codes


def parts(answer: Answer, names: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    """What a quantizer returns, of which the first part must be codes; all in float64."""
    value = answer.value
    if not isinstance(value, (tuple, list)) or len(value) != len(shapes):
        raise answer.wrong(f"must return {names}, in this order.")
    for name, part, shape in zip(names.replace(" and", ",").split(", "), value, shapes, strict=True):
        if not isinstance(part, Tensor):
            raise answer.wrong(f"must return a tensor of {name}.")
        if tuple(part.shape) != shape:
            raise answer.wrong(f"returns {name} of shape {tuple(part.shape)} where {shape} is due.")
        if name == "codes" and part.dtype != dtype:
            raise answer.wrong(f"returns codes in {part.dtype} where {dtype} is due.".replace("torch.", ""))
        if name != "codes" and part.dtype not in (torch.float32, torch.float64):
            raise answer.wrong(f"returns {name} in {part.dtype} where float32 is due.".replace("torch.", ""))
        if not bool(torch.isfinite(part.double()).all()):
            raise answer.wrong(f"returns {name} with NaN or infinity in them: divide nothing by 0.")
        if name == "scales" and not bool((part > 0).all()):
            raise answer.wrong(
                "returns a scale that is not above 0: what are numbers of one value, zeros for one, divided by?"
            )
    return [part.double() for part in value]


def most(x: Tensor) -> str:
    """The place of the largest element."""
    return str(tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape)))


def check_scales(answer: Answer, scales: Tensor, smallest: Tensor, likely: dict[str, Tensor]) -> None:
    """No scale may be larger than is needed. Where `smallest` is 0, any will do."""
    excess = torch.where(smallest > 0, scales / smallest, 1.0)
    if float(excess.max()) <= LARGER:
        return
    hint = next(
        (text for text, wrong in likely.items() if torch.allclose(scales.expand_as(wrong), wrong, rtol=1e-3, atol=0)),
        "",
    )
    raise answer.wrong(
        f"has scales up to {float(excess.max()):.4g} times as large as they need be, at {most(excess)}."
        f"{' ' if hint else ''}{hint}"
    )


def check_law(answer: Answer, error: Tensor, steps: Tensor, slack: Tensor, likely: dict[str, bool | Tensor]) -> None:
    """|error| <= steps/2. A hint comes with whether it applies, or with the errors of another reading, which keep the law."""
    room = steps / 2 + slack
    over = (error.abs() - room).clamp_min(0) / steps
    if float(over.max()) == 0:
        return
    hint = ""
    for text, other in likely.items():
        if other if isinstance(other, bool) else bool((other.abs() <= room).all()):
            hint = f" {text}"
            break
    ratio = min(float((error.abs() / steps).flatten()[over.argmax()]), 1e9)
    raise answer.wrong(f"breaks the law |w - dequantized| <= s/2: at {most(over)} it is off by {ratio:.3g} s.{hint}")


CUTS = "It cuts off what comes after the point: round to the nearest code."
NEAR = "A neighbouring code is nearer: was the quotient rounded to 8 bits on the way, or the scale changed after?"


def cuts_off(codes: Tensor, exact: Tensor) -> bool:
    """Whether all codes are rounded down, or all towards 0."""
    down, toward_0 = exact - codes, exact.abs() - codes.abs()
    return any(bool(((lost > -SLACK) & (lost < 1 + SLACK)).all()) for lost in (down, toward_0))


def check_absmax(answer: Answer, x: Tensor, dim: int) -> None:
    """Codes and scales of x, which share a scale along `dim`, by their law."""
    x = x.double()
    shape = tuple(1 if i == dim else n for i, n in enumerate(x.shape))
    codes, scales = parts(answer, "codes and scales", (tuple(x.shape), shape), torch.int8)
    largest = x.abs().amax(dim, keepdim=True)
    spread = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)
    likely = {
        "Numbers that are far apart in size should not share a scale: that is one for all.": x.abs()
        .amax()
        .expand(shape)
        / 127,
        "int8 has 127 codes on either side of 0, and 1 is for the largest |w| itself.": largest,
        "A symmetric code has its zero at 0: the scale comes from the largest |w|, not from the spread.": spread / 255,
        "7 of the 8 bits are for 1 to 127.": largest / 7,
        "Half of the codes are left unused: 254 steps lie between -127 and 127.": largest / 63.5,
    }
    check_scales(answer, scales, largest / 127, likely)
    exact = x / scales
    hints: dict[str, bool | Tensor] = {
        "128 does not fit into int8, and became -128.": bool(((codes == -128) & (exact > 0)).any()),
        CUTS: cuts_off(codes, exact),
        NEAR: bool(((codes - exact).abs() <= 1).all()),
        "The codes are right but for their sign.": x + scales * codes,
    }
    check_law(answer, x - scales * codes, scales, scales * SLACK, hints)
    if float(codes.min()) < -127:
        raise answer.wrong("has a code of -128: the codes go from -127 to 127, as many below 0 as above.")


def midpoints() -> Tensor:
    """Rows whose quotients lie at k + 0.49 and k + 0.51: half a step is nowhere left to waste."""
    k = torch.arange(0, 126, 5.0)
    rows = torch.stack([k + 0.49, -(k + 0.51), k + 0.51, -(k + 0.49)])
    ends = torch.tensor([127.0, 127.0, -127.0, -127.0])[:, None]
    return torch.cat([rows, ends], dim=1) * torch.tensor([1.0, 0.01, 30.0, 2.0])[:, None]


def awkward_rows() -> dict[str, Tensor]:
    outlier = normal(5, 24, seed=1)
    outlier[1, 7] = -60.0
    sizes = normal(6, 20, seed=2) * torch.tensor([1e-20, 1e-7, 1e-3, 1.0, 1e4, 1e20])[:, None]
    wide = normal(2, 5000, seed=11)
    wide[:, -1] = torch.tensor([-9.0, 9.0])
    zeros = normal(4, 9, seed=3)
    zeros[2] = 0
    return {
        "a weight": normal(7, 16),
        "a square weight": normal(8, 8),
        "rows of one weight": normal(5, 1),
        "a single row": normal(1, 33),
        "a weight with wide rows": wide,
        "a weight with an outlier": outlier,
        "rows of very different sizes": sizes,
        "a weight with a row of zeros": zeros,
        "a weight of zeros": torch.zeros(2, 3),
        "a weight that is negative throughout": -normal(4, 12).abs() - 1,
        "a weight that is positive throughout": normal(4, 12).abs() + 1,
        "a constant weight": torch.full((3, 10), -0.3),
        "a weight whose quotients end in .49 and .51": midpoints(),
        "a transposed weight": normal(12, 10, seed=4).T,
        "a weight in bfloat16": normal(40, 96).bfloat16(),
    }


@exercise(points=2)
def test_absmax_quantize(absmax_quantize):
    for what, w in awkward_rows().items():
        answer = ask(absmax_quantize, w)
        answer.label = f"absmax_quantize of {what} {tuple(w.shape)}"
        check_absmax(answer, w, 1)


def awkward_groups() -> list[tuple[str, Tensor, int]]:
    far = normal(3, 32, seed=5) + 1000 * torch.tensor([1.0, -1.0, 3.0])[:, None]
    sizes = (normal(3, 6, 16, seed=6) * (10.0 ** torch.linspace(-20, 14, 18).reshape(3, 6, 1))).flatten(1)
    equal = normal(5, 24, seed=7)
    equal[0, 8:16], equal[1], equal[3, :8], equal[4, 16:], equal[4, :8] = 0.7, 0.0, -250.0, 3e-9, 1e-20
    grid = torch.linspace(0, 15, 151)[:150].reshape(3, 50)  # between two codes, at steps of 0.1
    grid = torch.cat([grid, torch.tensor([[0.0, 15.0]]).expand(3, 2)], dim=1)
    return [
        ("a weight", normal(6, 64), 16),
        ("a weight", normal(4, 32), 32),
        ("a weight", normal(5, 96, seed=1), 8),
        ("a weight in one row", normal(1, 64), 32),
        ("a weight", normal(3, 35, seed=2), 5),
        ("a weight", normal(2, 512, seed=2), 256),
        ("a weight of pairs", normal(4, 10), 2),
        ("a weight", normal(3, 7), 1),
        ("a weight of as many rows as columns", normal(16, 16), 4),
        ("a weight that is positive throughout", normal(4, 32).abs() + 0.5, 8),
        ("a weight that is negative throughout", -normal(4, 32).abs() - 0.5, 8),
        ("a weight whose groups lie far from 0", far, 16),
        ("a weight whose groups differ in size", sizes, 16),
        ("a weight with groups of equal weights", equal, 8),
        ("a weight on a fine grid", grid - 6.3, 52),
        ("a transposed weight", normal(32, 12, seed=8).T, 16),
        ("a weight in bfloat16", normal(24, 64, seed=9).bfloat16(), 32),
        ("a weight in bfloat16, far from 0", (normal(12, 64, seed=10) + 2).bfloat16(), 32),
    ]


def spread_out(x: Tensor, g: int) -> Tensor:
    """(N, K/g) -> (N, K)."""
    return x.repeat_interleave(g, dim=1)


@exercise(points=2)
def test_zeropoint_quantize(zeropoint_quantize):
    for what, w, g in awkward_groups():
        answer = ask(zeropoint_quantize, w, g)
        answer.label = f"zeropoint_quantize of {what} {tuple(w.shape)} in groups of {g}"
        w, few = w.double(), (w.shape[0], w.shape[1] // g)
        shapes = (tuple(w.shape), few, few)
        codes, scales, zeros = parts(answer, "codes, scales and zeros", shapes, torch.uint8)
        if float(codes.max()) > 15:
            raise answer.wrong(f"has a code of {int(codes.max())}: 4 bits go from 0 to 15.")
        groups = w.unflatten(1, (-1, g))
        low, high = groups.amin(2), groups.amax(2)
        rows = (w.amax(1, keepdim=True) - w.amin(1, keepdim=True)).expand(few) / 15
        likely = {
            "That is the spread of the whole row: each group has its own.": rows,
            "That is symmetric around 0: use all 16 codes between the smallest weight and the largest.": 2
            * groups.abs().amax(2)
            / 15,
            "That is the scale of 4 signed bits: use all 16 codes between the smallest weight and the largest.": (
                groups.abs().amax(2) / 7
            ),
            "Between 16 codes there are 15 steps.": (high - low) / 14,
            "That is the whole spread: 15 steps make it up.": high - low,
            "That is a scale for all weights together.": (w.amax() - w.amin()).expand(few) / 15,
        }
        check_scales(answer, scales, (high - low) / 15, likely)
        s, z = spread_out(scales, g), spread_out(zeros, g)
        size = spread_out(groups.abs().amax(2), g)
        error, slack = w - (s * (codes - 8) + z), s * SLACK + size * 4e-7
        lost = torch.where(spread_out(high == low, g), error.abs() - size * 4e-7, 0.0)
        if float(lost.max()) > 0:
            place = lost.argmax()
            got, due = (float(x.flatten()[place]) for x in (w - error, w))
            raise answer.wrong(
                f"does not give equal weights back: at {most(lost)} it has {got:.4g} where all of the group are {due:.4g}. "
                "A code that stands for z itself is exact."
            )
        exact = (w - z) / s + 8
        wrong: dict[str, bool | Tensor] = {
            CUTS: cuts_off(codes, exact) and torch.allclose(zeros - 8 * scales, low, rtol=1e-5),
            "It would hold for w ~ s q + z: z is the value of code 8 here, not of code 0.": w - (s * codes + z),
            "It would hold for w ~ s (q - z): z is a weight here, not a code.": w - s * (codes - z),
            "It would hold for w ~ s (q - 8) - z: mind the sign of z.": w - (s * (codes - 8) - z),
            "It would hold if code 15 stood for the smallest weight, not code 0.": w - (s * (7 - codes) + z),
            "It would hold for w ~ s (q - 7.5) + z: z is the value of code 8, not the middle.": w
            - (s * (codes - 7.5) + z),
            "It would hold for w ~ s (q - 7) + z: z is the value of code 8.": w - (s * (codes - 7) + z),
            NEAR: bool(((codes - exact).abs() <= 1).all()),
        }
        check_law(answer, error, s, slack, wrong)
    for K, g in [(48, 32), (16, 32), (30, 4)]:
        refuses(zeropoint_quantize, normal(2, K), g, because=f"as groups of {g} do not divide {K} columns")


# --- codes into bytes


def all_pairs() -> list[Tensor]:
    """Rows of codes: every pair there is, in both orders, and some shapes."""
    rng = np.random.default_rng(0)
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)  # (256, 2)
    return [
        torch.tensor([[1, 2]], dtype=torch.uint8),
        torch.tensor([[1, 2, 3, 4], [15, 0, 8, 9]], dtype=torch.uint8),
        pairs,
        pairs.reshape(8, 64),
        torch.from_numpy(rng.integers(0, 16, (3, 6)).astype(np.uint8)),
        torch.from_numpy(rng.integers(0, 16, (10, 7)).astype(np.uint8)).T,
    ]


def packed_by_hand(codes: Tensor) -> Tensor:
    return torch.tensor([[16 * a + b for a, b in zip(row[::2], row[1::2], strict=True)] for row in codes.tolist()])


def packed(codes: Tensor, mistake: str = "") -> Tensor:
    """Bytes in int64, right or with a mistake in them."""
    codes = codes.long()
    even, odd, half = codes[:, ::2], codes[:, 1::2], codes.shape[1] // 2
    wrong = {
        "order": even + 16 * odd,
        "halves": 16 * codes[:, :half] + codes[:, half:],
        "overlap": even | odd,
        "even alone": 16 * even,
        "factor": 4 * even | odd,
    }
    return wrong[mistake] if mistake else 16 * even + odd


PACKINGS = {
    "order": "The even column belongs in the upper half of the byte, not in the lower.",
    "halves": "Neighbours share a byte: columns 0 and 1, not a column and the one half a row on.",
    "overlap": "Its halves overlap: move the even column up by 4 bits.",
    "even alone": "It has only one of the two codes.",
    "factor": "Move by 4 bits, that is by a factor of 16.",
}


@exercise(points=1)
def test_pack_nibbles(pack_nibbles):
    for codes in all_pairs():
        likely = {text: partial(packed, codes, name) for name, text in PACKINGS.items()}
        ask(pack_nibbles, codes).tensor(packed(codes), likely, atol=0, dtype=torch.uint8)


def unpacked(codes: Tensor, mistake: str) -> Tensor:
    """What comes of the bytes of these codes, in int64, with a mistake."""
    codes = codes.long()
    even, odd = codes[:, ::2], codes[:, 1::2]
    halves = {"order": (odd, even), "no mask": (even, 16 * even + odd), "not moved": (16 * even, odd)}.get(
        mistake, (even, odd)
    )
    out = torch.cat(halves, dim=1) if mistake == "not interleaved" else torch.stack(halves, dim=2).flatten(1)
    return (out + 8) % 16 - 8 if mistake == "signed" else out


UNPACKINGS = {
    "order": "The upper half of a byte is the even column, which comes first.",
    "not interleaved": "A byte's two codes are neighbours: interleave the halves.",
    "no mask": "The lower half still has the upper one on top of it: mask it with & 15.",
    "not moved": "The upper half has to move down by 4 bits.",
    "signed": "Codes have no sign here: 8 to 15 stay what they are.",
}


@exercise(points=1)
def test_unpack_nibbles(unpack_nibbles):
    for codes in all_pairs():
        likely = {text: partial(unpacked, codes, name) for name, text in UNPACKINGS.items()}
        ask(unpack_nibbles, packed(codes).to(torch.uint8)).tensor(codes, likely, atol=0, dtype=torch.uint8)


# --- a product, and how wrong it can be


def group_weight(N: int, K: int, g: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a random weight."""
    rng = np.random.default_rng([seed, N, K, g])
    codes = torch.from_numpy(rng.integers(0, 16, (N, K)).astype(np.uint8))
    scales = torch.from_numpy(rng.uniform(0.5, 1.5, (N, K // g))).float()
    return codes, scales, torch.from_numpy(rng.standard_normal((N, K // g)) * 3).float()


def product(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, mistake: str = "") -> Tensor:
    """The product in float64, an output and an input at a time, right or with a mistake in it."""
    (M, K), N, n = x.shape, len(codes), scales.shape[1]
    g, x = K // n, x.double()
    out = torch.zeros(M, N, dtype=torch.float64)
    for j in range(N):
        for k in range(K):
            group = {"strided": k % n, "first": 0}.get(mistake, k // g)
            q, s, z = int(codes[j, k]), float(scales[j, group]), float(zeros[j, group])
            q = {"wraps": (q - 8) % 256, "no 8": q}.get(mistake, q - 8)
            weight = {"z inside": s * (q + z), "no z": s * q, "minus z": s * q - z}.get(mistake, s * q + z)
            out[:, j] += x[:, k] * weight
    return out


PRODUCTS = {
    "wraps": "A code below 8 minus 8 is not below 0 in uint8: make floats of the codes first.",
    "no 8": "Code 8 stands for z: subtract 8 from the codes.",
    "strided": "A group is g neighbours: its scale belongs to columns 0 to g - 1, not to every K/g-th (repeat_interleave).",
    "first": "Each group has its own scale and zero.",
    "z inside": "z is a weight, not a code: add it after the scale.",
    "no z": "The zeros are left out.",
    "minus z": "z is added.",
}


@exercise(points=2)
def test_groupwise_matmul(groupwise_matmul):
    # The sizes of an output's products add up to 243 at most, and float32 rounds 32 times by 2^-24 of that: by 5e-4 in all.
    for M, N, K, g in [(1, 3, 8, 8), (2, 5, 16, 4), (4, 4, 4, 2), (3, 2, 24, 8), (1, 7, 32, 16), (6, 3, 12, 1)]:
        x, weight = normal(M, K), group_weight(N, K, g)
        answer = ask(groupwise_matmul, x, *weight)
        answer.label = f"groupwise_matmul with M = {M}, N = {N}, K = {K} and groups of {g}"
        likely = {text: partial(product, x, *weight, name) for name, text in PRODUCTS.items()}
        answer.tensor(product(x, *weight), likely, atol=5e-4, dtype=torch.float32)
    x, weight = normal(3, 32).bfloat16(), group_weight(5, 32, 8)
    answer = ask(groupwise_matmul, x, *weight)
    answer.label = "groupwise_matmul with x in bfloat16"
    # In bfloat16 weights and results are off by 2^-9 of themselves each, at worst all in one direction; twice that is allowed.
    sizes = x.double().abs() @ product(torch.eye(32), *weight).abs()  # (M, N)
    answer.tensor(product(x, *weight), atol=float(sizes.max()) / 128, dtype=torch.bfloat16)
    answer = ask(groupwise_matmul, x.double(), *weight)
    answer.label = "groupwise_matmul with x in float64"
    answer.tensor(product(x, *weight), atol=5e-4, dtype=torch.float64)


def bound(x: Tensor, scales: Tensor, mistake: str = "") -> Tensor:
    x, s = x.double(), scales.double().repeat_interleave(x.shape[1] // scales.shape[1], dim=1)  # (M, K), (N, K)
    each = x.abs()[:, None] * s / 2  # (M, N, K): what each weight may add
    wrong = {
        "cancel": lambda: (x[:, None] * s / 2).sum(2),
        "cancel, then abs": lambda: (x[:, None] * s / 2).sum(2).abs(),
        "s": lambda: 2 * each.sum(2),
        "typical": lambda: each.square().sum(2).sqrt() / 3**0.5,
        "root": lambda: each.square().sum(2).sqrt(),
        "largest": lambda: each.amax(2),
        "largest x": lambda: (x.abs().amax(1, keepdim=True)[:, None] * s / 2).sum(2),
        "largest s": lambda: (x.abs()[:, None] * s.amax(1, keepdim=True) / 2).sum(2),
        "mean s": lambda: (x.abs()[:, None] * s.mean(1, keepdim=True) / 2).sum(2),
        "mean": lambda: each.mean(2),
    }
    return wrong[mistake]() if mistake else each.sum(2)


BOUNDS = {
    "cancel": "Errors need not cancel where x changes its sign: take |x|.",
    "cancel, then abs": "Errors need not cancel where x changes its sign: take |x| before the sum.",
    "s": "A weight is off by half a step at most.",
    "typical": "That is a typical error; the bound holds also where all errors add up.",
    "root": "The worst errors add up as they are, not as squares.",
    "largest": "All K errors count, not the largest alone.",
    "largest x": "It holds, but a smaller one does, too: each input counts with its own size.",
    "largest s": "It holds, but a smaller one does, too: each group has its own scale.",
    "mean s": "It does not hold where large inputs meet large scales: each group has its own scale.",
    "mean": "It is a sum over the inputs, not a mean.",
}


@exercise(points=1)
def test_error_bound(error_bound):
    for M, N, K, n in [(2, 3, 12, 1), (1, 1, 4, 1), (3, 2, 16, 4), (2, 5, 24, 3), (4, 4, 4, 2), (1, 6, 10, 10)]:
        x, scales = normal(M, K) * 3, group_weight(N, K, K // n)[1]
        answer = ask(error_bound, x, scales)
        answer.label = f"error_bound of x {(M, K)} and scales {(N, n)}"
        likely = {text: partial(bound, x, scales, name) for name, text in BOUNDS.items()}
        answer.tensor(bound(x, scales), likely, atol=1e-4)  # float32 on sums below 100


# --- keys and values


@exercise(points=1)
def test_quantize_kv(quantize_kv):
    empty = normal(2, 3, 5, 4, seed=1)
    empty[0, 1, 2], empty[1, 2, :, 3] = 0, 0
    sizes = normal(2, 2, 6, 8, seed=2) * torch.tensor([1e-20, 1e-4, 1.0, 30.0, 1e3, 1e10])[:, None]
    outlier = normal(1, 2, 7, 16, seed=3)
    outlier[..., 5] *= 200
    heads = normal(2, 3, 4, 6, seed=4) * torch.tensor([0.01, 1.0, 50.0])[:, None, None]
    rows = normal(3, 2, 5, 6, seed=5) * torch.tensor([1.0, 40.0, 0.03])[:, None, None, None]
    cases = {
        "keys": normal(2, 3, 5, 8),
        "a single token": normal(1, 2, 1, 8),
        "as many tokens as channels": normal(2, 2, 6, 6),
        "tokens and channels of zeros": empty,
        "tokens of very different sizes": sizes,
        "channels of very different sizes": sizes.transpose(2, 3),
        "keys with a large channel": outlier,
        "heads of very different sizes": heads,
        "sequences of very different sizes": rows,
        "values that are negative throughout": -normal(2, 2, 3, 4).abs() - 1,
        "keys as attention has them, transposed": normal(2, 5, 3, 8, seed=6).transpose(1, 2),
        "keys in bfloat16": normal(2, 3, 24, 32).bfloat16(),
    }
    for what, x in cases.items():
        for axis, dim in (("token", 3), ("channel", 2)):
            answer = ask(quantize_kv, x, axis)
            answer.label = f'quantize_kv of {what} {tuple(x.shape)} by "{axis}"'
            check_absmax(answer, x, dim)


# --- what it saves


@exercise(points=1)
def test_bits_per_weight(bits_per_weight):
    cases = [
        (4, 64, 16, 4),
        (4, 32, 16, 16),
        (4, 128, 16, 16),
        (8, 4096, 16, 0),
        (3, 128, 16, 16),
        (4, 32, 8, 0),
        (2, 16, 32, 8),
        (8, 1, 16, 0),
        (4, 8, 16, 16),
        (4, 100, 16, 8),
    ]
    for bits, g, scale, zero in cases:
        likely = {
            "The zeros take room, too.": bits + scale / g,
            "Scale and zero are shared by the group, not by each weight.": bits + scale + zero,
            "The scales take room, too.": float(bits + zero / g),
            "Scales and zeros take room, too.": float(bits),
            "That is the group's: divide by its size.": float(bits * g + scale + zero),
            "That is in bytes.": (bits + (scale + zero) / g) / 8,
            "It knows scales and zeros of 16 bits only.": bits + 32 / g,
        }
        ask(bits_per_weight, bits, g, scale, zero).number(bits + (scale + zero) / g, likely)
    ask(bits_per_weight, 4, 32).number(5.0)
    ask(bits_per_weight, 4, 64).number(4.5)


MODELS = [KNOWN_MODELS[name] for name in ("smollm2-135m", "llama-2-7b", "llama-3-8b", "qwen3-0.6b", "qwen3-8b")]


@exercise(points=1)
def test_step_bytes(step_bytes):
    steps = [
        (1, 200, 16.0, 16.0),
        (1, 4096, 5.0, 16.0),
        (16, 1000, 8.0, 8.25),
        (64, 512, 4.25, 4.5),
        (7, 3, 16.0, 8.25),
    ]
    for config in MODELS:
        for B, S, bits, kv in steps:
            P, numbers = config.matmul_params, 2 * config.n_layers * config.n_kv_heads * config.head_dim * S * B

            def read(weights: float, kv_numbers: float, bits: float = bits, kv: float = kv) -> float:
                return (weights * bits + kv_numbers * kv) / 8

            likely = {
                "That is in bits: a byte has 8.": 8 * read(P, numbers),
                "The weights are read once for all users.": read(P * B, numbers),
                "Each user has keys and values.": read(P, numbers / B),
                "A key and a value: twice that.": read(P, numbers / 2),
                "Weights have weight_bits, keys and values kv_bits.": (P + numbers) * bits / 8,
                "weight_bits are for the weights, kv_bits for keys and values, not the other way round.": (
                    P * kv + numbers * bits
                )
                / 8,
                "Weights have weight_bits, not 16.": (P * 16 + numbers * kv) / 8,
                "Keys and values have kv_bits, not 16.": (P * bits + numbers * 16) / 8,
                "The input embedding is not read: P is config.matmul_params.": read(config.parameter_count, numbers),
                "It stores KV heads, not query heads.": read(P, numbers * config.group_size),
                "Each layer has keys and values.": read(P, numbers / config.n_layers),
                "The keys and values are read, too.": read(P, 0),
                "All of the context is read.": read(P, numbers / S),
                "KV heads are n_kv_heads x head_dim wide, which is not the model.": read(
                    P, 2 * config.n_layers * config.d_model * S * B
                ),
            }
            ask(step_bytes, config, B, S, bits, kv).number(read(P, numbers), likely, rtol=1e-9)
        ask(step_bytes, config, 2, 100).number(2 * P + 400 * config.n_layers * config.n_kv_heads * config.head_dim * 2)


# --- what it gains

A100, H100, T4 = (312e12, 2.039e12), (989.4e12, 3.35e12), (65e12, 320e9)


@exercise(points=2)
def test_weight_only_gain(weight_only_gain):
    cases = [
        ("llama-3-8b", 400, 300, H100, 4.25),  # computing binds both: no gain
        ("llama-2-7b", 1, 200, A100, 8.0),
        ("llama-2-7b", 1, 200, A100, 5.0),
        ("llama-2-7b", 64, 1000, A100, 5.0),  # computing starts to bind the quantized step
        ("llama-3-8b", 16, 8192, H100, 4.25),  # keys and values count
        ("llama-3-8b", 100, 500, H100, 4.5),
        ("llama-3-8b", 256, 100, H100, 8.25),
        ("llama-3-8b", 400, 100, H100, 5.0),  # computing binds both: no gain
        ("llama-2-7b", 8, 4096, T4, 8.0),
        ("qwen3-8b", 150, 1, A100, 5.0),
        ("smollm2-135m", 4, 64, (100e9, 20e9), 5.0),  # a low ridge
        ("smollm2-135m", 1, 8192, (1e12, 1e11), 5.0),
        ("qwen3-0.6b", 8, 4096, A100, 5.0),  # whose heads together are wider than the model
        ("llama-3-8b", 1, 8192, (2e12, 1e12), 5.0),  # a ridge below G: attention is reading here all the same
    ]
    for name, B, S, (peak, bandwidth), bits in cases:
        config = KNOWN_MODELS[name]
        P = config.matmul_params
        kv = 4 * config.n_layers * config.n_kv_heads * config.head_dim * S * B / bandwidth
        compute, wide, narrow = 2 * P * B / peak, P * 2 / bandwidth, P * bits / 8 / bandwidth

        def law(kv: float, compute: float = compute, wide: float = wide, narrow: float = narrow) -> float:
            return (max(compute, wide) + kv) / (max(compute, narrow) + kv)

        less = kv * bits / 16
        more = config.parameter_count / P
        likely = {
            "The keys and values are read, too, and stay as long.": law(0.0),
            "Computing does not get shorter, and at this batch it binds.": law(kv, compute=0.0),
            "The weights alone have fewer bits: keys and values keep 16.": (max(compute, wide) + kv)
            / (max(compute, narrow) + less),
            "In the linear layers the longer of the two counts, not both together.": (compute + wide + kv)
            / (compute + narrow + kv),
            "Products are of 16 bits still: weight-only quantization does not raise the peak.": (
                max(compute, wide) + kv
            )
            / (max(compute * bits / 16, narrow) + kv),
            "Attention comes after the linear layers: its time adds to the longer of the other two.": max(
                compute, wide + kv
            )
            / max(compute, narrow + kv),
            "That is upside down: the seconds before over those after.": 1 / law(kv),
            "The weights are read once for all users.": law(kv, wide=wide * B, narrow=narrow * B),
            "Each user does 2 P FLOPs.": law(kv, compute=compute / B),
            "A multiplication and an addition: 2 P B FLOPs.": law(kv, compute=compute / 2),
            "Each user has keys and values.": law(kv / B),
            "A key and a value, two bytes each: 4 bytes for each channel.": law(kv / 2),
            "It stores KV heads, not query heads.": law(kv * config.group_size),
            "Attention takes as long as its reading: its FLOPs are left out.": law(
                max(kv, kv * config.group_size * bandwidth / peak)
            ),
            "A head has config.head_dim numbers, which need not be d_model / n_heads.": law(
                kv * config.d_model / config.n_heads / config.head_dim
            ),
            "The input embedding is not read: P is config.matmul_params.": law(
                kv, compute * more, wide * more, narrow * more
            ),
            "That is how many times fewer bytes the weights have; a step is more than that.": 16 / bits,
        }
        ask(weight_only_gain, config, B, S, peak, bandwidth, bits).number(law(kv), likely, rtol=0.01)


@exercise(points=1)
def test_gain_ends(gain_ends):
    cases = [
        (*A100, 5.0),
        (*H100, 4.5),
        (*T4, 8.25),
        (100e9, 20e9, 4.0),  # 5 FLOP per byte
        (312e12, 2e12, 4.0),  # whole numbers, both
        (2e12, 1e12, 4.0),  # not one user has the whole gain
        (*A100, 8.0),
        (*H100, 3.0),
    ]
    for peak, bandwidth, bits in cases:
        ridge, share = Fraction(peak) / Fraction(bandwidth), Fraction(bits) / 16
        first, second = floor(ridge * share), ceil(ridge)
        likely = {
            "Users are whole, and the last of them still waits for the weights: round the first down.": (
                first + 1,
                second,
            ),
            "Users are whole, and the first without a gain computes for longer: round the second up.": (
                first,
                second - 1,
            ),
            "Users are whole.": (float(ridge * share), float(ridge)),
            "The smaller batch comes first.": (second, first),
            "A weight of 16 bits has 2 bytes and takes 2 FLOPs: the second is the ridge itself.": (
                first,
                ceil(2 * ridge),
            ),
            "Fewer bits are read sooner, so computing binds at a smaller batch, not at a larger.": (
                floor(ridge / share),
                second,
            ),
            "A weight has weight_bits / 8 bytes and takes 2 FLOPs.": (floor(ridge * share / 2), second),
        }
        ask(gain_ends, peak, bandwidth, bits).numbers((first, second), likely, rtol=1e-9)


def quantized(scheme: str | None) -> Stage:
    """The gqa stage on a quantized model."""

    def run(model, *arguments) -> None:
        gqa.run(model if scheme is None else quantize(model, scheme), *arguments)

    return Stage(gqa.generate, run)


def counted_step_s(scheme: str | None, config: ModelConfig, batch: int, context: int) -> float:
    """Seconds of a decode step on an A100, operator by operator. Layers are alike: the first two are counted."""
    ceilings = known_hardware("a100-80").ceilings("bf16")
    one, two = (
        predict_stage(quantized(scheme), replace(config, n_layers=n), ceilings, context, batch)[1].predicted_s
        for n in (1, 2)
    )
    return of_all_layers(one, two, config)


@exercise(points=1)
def test_quantized_guesses(quantized_guesses):
    config = KNOWN_MODELS["llama-2-7b"]
    counted = [
        1 / counted_step_s("int8", config, 1, 200),
        1 / counted_step_s("int4", config, 1, 200),
        counted_step_s(None, config, 64, 1000) / counted_step_s("int4", config, 64, 1000),
    ]
    reasons = [
        (
            "In int8",
            "a weight is one byte, and each is read once a token",
            "6.61 GB of weights and 0.1 GB of keys and values have to be read for each token",
        ),
        (
            "In int4",
            "16 codes take 4 bits, and a group of 32 shares 32 bits more",
            "a scale and a zero for each group of 32 are read as well, a bit a weight",
        ),
        (
            "For 64 users",
            "a quarter of what is read is weights, which become 3 times fewer bytes",
            "34 GB of keys and values are read as before, more than twice the weights",
        ),
    ]
    what = "three numbers: tokens/s in int8, tokens/s in int4, and the gain for 64 users"
    judge_guesses(ask(quantized_guesses), counted, 0.06, what, reasons)
    published = ", ".join(
        f"{rate} in {scheme}, {rate / right:.0%} of it"
        for scheme, rate, right in zip(("int8", "int4"), (155.6, 196.8), counted, strict=False)
    )
    return (
        f"By operators it is {counted[0]:.0f} and {counted[1]:.0f} tokens/s, and {counted[2]:.2f}. That is a bound: gpt-fast "
        f"published {published}."
    )
