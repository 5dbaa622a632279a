"""Chapter 6, the formulas: what speculation did, and what it should gain (Leviathan et al., arXiv 2211.17192).

Of k guesses, each right with chance alpha if those before it were, a round gives

    E = 1 + alpha + ... + alpha^k = (1 - alpha^(k+1)) / (1 - alpha) tokens

for k draft steps of c decode steps each and one pass of the target over k + 1 tokens, which takes v(k + 1) decode steps:

    speed-up = E / (k c + v(k + 1))        v = 1 in the paper; true left of the ridge only
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import UsageError
from minillm.model import Transformer
from minillm.stages.rollback import RollbackCache


@dataclass
class Speculation:
    """What speculation did for an answer. The pass over its prompt, which checks nothing, is no round."""

    rounds: int = 0  # passes of the target after that one
    drafted: int = 0
    accepted: int = 0
    refusals: int = 0  # rounds that refused a token: what was drafted behind it was never judged

    def add(self, drafted: int, accepted: int) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.refusals += accepted < drafted

    @property
    def alpha(self) -> float | None:
        """The chance that a token which is judged is accepted, accepted / (accepted + refusals); None where none was."""
        judged = self.accepted + self.refusals
        return self.accepted / judged if judged else None

    @property
    def acceptance_rate(self) -> float | None:
        """The share of all drafted tokens that were accepted, as serving engines report it. At most alpha."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens and one of the target's own, a round. `expected_tokens` foretells it."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    def __add__(self, other: "Speculation") -> "Speculation":
        return Speculation(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.refusals + other.refusals,
        )


def one_step(n_tokens: int) -> float:
    """Decode steps that a pass of n tokens takes, left of the ridge: 1."""
    return 1.0


def expected_tokens(alpha: float, lookahead: int) -> float:
    """Tokens that a round gives when each judged guess is right with chance alpha: 1 + alpha + ... + alpha^lookahead.

    Raises `UsageError` for a chance outside 0 to 1 and a negative lookahead.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha is {alpha}; a chance lies between 0 and 1.")
    if lookahead < 0:
        raise UsageError(f"lookahead is {lookahead}; guess 0 tokens (plain decoding) or more.")
    return sum(alpha**i for i in range(lookahead + 1))


def predicted_speedup(alpha: float, lookahead: int, c: float, verification: Callable[[int], float] = one_step) -> float:
    """Tokens a second against plain decoding, where a draft step takes c decode steps (0 for an n-gram look-up).

    `verification(n)` is what a pass of n tokens takes, in decode steps: 1 in the paper, measure it elsewhere. Lookahead 0 is
    plain decoding. Raises `UsageError` as `expected_tokens` does, and for a negative c.
    """
    if not c >= 0:
        raise UsageError(f"c is {c}; a draft step takes 0 decode steps or more.")
    return expected_tokens(alpha, lookahead) / (lookahead * c + verification(lookahead + 1))


def best_lookahead(alpha: float, c: float, longest: int = 16, verification: Callable[[int], float] = one_step) -> int:
    """The lookahead from 0 to `longest` of the largest `predicted_speedup`, the shortest on a tie. 0: do not speculate."""
    return max(range(longest + 1), key=lambda k: predicted_speedup(alpha, k, c, verification))


def pass_over(model: Transformer, n_tokens: int, context: int, batch: int = 1) -> Callable[[], Tensor]:
    """A function that runs one pass over `n_tokens` tokens after `context` cached ones, for each of `batch` answers.

    What a round is made of, for counting (also on `meta`, where a whole run cannot know what would be accepted) and timing:
    a verification is lookahead + 1 tokens of the target, a draft step 1 token of the drafter, plain decoding 1 of the target.
    """
    cache = RollbackCache(model, context + n_tokens, batch)
    tokens = torch.zeros(batch, n_tokens, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def run() -> Tensor:
        cache.lengths = [context] * batch
        cache.extend([n_tokens] * batch)
        return model(tokens, cache)  # (B, n, V)

    return run
