"""Grader of chapter 6. Loops are judged call by call; the sampled round by its law, added up over all that can happen."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import KNOWN_MODELS
from minillm.grading import Answer, Evidence, Wrong, ask, exercise, judge_guesses, refuses
from minillm.grading.counted import pass_s
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.hardware import known_hardware

# --- drafting


def look_up(
    context: list[int], count: int, longest: int, shortest: int,
    first=False, overlap=True, upwards=False, shift=0, circle=True, enough=True,
) -> list[int]:  # fmt: skip
    """What prompt look-up proposes; with one of the mistakes in it, if any is asked for."""
    sizes = range(shortest, longest + 1)
    for n in sizes if upwards else reversed(sizes):
        if n >= len(context):
            continue
        last = len(context) - n - (1 if overlap else n)
        starts = [i for i in range(last + 1) if all(context[i + j] == context[len(context) - n + j] for j in range(n))]
        if not enough:
            starts = [i for i in starts if i + n + count <= len(context)]
        if not starts:
            continue
        place = (starts[0] if first else starts[-1]) + n + shift
        period = len(context) - place  # beyond the end, the text goes on as it did so many tokens before
        proposed = [context[place + i % period] for i in range(count)]
        return proposed if circle else proposed[:period]
    return []


@exercise(points=2)
def test_ngram_draft(ngram_draft):
    cases = [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, 3, 2),
        ([1, 2, 3, 4, 9, 1, 2, 3], 1, 3, 2),
        ([5, 1, 2, 6, 7, 1, 2, 8, 1, 2], 2, 3, 2),  # two places, the latest counts; three tokens stand nowhere before
        ([4, 1, 2, 6, 5, 1, 2, 8, 4, 1, 2], 3, 3, 2),  # a longer one further ahead goes before a shorter one
        ([1, 2, 1, 2], 5, 3, 2),  # goes on with what it proposes
        ([7, 7, 7, 7], 6, 3, 2),  # the earlier occurrence overlaps with the last tokens
        ([7, 7], 3, 3, 1),
        ([3, 8, 4], 3, 3, 1),
        ([3, 8, 4, 8], 2, 3, 2),  # one token alone does not count
        ([3, 8, 4, 8], 2, 3, 1),
        ([6], 4, 3, 1),
        ([6, 6], 4, 3, 2),
        ([1, 2, 3, 1, 2], 4, 8, 2),  # more tokens to look for than there are
        ([0, 1, 0, 5, 0, 1, 0], 2, 4, 3),
        ([2, 3, 4, 5, 6, 2, 3, 4], 3, 2, 2),
        ([12, 3, 7, 5, 1, 23], 2, 2, 2),  # 12 3 is not 1 23
        ([11, 23, 7, 5, 1, 23], 2, 2, 2),
        ([31, 0, 7, 5, 0, 1], 2, 2, 2),
        ([1, 2, 3, 4, 5, 6, 9, 8, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6], 2, 6, 2),  # six tokens go before five
        ([49151, 300, *range(1000, 1400), 49151, 300], 20, 3, 2),  # far behind
    ]
    generator = np.random.default_rng(6)
    for _ in range(60):
        size, shortest = int(generator.integers(1, 20)), int(generator.integers(1, 3))
        context = generator.integers(0, int(generator.integers(2, 5)), size).tolist()
        cases.append((context, int(generator.integers(1, 7)), shortest + int(generator.integers(0, 3)), shortest))
    evidence = Evidence()
    for case in cases:
        context = case[0]
        likely = {
            "Of several places the latest counts.": look_up(*case, first=True),
            "The longest n-gram is looked for first.": look_up(*case, upwards=True),
            "Propose what follows the place, not what stands there.": look_up(*case, shift=-1),
            "It goes on with the tokens that it proposes, where the text ends.": look_up(*case, circle=False),
            "A place counts also where fewer tokens follow it than were asked for.": look_up(*case, enough=False),
            "An earlier place may overlap with the last tokens.": look_up(*case, overlap=False),
            "Fewer tokens than min_ngram do not count.": look_up(*case[:3], 1),
            "max_ngram tokens count as well.": look_up(*case[:2], case[2] - 1, case[3]),
            "No more than max_ngram tokens are looked for.": look_up(*case[:2], len(context), case[3]),
        }
        evidence.add(ask(ngram_draft, *case), look_up(*case), likely)
    evidence.judge()


def most_probable(tokens: Sequence[int], seed: int, V: int = 50) -> int:
    """A toy model: a token that depends on all tokens before it."""
    state = seed + 1
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % 2_147_483_647
    return state // 13 % V


@dataclass
class ToyCache:
    """What a drafter's cache holds, and whether a pass brings what it must."""

    seed: int
    content: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)  # what is confirmed
    drafts: list[int] = field(default_factory=list)  # of this round
    agreed: int = 0  # how much of the text the cache holds
    passes: int = 0

    def wrong(self, what: str) -> Wrong:
        held = len(self.content)
        return Wrong(f"draft_from_cache with a text of {len(self.text)} tokens and {held} in the cache: {what}")

    def begin(self, text: list[int]) -> None:
        self.text, self.drafts, self.passes = list(text), [], 0
        pairs = enumerate(zip(self.content, text[:-1], strict=False))
        self.agreed = next((i for i, (a, b) in pairs if a != b), min(len(self.content), len(text) - 1))

    def roll_back(self, n: object) -> None:
        if type(n) is not int or n < 0:
            raise self.wrong("roll_back takes a number of tokens to keep, 0 at least.")
        if n < self.agreed or self.drafts:
            raise self.wrong(f"roll_back({n}) forgets what is confirmed, which then must run again: keep all of it.")
        del self.content[n:]

    def run(self, tokens: object) -> int:
        if isinstance(tokens, Tensor):
            tokens = tokens.flatten().tolist()
        if not isinstance(tokens, (list, tuple)) or not all(type(token) is int for token in tokens) or not tokens:
            raise self.wrong("run takes a list of tokens, one at least.")
        held, due = len(self.content), [*self.text, *self.drafts]
        if self.content != due[:held]:
            raise self.wrong("it runs while the cache holds tokens that were refused: roll back first.")
        if list(tokens) != due[held:]:
            hint = ""
            if list(tokens) == due[len(due) - len(tokens) :]:
                hint = " Something before it is missing in the cache."
                if len(due) - held == 2 and not self.drafts:
                    hint = (
                        " All drafts were accepted, and the last of them was not run here: it is missing in the cache."
                    )
                if len(tokens) > len(due) - held:
                    hint = " The rest is in the cache."
            raise self.wrong(f"it runs {list(tokens)[:8]} where {due[held:][:8]} are missing.{hint}")
        self.content += tokens
        self.passes += 1
        self.drafts.append(most_probable(self.content, self.seed))
        return self.drafts[-1]


@exercise(points=3)
def test_draft_from_cache(draft_from_cache):
    plans = [
        [(3, 1), (3, 0), (3, 2), (3, 1)],  # (drafted, accepted): some refused
        [(4, 4), (4, 4), (2, 2), (1, 1)],  # all accepted: the last draft was never run
        [(1, 1), (1, 0), (1, 1), (1, 1)],
        [(5, 0), (5, 0), (1, 0), (5, 0)],
        [(4, 3), (4, 4), (4, 0), (2, 1), (6, 6), (6, 5), (1, 0), (3, 3)],
    ]
    generator = np.random.default_rng(16)
    for _ in range(12):
        counts = generator.integers(1, 7, 8).tolist()
        plans.append([(k, int(generator.integers(0, k + 1))) for k in counts])
    for seed, plan in enumerate(plans):
        cache = ToyCache(seed)
        text = generator.integers(0, 50, 120 if seed % 5 == 3 else 1 + seed * 3 % 8).tolist()
        for count, accepted in plan:
            cache.begin(text)
            answer = ask(draft_from_cache, text, len(cache.content), cache.run, cache.roll_back, count)
            if cache.passes != count:
                raise answer.wrong(f"makes {cache.passes} passes for {count} drafts: a draft takes one pass.")
            answer.tokens(cache.drafts)
            refused = cache.drafts[accepted] if accepted < count else 0
            own = (refused + 1 + int(generator.integers(0, 40))) % 50  # any other token than the refused one
            text = [*text, *cache.drafts[:accepted], own]


# --- verifying, greedy


def matching(choices: Sequence[int], drafts: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(choices, drafts, strict=False)) if x != y), len(drafts))


@exercise(points=1)
def test_accept_greedy(accept_greedy):
    cases = [
        ([4, 5, 6, 7], [4, 5, 6]),  # all accepted, and one more
        ([4, 5, 6, 7], [4, 9, 6]),  # right again behind a wrong one, which says nothing
        ([4, 5, 6, 7], [9, 5, 6]),
        ([4, 5, 6, 7], [9, 4, 5]),  # right, but for another place
        ([3, 3], [3]),
        ([0, 3], [3]),
        ([8], []),  # nothing was drafted
        ([0, 0, 0, 1], [0, 0, 1]),
        ([5, 5, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9]),
        (list(range(40_000, 40_021)), list(range(40_000, 40_020))),  # a long run, of large ids
        (list(range(40_000, 40_021)), [*range(40_000, 40_015), 7, 40_016, 40_017, 40_018, 40_019]),
    ]
    generator = np.random.default_rng(26)
    for _ in range(30):
        k = int(generator.integers(0, 6))
        cases.append((generator.integers(0, 2, k + 1).tolist(), generator.integers(0, 2, k).tolist()))
    evidence = Evidence()
    for choices, drafts in cases:
        a, k = matching(choices, drafts), len(drafts)
        due = [*drafts[:a], choices[a]]
        same = [x for x, y in zip(drafts, choices, strict=False) if x == y]
        trusted = min(k, 1 + matching(choices[1:], drafts[1:]))  # as many as are right behind an unverified first one
        likely = {
            "A token of the target's own follows the accepted drafts.": drafts[:a],
            "All were accepted: choices[k], the target's own token behind them, comes for free.": due[: max(1, k)],
            "The token after the accepted ones is the target's, not the refused draft.": drafts[: a + 1]
            if a < k
            else due,
            "What follows a wrong draft answers another text: it ends there.": [*same, choices[-1]],
            "These are the target's choices, also those behind a wrong draft.": choices,
            "The first draft is verified too, by choices[0].": [*drafts[:trusted], choices[trusted]],
            "The target's own token is its choice at the first refused place.": [*drafts[:a], choices[-1]],
        }
        evidence.add(ask(accept_greedy, choices, drafts), due, likely)
    evidence.judge()


@exercise(points=1)
def test_tokens_to_trim(tokens_to_trim):
    evidence = {"target": Evidence(), "drafter": Evidence()}
    for k in (4, 1, 2, 3, 5, 6, 7, 8, 20):
        for a in range(k + 1):
            drafts = [f"draft {i}" for i in range(k)]
            caches = (["last", *drafts], ["last", *drafts[:-1]])
            text = ["last", *drafts[:a], "own"]
            due = [len(cache) - sum(x == y for x, y in zip(cache, text, strict=False)) for cache in caches]
            answer = ask(tokens_to_trim, k, a)
            value = answer.value
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise answer.wrong("must return two numbers: tokens to cut off the target's cache and the drafter's.")
            likely = {
                "target": {
                    "The target ran all k drafts, the last one too.": max(0, k - 1 - a),
                    "What was accepted stays.": k,
                    "The target has not run its own token yet: nothing stands for it in the cache.": k - a + 1,
                    "That is how many stay.": a,
                },
                "drafter": {
                    "All were accepted: the drafter holds nothing that is wrong, it lacks one.": k - 1 - a,
                    "The drafter has not run its last draft.": k - a,
                    "What was accepted stays.": k - 1,
                    "That is how many stay.": min(a, k - 1),
                },
            }
            for name, number, right in zip(evidence, value, due, strict=True):
                evidence[name].add(Answer(f"{answer.label}, of the {name}'s cache,", number), right, likely[name])
    for found in evidence.values():
        found.judge()


@dataclass
class Watched:
    """A target and a drafter that follow a learner's loop call by call."""

    seed: int
    prompt: list[int]
    limit: int
    lookahead: int
    stops: set[int]
    kind: str
    V: int = 50
    confirmed: list[int] = field(default_factory=list)  # prompt and answer, as the rounds so far gave them
    pending: list[int] | None = None  # guesses that are not verified yet
    done: bool = False

    def __post_init__(self) -> None:
        self.confirmed = list(self.prompt)

    def plain(self) -> list[int]:
        """Greedy decoding without a drafter."""
        text = list(self.prompt)
        while len(text) < len(self.prompt) + self.limit:
            text.append(most_probable(text, self.seed, self.V))
            if text[-1] in self.stops:
                break
        return text[len(self.prompt) :]

    def wrong(self, what: str) -> Wrong:
        where = f"lookahead {self.lookahead}, {self.limit} new tokens at most, a drafter that is {self.kind}"
        return Wrong(f"speculate ({where}): {what}")

    def _tokens(self, value: object, name: str) -> list[int]:
        if isinstance(value, Tensor):
            value = value.flatten().tolist()
        if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
            raise self.wrong(f"{name} takes a list of token ids.")
        return list(value)

    def _check_text(self, text: list[int], name: str) -> None:
        if self.done:
            raise self.wrong(f"{name} is called once more after the answer has ended.")
        if text == self.confirmed:
            return
        n, due = len(self.prompt), self.confirmed
        hint = ""
        if text == due[:-1]:
            hint = " A token of the target's own ends each round."
        elif len(text) >= len(due) and text[: len(due) - 1] == due[:-1]:
            hint = " What was refused does not belong to it."
        raise self.wrong(
            f"{name} gets a text that goes on with {text[n:][-6:]} after the prompt where {due[n:][-6:]} are right.{hint}"
        )

    def draft(self, text: object, count: object) -> list[int]:
        text = self._tokens(text, "draft")
        self._check_text(text, "draft")
        if self.pending is not None:
            raise self.wrong("draft is called once more before what it guessed is verified.")
        room = len(self.prompt) + self.limit - len(text) - 1
        if type(count) is not int or count < 0:
            raise self.wrong("draft takes the text and a number of tokens, 0 at least.")
        if count > self.lookahead:
            raise self.wrong(f"{count} guesses are asked for at a time.")
        if count > room:
            raise self.wrong(
                f"{count} guesses are asked for where {room + 1} tokens are left, the last of which is the target's own: "
                "the pass would reach beyond the request."
            )
        if count < min(self.lookahead, room):
            raise self.wrong(f"only {count} guesses are asked for where there is room for {min(self.lookahead, room)}.")
        self.pending = self._guesses(text, count)
        return list(self.pending)

    def _guesses(self, text: list[int], count: int) -> list[int]:
        count = {"shy": min(count, len(text) % 3), "silent": 0}.get(self.kind, count)
        guesses: list[int] = []
        for i in range(count):
            right = most_probable([*text, *guesses], self.seed, self.V)
            mistaken = {"always wrong": True, "half right": (len(text) + 3 * i) % 4 == 0, "wrong at first": i == 0}
            guesses.append((right + 1) % self.V if mistaken.get(self.kind, False) else right)
        return guesses

    def verify(self, tokens: object, n: object) -> list[int]:
        tokens, held = self._tokens(tokens, "verify"), len(self.confirmed)
        self._check_text(tokens[:held], "verify")
        if len(tokens) >= len(self.prompt) + self.limit:
            raise self.wrong(
                f"a pass over {len(tokens)} tokens reaches beyond the request, which has no place for them."
            )
        if self.pending is None:
            if held > len(self.prompt) and held + 1 < len(self.prompt) + self.limit:
                raise self.wrong("a pass of the target with no draft before it: each round drafts first.")
            self.pending = []
        if tokens[held:] != self.pending:
            raise self.wrong(f"verify gets the guesses {tokens[held:][:6]} where {self.pending[:6]} were drafted.")
        if type(n) is not int or not len(self.pending) < n <= len(tokens):
            raise self.wrong(
                f"verify is asked for {n} choices, with {len(self.pending)} guesses: each guess is verified, the first one by "
                "the choice before it, and one more follows the last."
            )
        choices = [most_probable(tokens[: len(tokens) - n + i + 1], self.seed, self.V) for i in range(n)]
        own = choices[n - len(self.pending) - 1 :]
        for token in own[: matching(own, self.pending) + 1]:
            self.confirmed.append(token)
            if token in self.stops or len(self.confirmed) == len(self.prompt) + self.limit:
                self.done = True
                break
        self.pending = None
        return choices


KINDS = ("perfect", "always wrong", "half right", "wrong at first", "shy", "silent")


@exercise(points=3)
def test_speculate(speculate):
    generator = np.random.default_rng(36)
    cases = [(kind, 20, lookahead, "") for kind in KINDS for lookahead in (4, 1, 7)]
    cases += [
        (kind, 30, lookahead, where) for where in ("inside", "at the end") for kind in KINDS for lookahead in (5, 8)
    ]
    cases += [("perfect", limit, 4, "") for limit in (1, 2, 5, 6, 9, 10)] + [
        ("half right", 3, 8, ""),
        ("shy", 1, 3, ""),
        ("half right", 120, 5, ""),
        ("perfect", 100, 16, ""),
    ]
    for _ in range(20):
        kind, limit, lookahead = str(generator.choice(KINDS)), *generator.integers(1, (40, 9)).tolist()
        cases.append((kind, limit, lookahead, "some"))
    for seed, (kind, limit, lookahead, where) in enumerate(cases):
        V = 7 if where == "some" else 50
        prompt = generator.integers(0, V, 1 + seed % 6).tolist()
        watched = Watched(seed, prompt, limit, lookahead, set(), kind, V)
        answer = watched.plain()
        if where == "some":
            watched.stops = {seed % 7}  # may stand in the prompt as well
        elif where:
            first = next(i for i in range(len(answer)) if i >= 7 and answer[i] not in answer[:i])
            watched.stops = {answer[first], 50} if where == "inside" else {answer[0]}
        got = ask(speculate, watched.verify, watched.draft, prompt, limit, lookahead, watched.stops)
        if not watched.done and got.value is not None:
            raise watched.wrong("it returns before the answer has ended.")
        due = watched.plain()
        likely = {
            "The stop token is kept as the last.": due[:-1] if watched.stops & set(due) else None,
            "The prompt is no part of the answer.": [*prompt, *due],
        }
        if isinstance(got.value, (list, tuple)) and len(got.value) > len(due) and list(got.value[: len(due)]) == due:
            raise watched.wrong(
                "what was accepted behind the end of the answer, a stop token or the limit, is not kept."
            )
        got.label = f"speculate with a drafter that is {kind}"
        got.tokens(due, {text: wrong for text, wrong in likely.items() if wrong is not None})


# --- verifying, sampled


@exercise(points=2)
def test_laws(laws):
    generator = torch.Generator().manual_seed(46)
    cases = [
        (3, 10, 10, 10, 1.0, torch.float32, torch.float32),
        (3, 10, 10, 10, 0.5, torch.float32, torch.float32),
        (1, 6, 6, 6, 2.5, torch.float32, torch.float32),
        (4, 16, 12, 12, 0.7, torch.float32, torch.float32),  # the target's logits are padded
        (4, 12, 16, 12, 0.7, torch.float32, torch.float32),  # and the drafter's
        (2, 64, 72, 60, 1.3, torch.bfloat16, torch.float32),
        (2, 72, 64, 60, 0.3, torch.float32, torch.bfloat16),
        (5, 32, 32, 30, 1.0, torch.bfloat16, torch.bfloat16),
        (2, 40, 40, 40, 0.05, torch.float16, torch.float16),  # logits / temperature beyond what exp can take
    ]
    for k, V, V_drafter, n, temperature, dtype, drafter_dtype in cases:
        logits = [torch.randn(k + 1, V, generator=generator) * 3, torch.randn(k, V_drafter, generator=generator) * 3]
        for x in logits:
            x[:, n:] = 8.0  # what stands for no token may say what it likes
        target, drafter = logits[0].to(dtype), logits[1].to(drafter_dtype)
        answer = ask(laws, target, drafter, n, temperature)
        value = answer.value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise answer.wrong("must return two tensors: p and q.")
        for name, x, law in zip("pq", (target, drafter), value, strict=True):
            scores = x.double()
            cut, t = scores[:, :n], temperature
            wrong = {
                "No temperature is applied.": cut.softmax(-1),
                "Logits are divided by the temperature.": (cut * t).softmax(-1),
                "Nothing is drawn from columns beyond n_tokens: cut them off before the softmax.": (scores / t).softmax(
                    -1
                )[:, :n],
                "The temperature belongs to the logits.": cut.softmax(-1) / t,
                "These are the most probable tokens, not laws.": F.one_hot(cut.argmax(-1), n),
            }
            likely = {text: lambda value=value: value for text, value in wrong.items()}
            due = (cut / t).softmax(-1)
            Answer(f"{answer.label}: {name}", law).tensor(due, likely, atol=2e-5, dtype=torch.float32)
    for V, V_drafter, n in ((12, 10, 12), (10, 12, 12), (9, 9, 10)):
        args = (torch.zeros(3, V), torch.zeros(2, V_drafter), n, 1.0)
        refuses(laws, *args, because=f"as a model with fewer than {n} logits has another vocabulary")


def drawn_law(generator: np.random.Generator, V: int, zeros: int = 0, sharp: float = 1.0) -> list[float]:
    weights = generator.random(V) ** sharp + 1e-3
    weights[generator.permutation(V)[:zeros]] = 0.0
    return (weights / weights.sum()).tolist()


@exercise(points=2)
def test_count_accepted(count_accepted):
    generator = np.random.default_rng(56)
    cases: list[tuple[list[list[float]], list[list[float]], list[int], list[float]]] = [
        ([[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2]], [0], [0.6]),  # p / q is 0.625
        ([[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2]], [0], [0.65]),
        ([[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2]], [1], [0.999]),  # p is larger than q
        ([[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.5]], [1], [0.0]),  # the target never gives it
        ([[0.3, 0.7]] * 3, [[1.0, 0.0], [0.0, 1.0]], [0, 1], [0.29, 0.69]),  # certain drafts
        ([[0.3, 0.7]] * 3, [[1.0, 0.0], [0.0, 1.0]], [0, 1], [0.29, 0.71]),
        ([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]], [[0.9, 0.1], [0.1, 0.9]], [0, 0], [0.5, 0.0]),
        ([[1e-21, 1.0]] * 2, [[1e-20, 1.0]], [0], [0.09]),  # rare with both, at a ratio of 0.1
        ([[1e-21, 1.0]] * 2, [[1e-20, 1.0]], [0], [0.11]),
    ]
    for i in range(60):
        V, k = int(generator.integers(2, 7)), int(generator.integers(1, 6))
        p = [drawn_law(generator, V, zeros=i % 2, sharp=2.0) for _ in range(k + 1)]
        q = [drawn_law(generator, V) for _ in range(k)]
        drafts = [int(generator.choice(V, p=law)) for law in q]
        u = []
        for j, x in enumerate(drafts):
            edge = min(1.0, p[j][x] / q[j][x])
            below, above = edge * (1 - 1e-5), edge + (1 - edge) * 1e-5
            u.append(below if edge == 1 or generator.random() < 0.75 else above)
        cases.append((p, q, drafts, u))
    evidence = Evidence()
    for p, q, drafts, u in cases:
        columns = [(pi[x], qi[x], r) for pi, qi, x, r in zip(p, q, drafts, u, strict=False)]
        taken = [r < pi / qi for pi, qi, r in columns]
        behind = [law[x] for law, x in zip(p[1:], drafts, strict=True)]

        def run(accepted: list[bool]) -> int:
            return next((i for i, yes in enumerate(accepted) if not yes), len(accepted))

        likely = {
            "After the first that is refused nothing counts: those behind it follow another text.": sum(taken),
            "The ratio is p / q, the target's over the drafter's.": run([r * pi < qi for pi, qi, r in columns]),
            "A draft is accepted with probability p / q, not p.": run([r < pi for pi, _, r in columns]),
            "A draft is accepted where u is smaller than p / q.": run([not yes for yes in taken]),
            "Chance decides, too: p may be smaller than q.": run([pi >= qi for pi, qi, _ in columns]),
            "p[i] is the law that draft i is judged by.": run(
                [r < after / qi for after, (_, qi, r) in zip(behind, columns, strict=True)]
            ),
            "It is the number of drafts: the target's own token does not count.": run(taken) + 1,
            "u may be 0, and a token of p = 0 is never accepted.": run([r <= pi / qi for pi, qi, r in columns]),
        }
        P, Q, U = (torch.tensor(x, dtype=torch.float64) for x in (p, q, u))
        evidence.add(ask(count_accepted, P, Q, torch.tensor(drafts), U), run(taken), likely)
    evidence.judge()


@exercise(points=1)
def test_residual(residual):
    generator = np.random.default_rng(66)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3])
    cases = [
        (torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])),
        (torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.2, 0.7])),
        (torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.0, 1.0, 0.0])),  # a certain draft
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([0.4, 0.6]), torch.tensor([0.4, 0.6])),  # equal
        (third, third),
        (torch.tensor([0.25, 0.0, 0.75]), torch.tensor([0.25, 0.0, 0.75]) * (1 + 2e-7)),  # equal, but for rounding
        (torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])),
        (
            torch.tensor([0.5 + 2e-10, 0.2 + 1e-10, 0.3 - 3e-10], dtype=torch.float64),  # nearly equal, and not quite
            torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64),
        ),
    ]
    for V in (4, 50, 1000):
        cases.append(tuple(torch.tensor(drawn_law(generator, V, V // 3), dtype=torch.float64) for _ in range(2)))
    for p, q in cases:
        excess = [max(0.0, x - y) for x, y in zip(p.tolist(), q.tolist(), strict=True)]
        total = math.fsum(excess)
        due = torch.tensor([x / total for x in excess], dtype=torch.float64) if total > 0 else p.double()
        d = (p - q).double()
        likely = {
            "It must add up to 1: divide by the sum.": lambda d=d: d.clamp_min(0),
            "Where q exceeds p, nothing is left: 0, not the difference.": lambda d=d: d.abs() / d.abs().sum(),
            "It is p - q, not q - p.": lambda d=d: (-d).clamp_min(0) / (-d).clamp_min(0).sum(),
            "That is p: what q gave too often must be taken off.": lambda p=p: p,
            "That is a softmax: divide by the sum.": lambda d=d: d.clamp_min(0).softmax(-1),
            "What is added against 0 / 0 changes the rest.": lambda d=d: d.clamp_min(0) / (d.clamp_min(0).sum() + 1e-8),
        }  # fmt: skip
        ask(residual, p, q).tensor(due, likely)


class Draw:
    """Stands in for a random draw: notes the law, and gives its most probable token."""

    def __init__(self, V: int) -> None:
        self.V = V
        self.laws: list[list[float]] = []

    def draw(self, law: object) -> int:
        if not isinstance(law, Tensor) or law.numel() != self.V:
            raise Wrong(f"sampled_round: draw takes a law of {self.V} numbers, a tensor (V,).")
        numbers = law.double().flatten().tolist()
        if not all(x >= -1e-9 for x in numbers) or abs(sum(numbers) - 1) > 1e-4:
            raise Wrong(
                f"sampled_round: draw gets {brief_law(numbers)}, which is no law: its sum must be 1, none below 0."
            )
        self.laws.append(numbers)
        return numbers.index(max(numbers))


def brief_law(numbers: Sequence[float]) -> str:
    return str([float(f"{x:.4g}") for x in numbers])


@dataclass
class World:
    """A target and a drafter over a tiny vocabulary, as tables: the law after each possible row of tokens."""

    V: int
    k: int
    p: dict[tuple[int, ...], list[float]]
    q: dict[tuple[int, ...], list[float]] | None  # None: the drafter is certain
    certain: list[int] = field(default_factory=list)

    def drafts(self) -> list[tuple[float, list[int]]]:
        """Everything that may be drafted, with its probability."""
        if self.q is None:
            return [(1.0, self.certain)]
        rows = itertools.product(range(self.V), repeat=self.k)
        found = [(math.prod(self.q[x[:i]][x[i]] for i in range(self.k)), list(x)) for x in rows]
        return [(chance, x) for chance, x in found if chance > 0]

    def q_of(self, drafts: list[int], i: int) -> list[float]:
        if self.q is None:
            return [float(x == drafts[i]) for x in range(self.V)]
        return self.q[tuple(drafts[:i])]

    def alone(self, text: tuple[int, ...], start: int = 0) -> float:
        """The probability that the target goes on so, from text[start] on."""
        return math.prod(self.p[text[:i]][text[i]] for i in range(start, len(text)))


def world(generator: np.random.Generator, V: int, k: int, zeros: int = 0, kind: str = "") -> World:
    def table(depth: int, sharp: float, zeros: int) -> dict[tuple[int, ...], list[float]]:
        rows = (row for n in range(depth) for row in itertools.product(range(V), repeat=n))
        return {row: drawn_law(generator, V, zeros, sharp) for row in rows}

    p = table(k + 1, 2.0, zeros)
    if kind == "certain":
        return World(V, k, p, None, generator.integers(0, V, k).tolist())
    if kind == "equal":
        return World(V, k, p, {row: law for row, law in p.items() if len(row) < k})
    return World(V, k, p, table(k, 1.0, zeros))


@exercise(points=3)
def test_sampled_round(sampled_round):
    generator = np.random.default_rng(76)
    worlds = [world(generator, 4, 1), world(generator, 3, 2), world(generator, 2, 3), world(generator, 4, 2, zeros=1)]
    worlds += [world(generator, 3, 2, kind="equal"), world(generator, 3, 0), world(generator, 5, 1, zeros=3)]
    worlds += [world(generator, 3, k, zeros, "certain") for k in (0, 1, 2, 3) for zeros in (0, 1, 2)]
    n = 0
    for tables in worlds:
        n += check_law(sampled_round, tables)
    return f"The law of your rounds is the target's to 6 digits, added up over {n} cases."


def check_law(sampled_round, tables: World) -> int:
    """Add up the probabilities of all texts of k + 1 tokens, over all drafts and verdicts; how many there were."""
    V, k = tables.V, tables.k
    texts = dict.fromkeys(itertools.product(range(V), repeat=k + 1), 0.0)
    hint, n = "", 0
    for chance, drafts in tables.drafts():
        laws = [tables.p[tuple(drafts[:i])] for i in range(k + 1)]
        qs = [tables.q_of(drafts, i) for i in range(k)]
        edges = [min(1.0, p[x] / q[x]) for p, q, x in zip(laws, qs, drafts, strict=False)]
        for a in range(k + 1):  # the first a are accepted, and draft a refused
            weight = chance * math.prod(edges[:a]) * (1 - edges[a] if a < k else 1.0)
            if weight <= 0:
                continue
            u = [edge * (1 - 1e-5) for edge in edges[:a]]
            if a < k:
                u += [edges[a] + (1 - edges[a]) * 1e-5, *[0.0] * (k - a - 1)]
            law = one_round(sampled_round, tables, laws, qs, drafts, u, a)
            n += 1
            hint = hint or wrong_law(law, laws, qs, a)
            for text in texts:
                if list(text[:a]) == drafts[:a]:
                    texts[text] += weight * law[text[a]] * tables.alone(text, start=a + 1)
    text = max(texts, key=lambda text: abs(texts[text] - tables.alone(text)))
    if abs(texts[text] - tables.alone(text)) > 1e-6:
        drafter = "a certain drafter" if tables.q is None else "a drafter that draws"
        raise Wrong(
            f"sampled_round with {drafter} and k = {k} gives the text {list(text)} with probability {texts[text]:.4g} where "
            f"the target alone gives {tables.alone(text):.4g}.{hint}"
        )
    return n


def one_round(
    sampled_round,
    tables: World,
    laws: list[list[float]],
    qs: list[list[float]],
    drafts: list[int],
    u: list[float],
    a: int,
) -> list[float]:
    """Run the learner's round, of which a drafts must be accepted; the law that its last token was drawn from."""
    draw, V, k = Draw(tables.V), tables.V, tables.k
    p, q = (torch.tensor(x, dtype=torch.float64).reshape(-1, V) for x in (laws, qs))
    answer = ask(
        sampled_round, p, None if tables.q is None else q, torch.tensor(drafts, dtype=torch.int64),
        torch.tensor(u, dtype=torch.float64), draw.draw,
    )  # fmt: skip
    if len(draw.laws) != 1:
        raise answer.wrong(f"calls draw {len(draw.laws)} times; once, for the token of the target's own.")
    own = draw.laws[0].index(max(draw.laws[0]))
    what = "all of which are accepted" if a == k else f"of which {a} are accepted"
    due = [*drafts[:a], own]
    answer.label = f"sampled_round with the drafts {drafts}, {what},"
    likely = {
        "Draw one token more after the accepted ones.": drafts[:a],
        "The refused draft is no part of it.": [*drafts[: a + 1], own],
        "What follows a refused draft is no part of it.": [*drafts, own],
        "The token that was drawn comes last.": [own, *drafts[:a]],
    }
    answer.tokens(due, {text: wrong for text, wrong in likely.items() if wrong != due})
    return draw.laws[0]


def wrong_law(law: list[float], laws: list[list[float]], qs: list[list[float]], a: int) -> str:
    """A sentence on what is wrong with the law of the last token, where that can be told."""

    def same(x: Sequence[float], y: Sequence[float]) -> bool:
        return all(abs(i - j) < 1e-6 for i, j in zip(x, y, strict=True))

    if a == len(qs):
        if same(law, laws[a]):
            return ""
        return " After the last draft nothing was refused: the token comes from p[k]."
    excess = [max(0.0, x - y) for x, y in zip(laws[a], qs[a], strict=True)]
    due = [x / sum(excess) for x in excess]
    if same(law, due):
        return ""
    if same(law, laws[a]):
        return (
            " After a refusal p alone is wrong: it gives again what was just refused too often; draw from the residual."
        )
    if same(law, qs[a]):
        return " After a refusal the token comes from the residual, not from the drafter's law."
    if same(law, laws[-1]):
        return " After a refusal the token stands in the refused place: p[a], not p[k]."
    return " The law after a refusal is norm(max(0, p - q)), of the refused place."


# --- what it gains


@exercise(points=1)
def test_expected_tokens(expected_tokens):
    evidence = Evidence(rtol=1e-6)
    cases = [(0.8, 4), (0.5, 1), (0.75, 3), (1.0, 5), (0.0, 3), (0.9, 8), (0.6, 0), (0.3, 2), (0.99, 16)]
    for alpha, k in [*cases, (1, 1), (0, 0), (1.0, 0)]:
        x = Fraction(alpha)
        due = k + 1 if x == 1 else (1 - x ** (k + 1)) / (1 - x)
        likely = {
            "One token of each round is the target's own.": due - 1,
            "A guess counts only where all before it were right: powers of alpha.": 1 + k * x,
            "The last guess counts as well: alpha^lookahead.": due - x**k if k else due,
            "There are `lookahead` guesses, not one more.": due + x ** (k + 1),
            "That is the chance that all are right.": x**k,
        }
        evidence.add(ask(expected_tokens, alpha, k), float(due), {text: float(wrong) for text, wrong in likely.items()})
    evidence.judge()


@exercise(points=2)
def test_best_lookahead(best_lookahead):
    cases = [
        (0.8, 0.1, 16), (0.9, 0.05, 16), (0.7, 0.5, 16), (0.6, 0.0, 8), (0.95, 0.128, 16), (0.5, 0.25, 16),
        (0.8, 1.2, 16),  # a drafter that is slower than its target
        (0.3, 0.4, 16),  # seldom right: drafting does not pay
        (1.0, 1.0, 16),  # a tie of all
        (0.0, 0.0, 16),
        (1.0, 0.1, 16), (0.98, 0.01, 16), (0.98, 0.01, 40), (0.75, 0.05, 3), (0.4, 0.3, 16), (0.55, 0.5, 2),
    ]  # fmt: skip
    evidence = {"lookahead": Evidence(), "speed-up": Evidence(rtol=1e-6)}
    for alpha, c, longest in cases:
        x, cost = Fraction(alpha), Fraction(c)

        def best(bonus=1, passes=1, steps=0, first=0, c=cost, x=x, longest=longest) -> tuple[int, float]:
            """Over all lookaheads; with one of the mistakes in it, if any is asked for."""
            gains = {
                k: (sum(x**i for i in range(1 - bonus, k + 1))) / (max(0, k + steps) * c + passes)
                for k in range(first, longest + 1)
                if (k + steps) * c + passes
            }
            k = max(gains, key=lambda k: (gains[k], -k))
            return k, float(gains[k])

        due = best()
        wrong = {
            "Where drafting does not pay, plain decoding is best: 0 guesses.": best(first=1),
            "One token of each round is the target's own.": best(bonus=0),
            "Each guess takes a draft step.": best(c=0),
            "Every guess of a round is drafted: lookahead x c.": best(steps=-1),
            "The drafter makes as many steps as there are guesses.": best(steps=1),
            "`longest` counts as well.": best(longest=longest - 1),
            "No lookahead is longer than `longest`.": best(longest=longest + 20),
        }
        answer = ask(best_lookahead, alpha, c, longest)
        value = answer.value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise answer.wrong("must return two numbers: the lookahead and the speed-up.")
        for i, (name, found) in enumerate(evidence.items()):
            likely = {text: pair[i] for text, pair in wrong.items()}
            found.add(Answer(f"{answer.label}, {name},", value[i]), due[i], likely)
    for found in evidence.values():
        found.judge()


H100, A100, CPU = (989.4e12, 3.35e12), (312e12, 2.039e12), (100e9, 20e9)


@exercise(points=2)
def test_speedup_at_batch(speedup_at_batch):
    llama, smol, llama_2, qwen, large = (
        KNOWN_MODELS[name] for name in ("llama-3-8b", "smollm2-135m", "llama-2-13b", "qwen3-0.6b", "smollm2-1.7b")
    )
    cases = [
        (llama, 1, 512, 0.8, 4, H100, 2.0),  # free
        (llama, 48, 512, 0.8, 4, H100, 2.0),
        (llama, 100, 256, 0.7, 4, H100, 2.0),  # the pass computes for longer than it reads, the plain step does not
        (llama, 400, 256, 0.7, 4, H100, 2.0),  # both do
        (llama, 256, 8192, 0.7, 4, H100, 2.0),  # keys and values are most of it
        (smol, 1, 64, 0.9, 15, CPU, 4.0),
        (smol, 4, 2000, 0.5, 3, CPU, 4.0),
        (smol, 4, 2000, 0.9, 15, CPU, 4.0),
        (smol, 30, 100, 1.0, 2, CPU, 2.0),
        (llama_2, 64, 1000, 0.0, 5, A100, 2.0),
        (llama_2, 64, 20, 0.9, 15, A100, 2.0),  # a short context, beside which the tokens that are run would be many
        (qwen, 200, 300, 0.6, 1, A100, 1.0),
        (large, 16, 4000, 0.75, 8, A100, 0.5),
        (large, 300, 20, 0.95, 0, A100, 2.0),  # no guesses: plain decoding
    ]
    evidence = Evidence(rtol=0.01)
    for config, B, S, alpha, k, (peak, bandwidth), size in cases:
        P, E = float(config.matmul_params), math.fsum(alpha**i for i in range(k + 1))
        kv = 2.0 * config.n_layers * config.n_kv_heads * config.head_dim * size * B * S / bandwidth
        read, compute = P * size / bandwidth, 2 * P * B / peak

        def seconds(n: float, kv: float = kv, read: float = read, compute: float = compute) -> float:
            return max(n * compute, read) + kv

        def gain(tokens: float = E, n: int = k + 1, **mistake: float) -> float:
            return tokens * seconds(1, **mistake) / seconds(n, **mistake)

        once, n = max((k + 1) * compute, read), k + 1
        likely = {
            "That is what a round gives: a pass over more tokens may compute for longer than it reads.": E,
            "A pass runs the last token too: lookahead + 1 in all.": gain(n=max(k, 1)),
            "Keys and values are read as well.": gain(kv=0),
            "Keys and values are read once, however many tokens of an answer are run.": E
            * seconds(1)
            / (once + n * kv),
            "The plain step may compute for longer than it reads as well.": E * (read + kv) / seconds(n),
            "All answers run their tokens: batch x tokens.": gain(compute=compute / B),
            "Each answer reads its own keys and values.": gain(kv=kv / B),
            "There is a key and a value for each KV head, not for each query head.": gain(kv=kv * config.group_size),
            "A key and a value: 2 of them.": gain(kv=kv / 2),
            "Weights are read once for all answers.": gain(read=read * B),
            "While weights are read, the products run: the longer of the two counts, not their sum.": (
                E * (compute + read + kv) / (n * compute + read + kv)
            ),
            "A multiplication and an addition are 2 FLOPs.": gain(compute=compute / 2),
            "A round gives more than one token, not all of them: expected_tokens.": gain(tokens=n),
            "It is the plain step's time over that of the pass, times the tokens a round.": E * seconds(n) / seconds(1),
        }
        evidence.add(ask(speedup_at_batch, config, B, S, alpha, k, peak, bandwidth, size), gain(), likely)
    evidence.judge()


LAPTOP = Ceilings("a laptop's CPU", "fp32", bandwidth=CPU[1], peak=CPU[0], overhead=0.0)


@exercise(points=1)
def test_speculation_guesses(speculation_guesses):
    smol, large, llama = (KNOWN_MODELS[name] for name in ("smollm2-135m", "smollm2-1.7b", "llama-3-8b"))
    h100 = known_hardware("h100-sxm")
    eager = h100.ceilings("bf16", overhead=10e-6)
    counted = (
        pass_s(smol, LAPTOP, 33, 64) / pass_s(smol, LAPTOP, 1, 64),
        pass_s(llama, h100.ceilings("bf16"), 33, 256) / pass_s(llama, h100.ceilings("bf16"), 1, 256),
        pass_s(smol, eager, 1, 256) / pass_s(large, eager, 1, 256),
    )
    reasons = [
        (
            "On the CPU",
            "10 tokens take as long to compute as the weights take to read, and 33 are more",
            "the weights are read once for all 33 tokens, and computing takes over from 10 tokens on only",
        ),
        (
            "On the H100",
            "no pass takes less than reading the weights does",
            "295 tokens take as long to compute as the weights take to read, and 33 are far from that",
        ),
        (
            "Of the drafter",
            "neither model is slow by its bytes here: each operator costs its launch, and layers count, not parameters",
            "it has 30 layers against 24, of smaller matrices: no more than that",
        ),
    ]
    what = "three numbers: on the CPU, on the H100, and of the drafter"
    value = judge_guesses(ask(speculation_guesses), counted, 0.15, what, reasons)
    said, count_says = (", ".join(f"{x:.3g}" for x in numbers) for numbers in (value, counted))
    return f"You said {said}; counted by operators it is {count_says}."
