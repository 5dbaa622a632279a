"""The distribution that a sampler draws from, that it draws from just that, and that a seed repeats it."""

import math

import numpy as np
import pytest
import torch
from helpers import chi_square_z
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from minillm.config import known_model
from minillm.errors import UsageError
from minillm.model import Transformer
from minillm.sampling import Sampler, draw, fresh, greedy, probabilities
from minillm.stages import kv_cache, naive

INF = math.inf


def logits_of(*p: float) -> Tensor:
    """Logits (1, V) whose softmax is p."""
    return torch.tensor([p]).log()


def kept(p: Tensor) -> list[int]:
    """The ids that the one row of p leaves possible."""
    return torch.nonzero(p[0]).flatten().tolist()


def assert_drawn_from(counts: Tensor, p: Tensor) -> None:
    """Chi-square test of counts (V,) against probabilities (V,); a right sampler fails it once in a million seeds."""
    assert counts[p == 0].sum() == 0
    counts, p = counts[p > 0].double(), p[p > 0].double()
    expected = counts.sum() * p
    assert expected.min() >= 5  # else the statistic is not chi-square
    assert chi_square_z(float(((counts - expected) ** 2 / expected).sum()), len(p) - 1) < 4.75


# The target distribution


@given(
    weights=st.lists(st.integers(1, 30), min_size=1, max_size=12, unique=True),
    k=st.integers(1, 12),
    mass=st.integers(0, 200),
    least=st.integers(0, 29),
)
def test_filters_apply_in_order_each_to_what_the_one_before_left(
    weights: list[int], k: int, mass: int, least: int
) -> None:
    # Probabilities are whole weights over their sum and every threshold lies half a weight from all of them, so that rounding
    # decides nothing and the expected ids can be computed in whole numbers.
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:k]
    total = sum(weights[i] for i in order)
    mass %= total
    nucleus = [i for n, i in enumerate(order) if sum(weights[j] for j in order[:n]) <= mass]
    least %= max(weights)
    expected = [i for i in nucleus if weights[i] > least]

    p = probabilities(
        logits_of(*(w / sum(weights) for w in weights)),
        top_k=k,
        top_p=(mass + 0.5) / total,
        min_p=(least + 0.5) / max(weights),
    )
    assert kept(p) == sorted(expected)
    assert p[0, expected].tolist() == pytest.approx([weights[i] / sum(weights[j] for j in expected) for i in expected])


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    temperature=st.floats(1e-3, 1e3),
    top_k=st.none() | st.integers(1, 25),
    top_p=st.none() | st.floats(0, 1),
    min_p=st.none() | st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_settings_leave_a_distribution_that_holds_the_greedy_token(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    dtype: torch.dtype,
) -> None:
    row = torch.tensor([logits], dtype=dtype)
    p = probabilities(row, temperature, top_k, top_p, min_p)
    assert p.dtype == torch.float32
    assert (p >= 0).all()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert p[0, greedy(row)] == p.max()


def test_temperature_divides_logits() -> None:
    # p^(1/2) of 0.64, 0.16, 0.16, 0.04 is 0.8, 0.4, 0.4, 0.2, of sum 1.8.
    p = probabilities(logits_of(0.64, 0.16, 0.16, 0.04), temperature=2.0)
    assert p[0].tolist() == pytest.approx([4 / 9, 2 / 9, 2 / 9, 1 / 9])


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 0.0])
def test_temperature_near_0_is_greedy(temperature: float) -> None:
    assert probabilities(torch.tensor([[-300.0, 9.0, 8.9]]), temperature).tolist() == [[0.0, 1.0, 0.0]]


def test_top_k_keeps_k_tokens_and_on_a_tie_the_lowest_ids() -> None:
    assert kept(probabilities(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), top_k=2)) == [1, 2]
    assert kept(probabilities(torch.zeros(1, 4), top_k=1)) == [0]
    assert kept(probabilities(torch.zeros(1, 4), top_k=9)) == [0, 1, 2, 3]


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    logits = logits_of(0.125, 0.5, 0.25, 0.125)
    assert kept(probabilities(logits, top_p=0.4)) == [1]
    assert kept(probabilities(logits, top_p=0.6)) == [1, 2]
    assert kept(probabilities(logits, top_p=0.8)) == [0, 1, 2]
    assert probabilities(logits, top_p=0.6)[0].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert kept(probabilities(torch.zeros(1, 4), top_p=0.5)) == [0, 1]  # two quarters are enough


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-3])
def test_top_p_near_0_is_greedy_and_leaves_a_token(top_p: float) -> None:
    flat = torch.zeros(1, 900)
    assert kept(probabilities(flat, top_p=top_p)) == greedy(flat).tolist()


@pytest.mark.parametrize(
    "strictest", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.0, "min_p": 1.0}]
)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
def test_the_strictest_filters_leave_the_most_probable_token(strictest: dict[str, float], temperature: float) -> None:
    logits = torch.randn(5, 900, generator=torch.Generator().manual_seed(0))
    assert len(logits.amax(1)) == (logits == logits.amax(1, keepdim=True)).sum()  # no ties
    p = probabilities(logits, temperature, **strictest)
    assert p.tolist() == one_hot(greedy(logits), 900).tolist()


def test_top_p_of_1_keeps_even_the_tail_that_rounding_would_cut() -> None:
    logits = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0)) * 6
    assert probabilities(logits, top_p=1.0).equal(probabilities(logits))


def test_top_p_sees_the_mass_that_top_k_left() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert kept(probabilities(logits, top_p=0.5)) == [0, 1]
    assert kept(probabilities(logits, top_k=2, top_p=0.5)) == [0]  # 0.4 / 0.7 = 0.57 has reached it


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    logits = logits_of(0.125, 0.5, 0.25, 0.125)
    assert kept(probabilities(logits, min_p=0.2)) == [0, 1, 2, 3]
    assert kept(probabilities(logits, min_p=0.4)) == [1, 2]
    assert kept(probabilities(logits, min_p=1.0)) == [1]
    assert kept(probabilities(torch.zeros(1, 3), min_p=1.0)) == [0, 1, 2]  # all are the most probable


def test_infinite_logits_forbid_a_token_or_force_it() -> None:
    assert probabilities(torch.tensor([[-INF, 0.0, 0.0, -INF]]))[0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert probabilities(torch.tensor([[1.0, INF, -INF, 1e30]]), 0.7, 3, 0.9, 0.1)[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert probabilities(torch.tensor([[1.0, INF, INF]]))[0].tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    # In bfloat16 a running sum of 1/50,000 stops growing at 1/128.
    p = probabilities(torch.zeros(1, 50_000, dtype=dtype), top_p=0.5)
    assert p.dtype == torch.float32
    # Cumulative sums of 25,000 terms round by at most 25,000 x 2^-24 of 0.5, as much as 38 terms.
    assert abs(len(kept(p)) - 25_000) <= 38
    assert p.sum().item() == pytest.approx(1.0, abs=1e-4)


def test_probabilities_leave_logits_as_they_are() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    probabilities(logits, 0.5, 1, 0.5, 0.5)
    assert logits.tolist() == [[0.0, 3.0, 1.0]]


# Drawing


def test_draws_follow_the_distribution() -> None:
    logits = logits_of(0.05, 0.4, 0.3, 0.15, 0.1)
    sampler = Sampler(temperature=0.8, top_p=0.9, seed=1)
    tokens = sampler(logits.expand(40_000, -1))
    assert_drawn_from(tokens.bincount(minlength=5), probabilities(logits, 0.8, top_p=0.9)[0])


def test_draws_one_after_the_other_are_independent() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    sampler = Sampler(seed=2)
    tokens = torch.cat([sampler(logits) for _ in range(6_000)])
    pairs = 3 * tokens[0::2] + tokens[1::2]
    assert_drawn_from(pairs.bincount(minlength=9), torch.outer(*[torch.tensor([0.5, 0.3, 0.2])] * 2).flatten())


def test_rows_of_a_batch_are_independent_and_each_follows_its_own_distribution() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.0, 0.2, 0.7]])
    tokens = Sampler(seed=3)(p.log().repeat(20_000, 1)).view(-1, 2)
    assert_drawn_from((4 * tokens[:, 0] + tokens[:, 1]).bincount(minlength=16), torch.outer(p[0], p[1]).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 5.0}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str
)
def test_impossible_tokens_are_never_drawn(dtype: torch.dtype, settings: dict[str, float]) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits[:, ::2] = -INF
    possible = probabilities(logits, **settings)[0] > 0  # type: ignore[arg-type]
    tokens = Sampler(seed=5, **settings)(logits.expand(4_000, -1))  # type: ignore[arg-type]
    assert not possible[::2].any()
    assert possible[tokens].all()


def race(monkeypatch: pytest.MonkeyPatch, p: list[float], times: list[float]) -> int:
    """The token that `draw` takes when the exponential generator returns these times."""
    monkeypatch.setattr(Tensor, "exponential_", lambda e, generator=None: e.copy_(torch.tensor([times])))
    return int(draw(torch.tensor([p])))


def test_exponential_of_0_picks_no_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert race(monkeypatch, [0.0, 0.25, 0.75, 0.0], [0.0, 1.0, 1.0, 0.0]) == 2
    assert race(monkeypatch, [0.0, 0.25, 0.75], [0.0, 0.0, 0.0]) == 2


def test_exponential_of_0_picks_no_token_of_almost_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    # A generator in steps of 2^-24 returns 0 once in 112 draws from 150,000 tokens: that must not decide the draw.
    assert race(monkeypatch, [1e-12, 0.25, 0.75], [0.0, 1.0, 1.0]) == 2


def test_exponential_of_0_counts_as_the_smallest_step_and_that_step_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 2.0**-24
    assert race(monkeypatch, [0.25, 0.75], [0.0, 2.5 * step]) == 1  # 0.25 against 0.75 / 2.5 = 0.3
    assert race(monkeypatch, [0.25, 0.75], [step, 4 * step]) == 0  # 0.25 against 0.19


def test_greedy_takes_the_largest_logit_and_on_a_tie_the_lowest_id() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [-INF, -5.0, -7.0]])).tolist() == [1, 1]


def test_temperature_0_is_greedy_whatever_else_is_set() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(6))
    assert Sampler(temperature=0.0, top_k=3, top_p=0.9, seed=7)(logits).equal(greedy(logits))


def test_temperature_0_puts_all_probability_on_the_lowest_id_of_a_tie() -> None:
    p = Sampler(temperature=0.0).probabilities(torch.tensor([[1.0, 2.0, 2.0], [5.0, 5.0, 5.0]]))
    assert p.dtype == torch.float32
    assert p.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_sampler_draws_shapes_on_meta() -> None:
    assert Sampler(top_k=5, top_p=0.9, min_p=0.1)(torch.empty(3, 11, device="meta")).shape == (3,)


# Seeds


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(known_model("tiny"))


@pytest.mark.parametrize("generate", [naive.generate, kv_cache.generate], ids=["naive", "kv_cache"])
def test_seed_gives_the_same_tokens_again_also_from_the_same_sampler(tiny: Transformer, generate) -> None:  # type: ignore[no-untyped-def]
    sampler = Sampler(seed=1)
    first = generate(tiny, [1, 2, 3], 24, sampler=sampler).tokens
    torch.manual_seed(99)  # what runs in between, other requests of this sampler included, changes nothing
    generate(tiny, [4, 5], 7, sampler=sampler)
    assert generate(tiny, [1, 2, 3], 24, sampler=sampler).tokens == first
    assert generate(tiny, [1, 2, 3], 24, sampler=Sampler(seed=1)).tokens == first
    assert generate(tiny, [1, 2, 3], 24, sampler=Sampler(seed=2)).tokens != first


def test_without_a_seed_tokens_differ_each_time(tiny: Transformer) -> None:
    sampler = Sampler()
    first = naive.generate(tiny, [1, 2, 3], 24, sampler=sampler).tokens
    assert naive.generate(tiny, [1, 2, 3], 24, sampler=sampler).tokens != first  # equal once in 320^24 runs


@pytest.mark.parametrize("seed", [None, 1])
def test_sampling_leaves_the_global_generator_alone(seed: int | None) -> None:
    before = torch.get_rng_state()
    Sampler(seed=seed)(torch.zeros(4, 100))
    assert torch.get_rng_state().equal(before)


def test_fresh_restarts_a_sampler_and_leaves_a_function_as_it_is() -> None:
    logits = torch.zeros(8, 1000)
    sampler = Sampler(0.7, 100, 0.9, 0.01, seed=8)
    first, second = sampler(logits), sampler(logits)
    assert not second.equal(first)
    assert fresh(sampler)(logits).equal(first)
    assert fresh(greedy) is greedy


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1))
def test_every_seed_in_range_draws(seed: int) -> None:
    assert Sampler(seed=seed)(torch.zeros(1, 4)).item() in range(4)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(
    "edge", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}, {"min_p": 1.0}], ids=str
)
def test_settings_at_the_ends_of_their_ranges_draw(edge: dict[str, float], seed: int) -> None:
    logits = torch.tensor([[0.0, 9.0, -INF]])
    (token,) = Sampler(seed=seed, **edge)(logits).tolist()  # type: ignore[arg-type]
    assert token in ([0, 1] if edge in ({"top_p": 1.0}, {"min_p": 0.0}) else [1])


BAD_SETTINGS = [
    {"temperature": -0.1},
    {"temperature": INF},
    {"temperature": math.nan},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 2.5},
    {"top_k": np.int64(0)},
    {"top_k": np.float64(2)},
    {"top_k": "3"},
    {"top_p": -0.1},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 2},
    {"seed": -1},
    {"seed": 2**63},
    {"seed": 1.5},
    {"seed": np.int64(-1)},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
def test_setting_out_of_range_is_refused_in_one_sentence(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(UsageError, match=rf"^{name} is [^\n]*\.$"):
        Sampler(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [3, np.int64(3), np.int32(3), torch.tensor(3)], ids=lambda n: type(n).__name__)
def test_whole_numbers_of_any_library_are_whole_numbers(number: int) -> None:
    sampler = Sampler(top_k=number, seed=number)
    assert (sampler.top_k, sampler.seed) == (3, 3)
    assert type(sampler.top_k) is type(sampler.seed) is int
