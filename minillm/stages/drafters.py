"""Chapter 6, the drafters. Who guesses the next tokens: a search through the text so far, or a cheaper model.

A drafter is any object with

    begin(model, answers) -> propose        once a generation, with everything that it must remember made anew
    propose(counts) -> Draft                once a round: up to `counts[b]` tokens that may follow answer b

The target checks whatever comes, so a drafter cannot spoil a text: a bad one costs time. What it owes is the truth about its
chances: q of a token that it *drew*, or nothing where it was *certain* (then q is 1 for that token and 0 for all others).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.batch import Row
from minillm.errors import UsageError
from minillm.model import Transformer
from minillm.sampling import Sampler, draw, greedy
from minillm.stages.rollback import RollbackCache, send
from minillm.stages.speculative_gain import Speculation


class Answer:
    """One answer on its way: its request, the text as the host knows it, and the sampler whose law its tokens follow.

    `sampler` is None where tokens are not drawn but greedy. Its probabilities are p of the target and q of the drafter alike.
    Raises `UsageError` for a sampler whose probabilities are not known.
    """

    def __init__(self, row: Row, device: torch.device) -> None:
        if row.sampler is not greedy and not isinstance(row.sampler, Sampler):
            raise UsageError(
                "Speculation must know the probabilities that a sampler draws from, and a function does not tell them: "
                "use greedy or a minillm.sampling.Sampler."
            )
        self.row = row
        self.context = list(row.prompt)  # prompt and answer so far
        self.speculation = Speculation()
        self.sampler = row.sampler if isinstance(row.sampler, Sampler) and row.sampler.temperature > 0 else None
        self.generator = None if self.sampler is None else self.sampler.generator(device)

    @property
    def known(self) -> list[int]:
        """What a pass continues. An answer that is done brings its last cached token again, which changes nothing."""
        return self.context[:-1] if self.row.finished else self.context


@dataclass
class Draft:
    """Guesses for B answers: tokens (B, k), of which the first `counts[b]` are meant; what follows them is any token id.

    `q[b]` is (k, V), the probabilities that the tokens of row b were drawn by; None where they were not drawn.
    """

    tokens: Tensor
    counts: list[int]
    q: list[Tensor | None]

    @classmethod
    def certain(cls, guesses: Sequence[Sequence[int]], device: torch.device) -> "Draft":
        """Tokens that were not drawn but chosen; any number for each answer."""
        k = max(map(len, guesses))
        padded = [[*guess, *[0] * (k - len(guess))] for guess in guesses]
        tokens = send(padded, device).reshape(len(guesses), k).long()
        return cls(tokens, [len(guess) for guess in guesses], [None] * len(guesses))


Propose = Callable[[list[int]], Draft]


class Drafter(Protocol):
    def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose: ...


class NGramDrafter:
    """Looks the last words up in the text so far and proposes what followed them there (prompt look-up decoding).

    Tries the last `max_ngram` tokens, then fewer, down to `min_ngram`; the latest earlier occurrence counts. Where none is
    found, nothing is drafted: one common word says little of what follows it, and a wrong guess costs the time of checking it.
    Costs no model and no memory, and pays where an answer repeats its prompt: summaries, edits, code. Raises `UsageError` for
    an n-gram of no tokens, and for a largest one that is smaller than the smallest.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.max_ngram, self.min_ngram = whole_number("max_ngram", max_ngram), whole_number("min_ngram", min_ngram)
        if self.max_ngram < self.min_ngram:
            raise UsageError(f"max_ngram is {max_ngram}; it must be at least min_ngram, {min_ngram}.")

    def look_up(self, context: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the context."""
        for n in range(min(self.max_ngram, len(context) - 1), self.min_ngram - 1, -1):
            tail = context[-n:]
            for start in range(len(context) - n - 1, -1, -1):
                if context[start : start + n] == tail:
                    text = list(context)
                    for i in range(count):  # may run into what it has just written: a loop goes on as a loop
                        text.append(text[start + n + i])
                    return text[len(context) :]
        return []

    def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose:
        def propose(counts: list[int]) -> Draft:
            guesses = [self.look_up(a.context, n) if n else [] for a, n in zip(answers, counts, strict=True)]
            return Draft.certain(guesses, model.device)

        return propose


class ModelDrafter:
    """A cheaper model with the same vocabulary: a smaller one, or the target's own quantized twin.

    Its dtype may differ, as only tokens and fp32 probabilities are exchanged. That both mean the same by a token id is the
    caller's word: of the vocabularies only the sizes can be compared. Raises `UsageError`, when a generation begins, for
    another vocabulary size, another device, and for fewer positions than a request needs.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def begin(self, model: Transformer, answers: Sequence[Answer]) -> Propose:
        ours, theirs, needed = self.model.config, model.config, max(a.row.size for a in answers)
        if ours.vocab_size != theirs.vocab_size:
            raise UsageError(
                f"The drafter {ours.name} has a vocabulary of {ours.vocab_size} tokens and {theirs.name} one of "
                f"{theirs.vocab_size}: draft with a model of the same tokenizer."
            )
        if self.model.device != model.device:
            raise UsageError(
                f"The drafter is on {self.model.device} and the model on {model.device}: move one of them, as they exchange "
                "tokens in every round."
            )
        if needed > ours.max_positions:
            raise UsageError(
                f"The request needs {needed} positions and the drafter {ours.name} has {ours.max_positions}: shorten it, or "
                "draft with NGramDrafter()."
            )
        return _ModelDraft(self.model, RollbackCache(self.model, needed, len(answers)), answers).propose


@dataclass
class _ModelDraft:
    """A drafting model with the cache of one generation."""

    model: Transformer
    cache: RollbackCache
    answers: Sequence[Answer]

    def propose(self, counts: list[int]) -> Draft:
        """One pass a token. The first brings what the cache lacks: the whole prompt at first, later one token, or two where
        the last round accepted every token, since the last drafted one was never run here."""
        # An answer that drafts nothing now may have no place for its last token: it goes one step back instead.
        contexts = [a.context if n else a.context[:-1] for a, n in zip(self.answers, counts, strict=True)]
        fed = self.cache.feed(contexts)  # (B, T)
        tokens: list[Tensor] = []
        laws: list[list[Tensor]] = [[] for _ in self.answers]
        for i in range(max(counts)):
            drafts = [i < n for n in counts]
            if i > 0:
                self.cache.extend(drafts)
                again = fed[:, -1]  # who has drafted enough brings its last token again
                fed = torch.where(send(drafts, fed.device), tokens[-1], again)[:, None]  # (B, 1)
            logits = self.model.head(self.model.hidden(fed, self.cache)[:, -1])  # (B, V)
            tokens.append(self._choose(logits, drafts, laws))
        q = [torch.cat(law) if law else None for law in laws]  # (k, V) each
        return Draft(torch.stack(tokens, dim=1), counts, q)

    def _choose(self, logits: Tensor, drafts: Sequence[bool], laws: list[list[Tensor]]) -> Tensor:
        """The next token for every answer that drafts one, (B, V) -> (B,), drawn as the target draws; q is noted in `laws`."""
        chosen = list(greedy(logits).split(1))
        for b, answer in enumerate(self.answers):
            if drafts[b] and answer.sampler is not None:
                laws[b].append(answer.sampler.probabilities(logits[b : b + 1]))
                chosen[b] = draw(laws[b][-1], answer.generator)
        return torch.cat(chosen)


def whole_number(name: str, value: int) -> int:
    """`value` as an int. Raises `UsageError` unless it is a whole number of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return number
