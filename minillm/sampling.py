"""From logits to a token: greedy, temperature, top-k, top-p and min-p, seeded per request.

Logits are unnormalized scores; softmax makes them probabilities (and log_softmax log-probabilities). All of that is done in
float32, whatever the model's dtype: in 16 bits a sum over a vocabulary drifts and a masked token can come out as possible.
"""

import operator
from collections.abc import Callable
from typing import SupportsIndex, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import UsageError

SamplerLike: TypeAlias = Callable[[Tensor], Tensor]  # logits (B, V) -> tokens (B,)


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row: logits (B, V) -> (B,), the lowest id on a tie."""
    return logits.argmax(dim=-1)


def probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """The distribution that a sampler draws from: logits (B, V) -> (B, V) float32, each row summing to 1.

    Applied in this order, each to what the one before left, renormalized:
    `temperature` divides the logits; `top_k` keeps the k most probable tokens; `top_p` keeps the smallest set of most
    probable tokens that reaches that mass, the token that crosses it included (Holtzman et al., arXiv 1904.09751); `min_p`
    keeps tokens at least that fraction as probable as the most probable one (Nguyen et al., arXiv 2407.01082). The most
    probable token is always kept, so top_p near 0 is greedy.
    """
    scaled = logits.float()
    # Counted from the largest logit, which becomes 0, scores cannot overflow. A logit of +inf takes all.
    largest = scaled.amax(dim=-1, keepdim=True)
    scaled = (scaled - largest).masked_fill(scaled == largest, 0.0) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_p is not None and top_p >= 1:
        top_p = None  # all of the mass: a sum that rounds up to 1 would cut the tail off
    if top_k is None and top_p is None:
        p = scaled.softmax(dim=-1)  # no order is needed, so nothing is sorted
    else:
        p = _most_probable(scaled, top_k, top_p)
    if min_p is not None:
        p = p.masked_fill(p < min_p * p.amax(dim=-1, keepdim=True), 0.0)
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def _most_probable(scaled: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """softmax of scores (B, V), of which only the k largest are kept, and then the first that reach a mass of top_p."""
    # A stable order: ties keep the order of their ids, as in `greedy`.
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        scaled[..., top_k:] = -torch.inf
    p = scaled.softmax(dim=-1)
    if top_p is not None:
        mass_before = p.cumsum(dim=-1) - p
        mass_before[..., 0] = -1.0  # the argmax stays, also where top_p is 0
        p = p.masked_fill(mass_before >= top_p, 0.0)
        p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p).scatter_(-1, order, p)


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token a row from probabilities (B, V) -> (B,), without asking the host anything.

    The exponential race: with e_i ~ Exp(1), the largest p_i / e_i is token i with probability p_i. A token of probability 0
    scores 0 and cannot win. The clamp is for generators that round some e_i to 0, in steps of 2^-24 in float32: clamped to
    less than that step, a token of almost no probability would win whenever it met one.
    """
    e = torch.empty_like(p).exponential_(generator=generator).clamp_min_(torch.finfo(p.dtype).eps / 2)
    return (p / e).argmax(dim=-1)


class Sampler:
    """Draws tokens: `Sampler(temperature=0.8, top_p=0.95, seed=1)`, used as `sampler=` of any stage.

    Each request gets its own generator, started from `seed`, so the same request with the same seed gives the same text
    again, whatever ran before it or beside it. Without a seed it differs each time. Temperature 0 is greedy.
    Raises `UsageError` for settings outside their range.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: SupportsIndex | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: SupportsIndex | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise UsageError(f"temperature is {temperature}; it must be 0 (greedy) or a positive number.")
        if top_k is not None and (not isinstance(top_k, SupportsIndex) or operator.index(top_k) < 1):
            raise UsageError(f"top_k is {top_k}; it must be a whole number of at least 1.")
        for name, value in (("top_p", top_p), ("min_p", min_p)):
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{name} is {value}; it must lie between 0 and 1.")
        if seed is not None and (not isinstance(seed, SupportsIndex) or not 0 <= operator.index(seed) < 2**63):
            raise UsageError(f"seed is {seed}; it must be a whole number from 0 to 2^63 - 1.")
        self.temperature, self.top_p, self.min_p = temperature, top_p, min_p
        self.top_k = None if top_k is None else operator.index(top_k)  # NumPy's whole numbers are whole numbers, too
        self.seed = None if seed is None else operator.index(seed)
        self._generator: torch.Generator | None = None

    def fresh(self) -> "Sampler":
        """A copy at the beginning of its random sequence."""
        return Sampler(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that tokens are drawn from: logits (B, V) -> (B, V) float32; at temperature 0 all on the argmax."""
        if self.temperature == 0:
            return F.one_hot(greedy(logits), logits.shape[-1]).float()
        return probabilities(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def generator(self, device: torch.device) -> torch.Generator:
        """Where its random numbers come from: made at the first call, started from the seed."""
        if self._generator is None:
            self._generator = torch.Generator(device)
            if self.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.seed)
        return self._generator

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return greedy(logits)
        return draw(self.probabilities(logits), None if logits.is_meta else self.generator(logits.device))


def fresh(sampler: SamplerLike) -> SamplerLike:
    """What a stage calls at the start of a request: a `Sampler` begins its sequence anew, a function is as it is."""
    return sampler.fresh() if isinstance(sampler, Sampler) else sampler
