"""Speculation changes how fast a text comes and nothing else: the same greedy tokens, the same law of sampled ones."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from helpers import (
    SHAPES,
    assert_same_logits,
    chi_square_z,
    fresh_memory_full_of_nan,
    is_one_sentence,
    lively_model,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.batch import Request, Row
from minillm.config import ModelConfig
from minillm.errors import MinillmError, UsageError
from minillm.metrics import summarize
from minillm.model import Transformer
from minillm.roofline.counting import count
from minillm.sampling import Sampler, greedy, probabilities
from minillm.stages import drafters, gqa, naive, speculative
from minillm.stages.drafters import Answer, Draft, Drafter, ModelDrafter, NGramDrafter, Propose
from minillm.stages.rollback import RollbackCache
from minillm.stages.speculative import accept_greedy, accept_sampled, count_accepted, generate, generate_batch, residual
from minillm.stages.speculative_gain import (
    Speculation,
    best_lookahead,
    expected_tokens,
    pass_over,
    predicted_speedup,
)
from minillm.tokenizer import Tokenizer

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_lookahead = pytest.mark.parametrize("lookahead", range(1, 9))
V = 97  # of the tiny models


def noisy(model: Transformer, noise: float) -> Transformer:
    """A copy that often agrees with the model: each weight off by that share of its size."""
    copy, generator = lively_model(model.config, dtype=model.dtype), torch.Generator().manual_seed(9)
    for parameter in copy.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return copy


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {shape: lively_model(config, dtype=torch.float64) for shape, config in SHAPES.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Transformer]) -> Transformer:
    return models["llama"]


class Told:
    """A drafter that is told what to guess: a function of the text so far and of how many tokens are asked for."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self.guess = guess

    def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose:
        def propose(counts: list[int]) -> Draft:
            guesses = [self.guess(a.context, n) if n else [] for a, n in zip(answers, counts, strict=True)]
            return Draft.certain(guesses, model.device)

        return propose


def knowing(text: list[int], right: Callable[[int], bool]) -> Told:
    """A drafter that knows the whole text, prompt included, and tells the truth at the places that `right` names."""

    def guess(context: list[int], n: int) -> list[int]:
        places = range(len(context), len(context) + n)
        return [text[i] if right(i) else (text[i] + 1) % V for i in places]

    return Told(guess)


# --- Greedy: the same tokens ------------------------------------------------------------------------------------------


def all_drafters(model: Transformer, text: list[int]) -> dict[str, Drafter]:
    return {
        "n-gram": NGramDrafter(),
        "itself": ModelDrafter(model),
        "a noisy copy": ModelDrafter(noisy(model, 0.03)),
        "another model": ModelDrafter(lively_model(model.config, seed=1, dtype=model.dtype)),
        "always right": knowing(text, lambda i: True),
        "always wrong": knowing(text, lambda i: False),
        "first wrong": Told(lambda context, n: [(text[len(context)] + 1) % V, *text[len(context) + 1 :][: n - 1]]),
        "half right": knowing(text, lambda i: i % 5 < 3),
    }


@every_shape
@pytest.mark.parametrize("length", [1, 11])
def test_greedy_tokens_equal_plain_ones_whoever_drafts(shape: str, length: int, models: dict[str, Transformer]) -> None:
    model, prompt = models[shape], random_prompt(length, V)
    expected = naive.generate(model, prompt, 14).tokens
    for name, drafter in all_drafters(model, prompt + expected).items():
        for lookahead in range(1, 9):
            generation = generate(model, prompt, 14, drafter=drafter, lookahead=lookahead)
            assert generation.tokens == expected, (name, lookahead)


@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_greedy_tokens_equal_plain_ones_in_fp32(shape: str) -> None:
    model = lively_model(SHAPES[shape])
    for seed in range(4):
        prompt = random_prompt(7, V, seed)
        expected = naive.generate(model, prompt, 24).tokens
        for name, drafter in all_drafters(model, prompt + expected).items():
            assert generate(model, prompt, 24, drafter=drafter, lookahead=3 + seed).tokens == expected, name


def test_a_repeated_prompt_is_found_again_and_the_tokens_stay_plain_ones(model: Transformer) -> None:
    # The answer stands in the prompt already, so look-up finds most of it.
    start = random_prompt(9, V)
    prompt = start + naive.generate(model, start, 30).tokens + start
    generation = generate(model, prompt, 30, drafter=NGramDrafter(), lookahead=5)
    assert generation.tokens == naive.generate(model, prompt, 30).tokens
    assert generation.speculation.drafted > 0


@every_lookahead
def test_a_perfect_drafter_gives_a_full_round_every_time(lookahead: int, model: Transformer) -> None:
    prompt = random_prompt(5, V)
    text = prompt + naive.generate(model, prompt, 40).tokens
    for drafter in (knowing(text, lambda i: True), ModelDrafter(model)):
        seen = generate(model, prompt, 40, drafter=drafter, lookahead=lookahead).speculation
        # One token comes from the prompt's pass; every round gives lookahead + 1, the last one what is left of 39.
        rounds, rest = divmod(39, lookahead + 1)
        assert seen.accepted == seen.drafted == rounds * lookahead + max(0, rest - 1)
        assert (seen.rounds, seen.refusals, seen.alpha) == (rounds + (rest > 0), 0, 1.0)


@every_lookahead
def test_a_drafter_that_is_always_wrong_costs_rounds_and_no_token(lookahead: int, model: Transformer) -> None:
    prompt = random_prompt(5, V)
    expected = naive.generate(model, prompt, 12).tokens
    generation = generate(model, prompt, 12, drafter=knowing(prompt + expected, lambda i: False), lookahead=lookahead)
    assert generation.tokens == expected
    seen = generation.speculation
    assert (seen.rounds, seen.accepted, seen.refusals, seen.alpha) == (11, 0, 10, 0.0)  # the last round guesses nothing
    assert seen.tokens_per_round == 1.0


def test_a_lone_wrong_guess_is_checked_too(model: Transformer) -> None:
    prompt = random_prompt(5, V)
    expected = naive.generate(model, prompt, 9).tokens
    text = prompt + expected
    one_wrong = Told(lambda context, n: [(text[len(context)] + 1) % V])
    assert generate(model, prompt, 9, drafter=one_wrong, lookahead=6).tokens == expected


def test_a_drafter_of_another_dtype_and_shape_will_do(model: Transformer) -> None:
    prompt, small = random_prompt(6, V), lively_model(SHAPES["multi-query"], dtype=torch.float32)
    expected = naive.generate(model, prompt, 12).tokens
    assert generate(model, prompt, 12, drafter=ModelDrafter(small)).tokens == expected


# --- The ends: of the request, of the positions, of the cache, of a stop token ----------------------------------------


class Watched(RollbackCache):
    """Notes the positions of every pass, and for how much room each cache was made."""

    made: ClassVar[list["Watched"]] = []

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        super().__init__(model, capacity, batch)
        self.seen: list[list[list[int]]] = []
        self.made.append(self)

    def positions(self, n_tokens: int) -> Tensor:
        self.seen.append(super().positions(n_tokens).tolist())
        return super().positions(n_tokens)

    @property
    def furthest(self) -> list[int]:
        """The last position that each sequence came to."""
        return [max(max(rows[b]) for rows in self.seen) for b in range(len(self.lengths))]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    Watched.made.clear()
    monkeypatch.setattr(speculative, "RollbackCache", Watched)
    monkeypatch.setattr(drafters, "RollbackCache", Watched)
    return Watched.made


@every_lookahead
@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_prompt_and_answer_may_fill_the_positions_exactly(lookahead: int, n: int, watched: list[Watched]) -> None:
    model = lively_model(replace(SHAPES["llama"], max_positions=24), dtype=torch.float64)
    prompt = random_prompt(24 - n + 1, V)
    expected = naive.generate(model, prompt, n).tokens
    for drafter in all_drafters(model, prompt + expected).values():
        assert generate(model, prompt, n, drafter=drafter, lookahead=lookahead).tokens == expected
    assert all(cache.capacity == 24 and cache.furthest[0] < 24 for cache in watched if cache.seen)
    with pytest.raises(UsageError, match="passes the 24 positions"):
        generate(model, prompt, n + 1, drafter=NGramDrafter())


def test_no_pass_goes_beyond_the_request_in_a_ragged_batch(model: Transformer, watched: list[Watched]) -> None:
    prompts, limits = [random_prompt(n, V, n) for n in (3, 12, 1, 8)], [9, 2, 6, 1]
    for drafter in (ModelDrafter(model), NGramDrafter(), ModelDrafter(noisy(model, 0.03))):
        generate_batch(model, prompts, limits, drafter=drafter, lookahead=7)
    sizes = [len(prompt) + n - 1 for prompt, n in zip(prompts, limits, strict=True)]
    for cache in watched:
        assert all(place < size for place, size in zip(cache.furthest, sizes, strict=True))


def test_verification_is_one_pass_over_the_last_token_and_the_drafts(
    model: Transformer, watched: list[Watched]
) -> None:
    prompt = random_prompt(4, V)
    text = prompt + naive.generate(model, prompt, 9).tokens
    generate(model, prompt, 9, drafter=knowing(text, lambda i: i not in (6, 9)), lookahead=3)
    # Prompt; from 4: 5 right, 6 refused; from 6: 7 and 8 right, 9 refused; from 9: 10, 11 right and 12 the target's own.
    assert [rows[0] for rows in watched[0].seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9], [9, 10, 11]]


def test_the_draft_model_runs_a_token_a_pass_and_two_after_full_acceptance(
    model: Transformer, watched: list[Watched]
) -> None:
    generate(model, random_prompt(4, V), 8, drafter=ModelDrafter(model), lookahead=3)
    draft, target = sorted(watched, key=lambda cache: len(cache.seen), reverse=True)
    assert [rows[0] for rows in target.seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [rows[0] for rows in draft.seen] == [[0, 1, 2, 3, 4], [5], [6], [7, 8], [9]]


def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there(model: Transformer) -> None:
    prompt = random_prompt(5, V)
    free = naive.generate(model, prompt, 20).tokens
    perfect = knowing(prompt + free, lambda i: True)
    for drafter in (perfect, ModelDrafter(model)):
        for lookahead in (1, 4, 8):
            for stop in set(free):
                expected, seen = free[: free.index(stop) + 1], []
                generation = generate(
                    model, prompt, 20, drafter=drafter, lookahead=lookahead, stop_tokens={stop}, on_token=seen.append
                )
                assert generation.tokens == seen == expected
                assert len(generation) == len(generation.times) == len(expected)


def test_a_guessed_stop_token_that_is_refused_ends_nothing(model: Transformer) -> None:
    prompt = random_prompt(5, V)
    free = naive.generate(model, prompt, 12).tokens
    stop = next(token for token in range(V) if token not in free)
    guess_stop = Told(lambda context, n: [stop] * n)
    assert generate(model, prompt, 12, drafter=guess_stop, stop_tokens={stop}).tokens == free


# --- Several sequences at once ----------------------------------------------------------------------------------------


@every_shape
@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_a_row_of_a_ragged_batch_equals_the_row_alone(
    shape: str, lookahead: int, models: dict[str, Transformer]
) -> None:
    model, limits = models[shape], [13, 1, 20, 5, 2]
    prompts = [random_prompt(n, V, seed=n) for n in (1, 3, 17, 8, 2)]
    expected = [naive.generate(model, prompt, n).tokens for prompt, n in zip(prompts, limits, strict=True)]
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]

    def half_right(context: list[int], n: int) -> list[int]:
        text = next(text for text in texts if text[: len(context)] == context)
        return knowing(text, lambda i: i % 7 < 5).guess(context, n)

    others = (ModelDrafter(model), ModelDrafter(noisy(model, 0.03)), NGramDrafter())
    for drafter in (Told(half_right), *others):
        answers = generate_batch(model, prompts, limits, drafter=drafter, lookahead=lookahead)
        assert [answer.tokens for answer in answers] == expected


def test_batches_of_every_size_with_stop_tokens_and_settings_of_their_own(model: Transformer) -> None:
    prompts = [random_prompt(n, V, seed=n) for n in (4, 9, 2, 6)]
    free = [naive.generate(model, prompt, 16).tokens for prompt in prompts]
    stops = [tokens[5] for tokens in free]
    requests = [Request(prompt, 16, stop_tokens={stop}) for prompt, stop in zip(prompts, stops, strict=True)]
    expected = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(free, stops, strict=True)]
    for max_batch in (1, 2, 3, 4, None):
        answers = generate_batch(model, requests, drafter=ModelDrafter(model), lookahead=5, max_batch=max_batch)
        assert [answer.tokens for answer in answers] == expected
    seen: list[tuple[int, int]] = []
    generate_batch(model, prompts, 6, drafter=NGramDrafter(), on_token=lambda index, token: seen.append((index, token)))
    assert [[token for index, token in seen if index == i] for i in range(4)] == [tokens[:6] for tokens in free]


def test_statistics_of_a_row_are_those_of_the_row_alone(model: Transformer) -> None:
    prompts, limits, drafter = [[1, 2], [3, 4, 5], [6]], [4, 15, 1], ModelDrafter(noisy(model, 0.03))
    together = generate_batch(model, prompts, limits, drafter=drafter, lookahead=3)
    alone = [generate(model, p, n, drafter=drafter, lookahead=3) for p, n in zip(prompts, limits, strict=True)]
    assert [answer.speculation for answer in together] == [answer.speculation for answer in alone]
    assert together[2].speculation == Speculation()


def test_a_sampled_row_does_not_depend_on_its_neighbours(model: Transformer) -> None:
    sampler = Sampler(0.9, top_p=0.95, seed=4)
    prompts = [random_prompt(n, V, seed=n) for n in (4, 9, 2, 6)]
    for drafter in (ModelDrafter(noisy(model, 0.03)), NGramDrafter()):
        alone = [generate(model, prompt, 12, drafter=drafter, sampler=sampler).tokens for prompt in prompts]
        requests = [Request(prompt, 12, sampler) for prompt in prompts]
        requests.insert(1, Request(prompts[0], 5))  # a greedy one among them, which ends early
        together = [answer.tokens for answer in generate_batch(model, requests, drafter=drafter)]
        assert together.pop(1) == naive.generate(model, prompts[0], 5).tokens
        assert together == alone
        again = [generate(model, prompt, 12, drafter=drafter, sampler=sampler).tokens for prompt in prompts]
        assert again == alone  # each request begins its seed anew
        assert len(set(map(tuple, alone))) == 4


# --- What drafters propose --------------------------------------------------------------------------------------------


class Noted:
    """Another drafter, whose every proposal is noted with the text that it followed."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposals: list[tuple[list[int], list[int], Tensor | None]] = []

    def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose:
        propose = self.drafter.begin(model, answers)

        def noting(counts: list[int]) -> Draft:
            draft = propose(counts)
            for b, (answer, n) in enumerate(zip(answers, draft.counts, strict=True)):
                if n:
                    self.proposals.append((list(answer.context), draft.tokens[b, :n].tolist(), draft.q[b]))
            return draft

        return noting


@every_shape
def test_a_draft_model_proposes_what_it_would_say_itself_whatever_was_refused_before(
    shape: str, models: dict[str, Transformer]
) -> None:
    # Refusals and full acceptances both occur; a drafter's cache that is one token long, short or stale says other things.
    model, copy = models[shape], noisy(models[shape], 0.03)
    drafter = Noted(ModelDrafter(copy))
    for answers in (
        [generate(model, random_prompt(5, V), 40, drafter=drafter, lookahead=3)],
        generate_batch(model, [random_prompt(n, V, n) for n in (2, 9, 4)], 20, drafter=drafter, lookahead=3),
    ):
        seen = sum((answer.speculation for answer in answers), Speculation())
        assert 0 < seen.refusals < seen.rounds
    for context, tokens, _ in drafter.proposals:
        assert tokens == naive.generate(copy, context, len(tokens)).tokens


@torch.inference_mode()
def test_rows_that_draft_different_numbers_leave_each_other_alone(model: Transformer) -> None:
    answers = [Answer(Row(model, Request(random_prompt(n, V, n), 30)), model.device) for n in (3, 8, 5)]
    propose = ModelDrafter(model).begin(model, answers)
    for counts in ([3, 1, 2], [1, 3, 2], [2, 2, 1], [3, 3, 3]):
        draft = propose(counts)
        for answer, n, tokens in zip(answers, counts, draft.tokens.tolist(), strict=True):
            assert tokens[:n] == naive.generate(model, answer.context, n).tokens
            answer.context += tokens[:n]


def test_a_draft_model_tells_the_chances_that_it_drew_by(model: Transformer) -> None:
    copy, settings = noisy(model, 0.1), {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    drafter = Noted(ModelDrafter(copy))
    prompts = [random_prompt(n, V, n) for n in (2, 9, 4)]
    generate_batch(model, prompts, [9, 14, 5], drafter=drafter, sampler=Sampler(seed=3, **settings))  # type: ignore[arg-type]
    for context, tokens, q in drafter.proposals:
        logits = logits_whole(copy, torch.tensor([context + tokens]))[0, len(context) - 1 : -1]
        torch.testing.assert_close(q, probabilities(logits, **settings), atol=1e-5, rtol=0)  # type: ignore[arg-type]
        assert all(law[token] > 0 for law, token in zip(q, tokens, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("context", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3], 2, [9, 5]),  # three tokens beat a later match of two
        ([5, 3, 7, 6, 5, 3, 8, 5, 3], 2, [8, 5]),  # of equal matches, the latest
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3, 4, 1, 2, 3, 4]),  # a loop goes on as a loop
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([3, 8, 3], 4, []),  # one token alone says too little
        ([7, 7], 4, []),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
    ],
)
def test_the_n_gram_drafter_proposes_what_followed_the_last_words(
    context: list[int], count: int, expected: list[int]
) -> None:
    assert NGramDrafter(max_ngram=3).look_up(context, count) == expected


def test_n_gram_limits_are_kept() -> None:
    context = [1, 2, 3, 9, 5, 2, 3, 7, 8, 3, 4, 1, 2, 3]
    expected = {(3, 3): [9], (3, 1): [9], (2, 2): [7], (2, 1): [7], (1, 1): [4], (4, 4): []}
    for (most, least), guess in expected.items():
        assert NGramDrafter(most, least).look_up(context, 1) == guess
    assert (NGramDrafter().max_ngram, NGramDrafter().min_ngram) == (3, 2)


# --- Sampling: the same law -------------------------------------------------------------------------------------------

P = torch.tensor([[0.1, 0.1, 0.7, 0.1], [0.6, 0.1, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])  # (k+1, V)
Q = torch.tensor([[0.4, 0.2, 0.1, 0.3], [0.1, 0.2, 0.3, 0.4]])  # (k, V)


def test_the_rule_gives_the_target_s_law_by_exact_enumeration() -> None:
    # All drafts, and u in the middle of twelfths: every p/q below 1 here is a whole number of them, so nothing is estimated.
    u = (torch.arange(12) + 0.5) / 12
    law: Counter[tuple[int, ...]] = Counter()
    for drafts in itertools.product(range(4), repeat=2):
        x = torch.tensor(drafts)
        chance = Q[0, x[0]].item() * Q[1, x[1]].item() / 144
        for pair in itertools.product(u, u):
            a = int(count_accepted(P, Q, x, torch.stack(pair)))
            own = residual(P[a], Q[a]) if a < 2 else P[2]
            for token, after in enumerate(own.tolist()):
                law[*drafts[:a], token] += chance * after  # type: ignore[assignment]
    # Whether or not a later token is made in the same round, those that are follow the target.
    for place in range(3):
        made = {text: chance for text, chance in law.items() if len(text) > place}
        total = sum(made.values())
        for token in range(4):
            share = sum(chance for text, chance in made.items() if text[place] == token)
            assert share == pytest.approx(P[place, token].item() * total, abs=1e-6)
    # A token is accepted with chance sum(min(p, q)).
    accepted = torch.minimum(P[:2], Q).sum(dim=1)
    assert sum(c for text, c in law.items() if len(text) > 1) == pytest.approx(accepted[0].item(), abs=1e-6)
    assert sum(c for text, c in law.items() if len(text) > 2) == pytest.approx(accepted.prod().item(), abs=1e-6)


class Enumerated:
    """Replaces chance by all that chance may do: every run takes another branch, and the chances of branches are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path: list[int] = []
        self.options: list[list[float]] = []
        for module in (speculative, drafters):
            monkeypatch.setattr(module, "draw", lambda p, generator: torch.tensor([self.choose(p[0].tolist())]))
        monkeypatch.setattr(speculative, "count_accepted", self.accepted)

    def choose(self, chances: list[float]) -> int:
        depth = len(self.options)
        self.options.append(chances)
        if depth == len(self.path):
            self.path.append(next(i for i, chance in enumerate(chances) if chance > 0))
        return self.path[depth]

    def accepted(self, p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Tensor:
        """min(1, p/q) for each in turn, as chances; `count_accepted` itself is enumerated above."""
        for i, x in enumerate(drafts.tolist()):
            yes = min(1.0, (p[i, x] / q[i, x]).item())
            if self.choose([yes, 1 - yes]) == 1:
                return torch.tensor(i)
        return torch.tensor(len(drafts))

    def law(self, run: Callable[[], Sequence[int]]) -> dict[tuple[int, ...], float]:
        """The chance of every result of `run`, by running it once for each branch."""
        law: Counter[tuple[int, ...]] = Counter()
        while True:
            self.options = []
            result = tuple(run())
            law[result] += math.prod(o[i] for o, i in zip(self.options, self.path, strict=True))  # type: ignore[assignment]
            while self.path:  # on to the next branch of the deepest choice that has one
                last, chances = self.path.pop(), self.options.pop()
                later = [i for i in range(last + 1, len(chances)) if chances[i] > 0]
                if later:
                    self.path.append(later[0])
                    break
            else:
                return law  # type: ignore[return-value]


TINY = ModelConfig("law-tiny", 1, 16, 2, 1, 8, 16, 3, 64)
FILTERS = [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 2}, {"min_p": 0.3}]


def calm_model(seed: int) -> Transformer:
    """A model that leaves every token of a tiny vocabulary a fair chance."""
    model = lively_model(TINY, seed)
    model.head.weight.mul_(0.4)
    return model


def target_law(model: Transformer, prompt: list[int], n: int, settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The chance of every text of n tokens: the product of the chances of its tokens, from naive logits."""
    law = {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, chance in law.items():
            p = probabilities(logits_whole(model, torch.tensor([prompt + list(text)]))[:, -1], **settings)[0].tolist()
            longer |= {(*text, token): chance * p[token] for token in range(len(p)) if p[token] > 0}
        law = longer
    return law


def sometimes_right(context: list[int], n: int) -> list[int]:
    return [(context[-1] + i) % 3 for i in range(n)]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("drafts", ["drawn", "certain"])
def test_sampled_texts_follow_the_target_s_law_exactly(
    settings: dict[str, Any], drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = calm_model(0), [0, 2]
    drafter: Drafter = ModelDrafter(calm_model(2)) if drafts == "drawn" else Told(sometimes_right)
    enumerated = Enumerated(monkeypatch)
    n = 3 if drafts == "drawn" else 4
    law = enumerated.law(
        lambda: generate(target, prompt, n, drafter=drafter, lookahead=2, sampler=Sampler(**settings)).tokens
    )
    expected = target_law(target, prompt, n, settings)
    assert law.keys() == expected.keys()
    for text, chance in expected.items():
        assert law[text] == pytest.approx(chance, abs=1e-5)


def deviation(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations the chi-square statistic of the counts lies above its mean."""
    assert counts.keys() <= law.keys()  # no text that the target cannot say
    n = sum(counts.values())
    likely = [text for text in law if n * law[text] >= 5]
    cells = [(counts[text], n * law[text]) for text in likely]
    rest = 1 - sum(law[text] for text in likely)
    if n * rest >= 5:  # what is too rare for a cell of its own
        cells.append((n - sum(counts[text] for text in likely), n * rest))
    return chi_square_z(sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1)


LAW_SETTINGS = {"temperature": 1.5, "top_p": 0.85}


def sample_texts(model: Transformer, drafter: Drafter, n: int, together: int, texts: int) -> tuple[Counter[Any], float]:
    """How often each text of n tokens comes, `together` at a time, and the alpha of all of it."""
    counts: Counter[tuple[int, ...]] = Counter()
    seen = Speculation()
    for start in range(0, texts, together):
        requests = [
            Request([0, 2], n, Sampler(seed=start + b, **LAW_SETTINGS))  # type: ignore[arg-type]
            for b in range(together)
        ]
        for answer in generate_batch(model, requests, drafter=drafter, lookahead=3):
            counts[tuple(answer.tokens)] += 1
            seen = seen + answer.speculation
    assert seen.alpha is not None
    return counts, seen.alpha


@pytest.mark.parametrize(("together", "texts"), [(1, 600), (4, 1600)])
@pytest.mark.parametrize("drafts", ["drawn", "certain"])
def test_sampled_texts_pass_a_chi_square_test(together: int, texts: int, drafts: str) -> None:
    model = calm_model(0)
    drafter: Drafter = ModelDrafter(calm_model(2)) if drafts == "drawn" else Told(sometimes_right)
    counts, alpha = sample_texts(model, drafter, 4, together, texts)
    assert deviation(counts, target_law(model, [0, 2], 4, LAW_SETTINGS)) < 4.75  # once in a million
    assert 0.1 < alpha < 0.9


def accept_all(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Tensor:
    return torch.tensor(len(drafts))


def upside_down(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Tensor:
    return count_accepted(q, p, drafts, u)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("count_accepted", accept_all),
        ("count_accepted", upside_down),
        ("residual", lambda p, q: p),
    ],
    ids=["every draft accepted", "q over p", "refused token drawn from p"],
)
def test_the_chi_square_test_fails_for_a_wrong_rule(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, name, wrong)
    model = calm_model(0)
    counts, _ = sample_texts(model, ModelDrafter(calm_model(2)), 4, 4, 1600)
    expected = target_law(model, [0, 2], 4, LAW_SETTINGS)
    assert not counts.keys() <= expected.keys() or deviation(counts, expected) > 4.75


def test_a_perfect_drafter_is_accepted_also_when_sampling(model: Transformer) -> None:
    generation = generate(model, random_prompt(5, V), 60, drafter=ModelDrafter(model), sampler=Sampler(1.2, seed=2))
    assert generation.speculation.alpha == 1.0  # p = q up to rounding in fp64, far below any u here
    assert len(set(generation.tokens)) > 20


def test_temperature_0_and_top_k_1_are_greedy(model: Transformer) -> None:
    prompt = random_prompt(5, V)
    expected = naive.generate(model, prompt, 16).tokens
    for sampler in (Sampler(temperature=0.0), Sampler(top_k=1), Sampler(top_p=0.0)):
        for drafter in (
            ModelDrafter(noisy(model, 0.03)),
            NGramDrafter(),
            knowing(prompt + expected, lambda i: i % 3 > 0),
        ):
            assert generate(model, prompt, 16, drafter=drafter, sampler=sampler).tokens == expected


@pytest.mark.parametrize(("sampler", "draws"), [(greedy, False), (Sampler(0.0), False), (Sampler(0.01), True)])
def test_only_who_draws_has_a_law_and_a_generator(sampler: Any, draws: bool, model: Transformer) -> None:
    answer = Answer(Row(model, Request([1, 2], 5, sampler)), model.device)
    assert (answer.sampler is not None) == (answer.generator is not None) == draws


def test_greedy_acceptance_is_the_sampling_rule_with_all_chance_on_the_argmax() -> None:
    logits, generator = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    p = torch.nn.functional.one_hot(greedy(logits), 5).float()
    for guess in itertools.product(range(5), repeat=3):
        drafts = torch.tensor(guess)
        tokens, a = accept_greedy(logits, drafts)
        sampled, b = accept_sampled(p, None, drafts, generator)
        assert a == b
        assert torch.equal(tokens[: a + 1], sampled[: b + 1])


def test_a_token_that_the_target_cannot_say_is_never_accepted() -> None:
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    assert count_accepted(p, q, torch.tensor([0]), torch.tensor([0.0])) == 0  # not even where u is 0
    assert residual(p[0], q[0]).tolist() == [0.0, 1.0]


def test_nothing_is_taken_from_equal_laws() -> None:
    p = torch.tensor([0.3, 0.7])
    assert residual(p, p).tolist() == p.tolist()  # rounding may refuse a token there, and 0/0 is no law
    highest = torch.tensor([1 - 2**-24])
    for chance in (1.0, 0.5, 0.3, 1e-30):
        law = torch.tensor([[chance, 1 - chance]] * 2)
        assert count_accepted(law, law[:1], torch.tensor([0]), highest) == 1


def test_chances_are_compared_in_fp32_whatever_the_dtypes_of_the_models() -> None:
    target, other = calm_model(0).bfloat16(), calm_model(2)
    drafter = Noted(ModelDrafter(other))
    generate(target, [1, 2], 12, drafter=drafter, sampler=Sampler(seed=1))
    assert {q.dtype for _, _, q in drafter.proposals if q is not None} == {torch.float32}


# --- The cache --------------------------------------------------------------------------------------------------------


@every_shape
def test_a_cache_that_was_rolled_back_is_the_cache_that_never_saw_more(
    shape: str, models: dict[str, Transformer]
) -> None:
    # Three texts grow by 0 to 5 tokens a pass, each pass with up to two tokens of junk behind them, which are then taken back.
    model, generator = models[shape], torch.Generator().manual_seed(0)
    texts, junk = [random_prompt(50, V, seed) for seed in range(3)], [5, 60]
    whole = logits_whole(model, torch.tensor(texts))  # (3, 50, V)
    cache, lengths = RollbackCache(model, 50, batch=3), [0, 0, 0]
    new, wrong = [4, 1, 7], [0, 2, 1]
    while min(lengths) < 40:
        fed = [[*texts[b][lengths[b] : lengths[b] + new[b]], *junk[: wrong[b]]] for b in range(3)]
        fed = [part or [texts[b][lengths[b] - 1]] for b, part in enumerate(fed)]  # none: the last one again
        T = max(map(len, fed))
        cache.extend([n + w for n, w in zip(new, wrong, strict=True)])
        with torch.inference_mode():
            logits = model(torch.tensor([[*part, *part[-1:] * (T - len(part))] for part in fed]), cache)  # (3, T, V)
        for b, n in enumerate(new):
            if n:
                assert_same_logits(logits[b, :n], whole[b, lengths[b] : lengths[b] + n])
            if not wrong[b]:  # repeated or not, the last column is the last token
                assert_same_logits(logits[b, -1], whole[b, lengths[b] + n - 1])
            lengths[b] += n
        cache.roll_back(lengths)
        assert cache.lengths == lengths
        numbers = torch.randint(0, 6, (6,), generator=generator).tolist()
        new = [min(n, 45 - length) for n, length in zip(numbers[:3], lengths, strict=True)]
        wrong = [n // 2 for n in numbers[3:]]


@pytest.mark.parametrize(
    ("held", "new", "window", "needs_mask"),
    [
        ([0], [5], None, False),  # a prompt that comes whole
        ([0, 0], [5, 5], None, False),
        ([0], [9], 5, False),  # also where a window is shorter
        ([4, 4], [1, 1], None, False),  # a decode step of equal lengths
        ([4], [1], 5, False),  # that sees all, as the window counts the new token
        ([5], [1], 5, True),
        ([3], [2], None, True),  # a chunk, or guesses behind a token
        ([5, 4], [1, 1], None, True),
        ([5, 4], [1, 2], None, True),  # of equal length afterwards, and brought by different numbers
        ([0, 0], [3, 2], None, True),
        ([0, 3], [4, 1], None, True),  # a whole prompt beside one token, which make the pass as wide as both are long
    ],
)
def test_a_mask_is_made_where_one_is_needed(
    held: list[int], new: list[int], window: int | None, needs_mask: bool
) -> None:
    # With a mask that hides nothing more the numbers are the same, and the fast kernels are not used.
    cache = RollbackCache(lively_model(replace(SHAPES["llama"], sliding_window=window)), 9, batch=len(held))
    cache.lengths = held
    names = {op.name for op, _ in count(lambda: cache.extend(new))}
    assert any("masked_fill" in name for name in names) is needs_mask


def test_memory_full_of_nan_reaches_no_row(model: Transformer) -> None:
    prompts = [random_prompt(n, V, n) for n in (2, 30, 9)]
    expected = [naive.generate(model, prompt, 8).tokens for prompt in prompts]
    with fresh_memory_full_of_nan():
        answers = generate_batch(model, prompts, 8, drafter=ModelDrafter(noisy(model, 0.03)))
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("place", [0, 2])
def test_a_guess_that_overflows_spoils_no_text(place: int) -> None:
    # In fp16 a sound model can overflow on one token. Refused, it stands behind the masks of this pass and of later ones.
    model = lively_model(replace(SHAPES["llama"], tied_embeddings=False), dtype=torch.float16)
    model.embed.weight[0] = math.inf
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    expected = [naive.generate(model, prompt, 12).tokens for prompt in prompts]
    assert len(set(map(tuple, expected))) == 3
    overflows = Told(lambda context, n: [0 if i == place else 5 for i in range(n)])
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(model, prompt, 12, drafter=overflows).tokens == tokens
    assert [answer.tokens for answer in generate_batch(model, prompts, 12, drafter=overflows)] == expected


@pytest.mark.parametrize(
    ("dtype", "new", "cleaned"),
    [
        (torch.float16, [3, 2], 2),
        (torch.float16, [3, 3], 0),  # without a mask nothing is hidden that could come to light
        (torch.float32, [3, 2], 0),  # whose range no guess leaves
    ],
)
def test_keys_and_values_are_cleaned_where_a_guess_can_overflow_and_only_there(
    dtype: torch.dtype, new: list[int], cleaned: int
) -> None:
    model = lively_model(SHAPES["llama"], dtype=dtype)
    cache = RollbackCache(model, 9, batch=2)
    cache.extend(new)
    cost = count(lambda: model(torch.ones(2, 3, dtype=torch.int64), cache))
    assert sum(n for op, n in cost if op.name == "nan_to_num") == cleaned * model.config.n_layers


def test_an_empty_rollback_and_one_beyond_the_end_change_nothing(model: Transformer) -> None:
    cache = RollbackCache(model, 9)
    cache.extend([5])
    cache.roll_back([7])
    assert cache.lengths == [5]
    cache.roll_back([5])
    assert cache.lengths == [5]


def test_a_decode_step_of_equal_lengths_loads_a_key_once_a_group(model: Transformer) -> None:
    cache, c = RollbackCache(model, 9, batch=2), model.config
    cache.extend([4, 4])
    model(torch.ones(2, 4, dtype=torch.int64), cache)
    cache.extend([1, 1])
    cost = count(lambda: model(torch.ones(2, 1, dtype=torch.int64), cache))
    [(attention, n)] = [(op, n) for op, n in cost if op.name == "scaled_dot_product_attention"]
    assert n == c.n_layers and attention.shape.startswith(f"2x{c.n_kv_heads}x{c.group_size}x{c.head_dim}, ")


def test_rows_that_bring_nothing_repeat_their_last_tokens(model: Transformer) -> None:
    cache = RollbackCache(model, 9, batch=2)
    cache.extend([5, 3])
    cache.extend([0, 0])
    assert cache.lengths == [5, 3]
    assert cache.positions(1).tolist() == [[4], [2]]


def test_a_full_cache_says_so_in_one_sentence(model: Transformer) -> None:
    cache = RollbackCache(model, 9, batch=2)
    cache.extend([5, 9])
    with pytest.raises(MinillmError, match="holds 9 tokens a sequence and was asked to hold 10") as error:
        cache.extend([1, 1])
    assert is_one_sentence(str(error.value))
    assert cache.lengths == [5, 9]


# --- What is read, timed and counted ----------------------------------------------------------------------------------

READS = {"tolist", "item", "__int__", "__bool__", "__index__", "__float__", "numpy", "nonzero", "cpu"}


class Reads(TorchFunctionMode):
    """Counts the times that the host asks a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Counts reads that happen inside of PyTorch: of an index or of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampler", [greedy, Sampler(0.8, top_p=0.9, seed=1)], ids=["greedy", "sampled"])
def test_the_host_reads_once_a_round(sampler: Any, model: Transformer) -> None:
    prompt = random_prompt(5, V)
    for drafter in (NGramDrafter(), ModelDrafter(noisy(model, 0.03))):
        with Reads() as reads, Scalars() as scalars:
            generation = generate(model, prompt, 20, drafter=drafter, sampler=sampler)
        assert (reads.count, scalars.count) == (generation.speculation.rounds + 1, 0)
        with Reads() as reads, Scalars() as scalars:
            answers = generate_batch(model, [[1, 2], [3, 4, 5]], 12, drafter=drafter, sampler=sampler)
        assert (reads.count, scalars.count) == (max(a.speculation.rounds for a in answers) + 1, 0)


def test_times_do_not_decrease_and_metrics_take_them(model: Transformer) -> None:
    generation = generate(model, random_prompt(5, V), 20, drafter=ModelDrafter(model))
    times = generation.times
    assert len(times) == 20
    assert times == sorted(times)
    assert summarize(times)["tokens_per_s"] == 20 / times[-1]


def test_statistics_add_up() -> None:
    seen = Speculation()
    for drafted, accepted in ((4, 4), (4, 1), (4, 0), (2, 2), (0, 0)):
        seen.add(drafted, accepted)
    assert (seen.rounds, seen.drafted, seen.accepted, seen.refusals) == (5, 14, 7, 2)
    assert seen.alpha == 7 / 9  # the five tokens behind a refused one were never judged
    assert seen.acceptance_rate == 7 / 14
    assert seen.tokens_per_round == 12 / 5
    assert seen + seen == Speculation(10, 28, 14, 4)
    assert (Speculation().alpha, Speculation().acceptance_rate, Speculation().tokens_per_round) == (None, None, None)


def test_alpha_estimates_the_chance_that_a_judged_guess_is_right(model: Transformer) -> None:
    prompt, generator = random_prompt(5, V), torch.Generator().manual_seed(5)
    text = prompt + gqa.generate(model, prompt, 180).tokens
    right = (torch.rand(200, generator=generator) < 0.7).tolist()
    seen = generate(model, prompt, 180, drafter=knowing(text, lambda i: right[i]), lookahead=4).speculation
    assert seen.alpha == pytest.approx(0.7, abs=3.5 * (0.21 / (seen.accepted + seen.refusals)) ** 0.5)
    assert seen.tokens_per_round == pytest.approx(expected_tokens(0.7, 4), rel=0.15)


def test_expected_tokens_are_those_of_the_paper() -> None:
    # Equation 1 of arXiv 2211.17192, for lookahead 4.
    for alpha, expected in ((0.5, 1.94), (0.6, 2.31), (0.7, 2.77), (0.8, 3.36), (0.9, 4.10)):
        assert expected_tokens(alpha, 4) == pytest.approx(expected, abs=0.005)
        assert expected_tokens(alpha, 4) == pytest.approx((1 - alpha**5) / (1 - alpha))
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(0.3, 0) == 1


def test_predicted_speedup_weighs_tokens_against_time() -> None:
    assert predicted_speedup(0.8, 4, 0.128) == pytest.approx(2.22, abs=0.005)  # Chen et al. measured 1.92 to 2.01 of it
    assert predicted_speedup(0.9, 0, 0.5) == 1.0
    assert predicted_speedup(1.0, 4, 0.0) == 5.0
    assert predicted_speedup(1.0, 4, 1.0) == 1.0  # a drafter as slow as the target gains nothing, however right it is
    assert predicted_speedup(0.8, 4, 0.1, lambda n: 1 + 0.1 * n) == pytest.approx(expected_tokens(0.8, 4) / 1.9)


def test_best_lookahead_is_the_one_that_no_other_beats() -> None:
    for alpha, c in itertools.product((0.1, 0.5, 0.8, 0.95), (0.0, 0.05, 0.2, 0.6)):
        best = best_lookahead(alpha, c, 12)
        speedups = [predicted_speedup(alpha, k, c) for k in range(13)]
        assert speedups[best] == max(speedups)
        assert speedups.index(max(speedups)) == best
    assert best_lookahead(0.5, 0.6) == 0  # alpha below c: do not speculate
    assert best_lookahead(1.0, 0.0, 7) == 7
    assert best_lookahead(1.0, 0.0) == 16  # as far as it looks
    assert best_lookahead(0.9, 0.0, 12, lambda n: 1.0 if n <= 4 else 3.0) == 3


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (5, 1), (4, 3)])
def test_the_passes_of_a_round_can_be_counted_without_running_them(n: int, batch: int, model: Transformer) -> None:
    meta = lively_model(SHAPES["llama"], dtype=torch.float64).to("meta")
    real, counted = (count(pass_over(m, n, 20, batch)) for m in (model, meta))
    assert (counted.flops, counted.bytes) == (real.flops, real.bytes)
    linear = 2 * n * batch * model.config.matmul_params
    attention = 4 * n * batch * model.config.n_layers * model.config.n_heads * model.config.head_dim * (20 + n)
    assert real.flops >= linear + attention
    assert real.flops < 1.5 * (linear + attention)
    assert (count(pass_over(meta, n, 20)).flops == counted.flops) is (batch == 1)  # one answer, where no number is told


# --- Bad input --------------------------------------------------------------------------------------------------------


def refused(error_type: type[MinillmError], run: Callable[[], object]) -> str:
    with pytest.raises(error_type) as error:
        run()
    assert is_one_sentence(str(error.value))
    return str(error.value)


@pytest.mark.parametrize("alpha", [-0.5, 1.5, 2.0, float("nan")])
def test_a_chance_outside_0_to_1_is_refused(alpha: float) -> None:
    assert f"alpha is {alpha}" in refused(UsageError, lambda: expected_tokens(alpha, 4))
    assert f"alpha is {alpha}" in refused(UsageError, lambda: predicted_speedup(alpha, 4, 0.1))


def test_a_negative_lookahead_and_a_negative_cost_have_no_gain() -> None:
    assert "lookahead is -1" in refused(UsageError, lambda: expected_tokens(0.5, -1))
    assert "lookahead is -1" in refused(UsageError, lambda: predicted_speedup(0.5, -1, 0.1))
    for c in (-0.1, -1.0, float("nan")):
        assert f"c is {c}" in refused(UsageError, lambda c=c: predicted_speedup(0.5, 4, c))


@pytest.mark.parametrize("lookahead", [0, -1, 2.5, "4", None, True])
@pytest.mark.parametrize(("one_or_many", "prompt"), [(generate, [1]), (generate_batch, [[1], [2]])])
def test_a_lookahead_that_is_no_count_is_refused(
    lookahead: Any, one_or_many: Callable[..., Any], prompt: Any, model: Transformer
) -> None:
    message = refused(UsageError, lambda: one_or_many(model, prompt, 4, drafter=NGramDrafter(), lookahead=lookahead))
    assert f"lookahead is {lookahead!r}" in message


def test_a_lookahead_longer_than_what_is_left_is_shortened(model: Transformer) -> None:
    prompt = random_prompt(5, V)
    generation = generate(model, prompt, 6, drafter=ModelDrafter(model), lookahead=1000)
    assert generation.tokens == naive.generate(model, prompt, 6).tokens
    assert generation.speculation.drafted == 4  # of 5 tokens after the first, the last is the target's own


def test_drafters_that_do_not_fit_are_refused(model: Transformer) -> None:
    other = lively_model(replace(SHAPES["llama"], vocab_size=96, name="other"))
    message = refused(UsageError, lambda: generate(model, [1], 4, drafter=ModelDrafter(other)))
    assert "96" in message
    assert "97" in message
    message = refused(
        UsageError, lambda: generate(model, [1], 4, drafter=ModelDrafter(lively_model(SHAPES["llama"]).to("meta")))
    )
    assert "on meta and the model on cpu" in message
    short = lively_model(replace(SHAPES["llama"], max_positions=8))
    assert "has 8" in refused(UsageError, lambda: generate(model, [1] * 6, 4, drafter=ModelDrafter(short)))
    message = refused(UsageError, lambda: generate(model, [1], 4, drafter=model))  # type: ignore[arg-type]
    assert "drafter is a Transformer" in message
    assert "max_ngram is 0" in refused(UsageError, lambda: NGramDrafter(0))
    assert "at least min_ngram, 2" in refused(UsageError, lambda: NGramDrafter(1))


def test_a_drafter_that_gives_more_than_was_asked_is_refused(model: Transformer) -> None:
    greedy_for_more = Told(lambda context, n: [1] * (n + 1))
    assert "at most" in refused(UsageError, lambda: generate(model, [1], 9, drafter=greedy_for_more))
    once = Told(lambda context, n: [1] * (n + (context[0] == 2)))  # for one answer of two
    assert "at most" in refused(UsageError, lambda: generate_batch(model, [[1], [2]], 9, drafter=once))


def test_what_fills_up_a_row_of_guesses_is_never_looked_up(model: Transformer) -> None:
    # Rows guess different numbers; behind those stands what is no token id, on which an embedding raises.
    prompts, drafted = [random_prompt(n, V, n) for n in (4, 9, 2)], [3, 1, 2]
    expected = [naive.generate(model, prompt, 12).tokens for prompt in prompts]

    class Filling:
        def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose:
            def propose(counts: list[int]) -> Draft:
                counts = [min(most, n) for most, n in zip(drafted, counts, strict=True)]
                tokens = torch.full((3, 5), -1)
                for b, n in enumerate(counts):
                    tokens[b, :n] = b
                return Draft(tokens, counts, [None] * 3)

            return propose

    answers = generate_batch(model, prompts, 12, drafter=Filling(), lookahead=4)
    assert [answer.tokens for answer in answers] == expected


def test_a_sampler_of_unknown_probabilities_is_refused(model: Transformer) -> None:
    message = refused(
        UsageError, lambda: generate(model, [1], 4, drafter=NGramDrafter(), sampler=lambda logits: greedy(logits))
    )
    assert "a function does not tell them" in message


def test_on_meta_speculation_cannot_run(model: Transformer) -> None:
    meta = lively_model(SHAPES["llama"]).to("meta")
    assert "pass_over" in refused(MinillmError, lambda: generate(meta, [1], 4, drafter=NGramDrafter()))


def test_bad_requests_are_refused_as_in_every_stage(model: Transformer) -> None:
    drafter = NGramDrafter()
    assert "prompt is empty" in refused(UsageError, lambda: generate(model, [], 4, drafter=drafter))
    assert "Token id 97" in refused(UsageError, lambda: generate(model, [V], 4, drafter=drafter))
    assert "max_new_tokens is 0" in refused(UsageError, lambda: generate(model, [1], 0, drafter=drafter))
    assert "Prompt 2 of 2" in refused(UsageError, lambda: generate_batch(model, [[1], []], 4, drafter=drafter))
    assert "max_new_tokens is 0" in refused(UsageError, lambda: generate_batch(model, [[1]], drafter=drafter))
    assert "max_batch is 0" in refused(
        UsageError, lambda: generate_batch(model, [[1]], 4, drafter=drafter, max_batch=0)
    )


# --- The real model ---------------------------------------------------------------------------------------------------


def test_smollm2_says_the_same_with_and_without_speculation(smollm2: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = smollm2
    prompts = [
        tokenizer.chat("What is the capital of France?"),
        tokenizer.encode("one two three four one two three four one two three four one two"),
    ]
    expected = [gqa.generate(model, prompt, 16).tokens for prompt in prompts]
    for drafter in (NGramDrafter(), ModelDrafter(model)):
        answers = generate_batch(model, prompts, 16, drafter=drafter, lookahead=4)
        assert [answer.tokens for answer in answers] == expected
    assert generate(model, prompts[1], 16, drafter=NGramDrafter(), lookahead=6).tokens == expected[1]
