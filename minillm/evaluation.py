"""What a change of weights, cache or arithmetic does to a model's answers: one protocol for all of them.

A text is cut into windows of `window` tokens that do not overlap. Each window runs through the model in one pass with an empty
cache (teacher forcing: every token is given, none is sampled), and each of its tokens but the first is predicted from those
before it in the window. Over all predicted tokens of all windows:

    perplexity   exp of the mean negative log-likelihood, in nats
    KL           mean of sum_v p(v) ln(p(v) / q(v)), p of the reference model, q of the other
    agreement    share of positions at which both models' likeliest token is the same

Log-softmax is in float32, sums over positions in float64. Perplexities of other tools, texts, windows or tokenizers are other
quantities: the published ones of Llama-2-7B on one and the same text lie between 5.5 and 12.2.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from minillm.config import check_token
from minillm.errors import UsageError
from minillm.model import Cache, Transformer
from minillm.stages.gqa import GroupedKVCache

WINDOW = 256
MakeCache = Callable[[Transformer, int], Cache]  # (model, capacity) -> an empty cache


@dataclass(frozen=True)
class Comparison:
    """How another model differs from a reference over `positions` predicted tokens. `kl` in nats, `agreement` from 0 to 1."""

    perplexity: float
    kl: float
    agreement: float
    positions: int


def prose() -> str:
    """The text that the package ships: some 1,200 words of plain English, written for it."""
    return resources.files("minillm").joinpath("data/prose.txt").read_text(encoding="utf-8")


def check_text(tokens: Sequence[int]) -> None:
    """Raise `UsageError` for a text too short to be scored."""
    if len(tokens) < 2:
        raise UsageError(f"The text has {len(tokens)} tokens: at least 2 are needed, one to predict another from.")


def perplexity(
    model: Transformer, tokens: Sequence[int], *, window: int = WINDOW, cache: MakeCache = GroupedKVCache
) -> float:
    """Perplexity of a model on a text of token ids. Raises `UsageError` for a text or a window that cannot be scored."""
    nll, positions = 0.0, 0
    for piece in _windows(model, tokens, window):
        log_p = _log_probabilities(model, piece, cache)  # (T-1, V)
        nll += _nll(log_p, piece)
        positions += len(log_p)
    return math.exp(nll / positions)


def compare(
    reference: Transformer,
    other: Transformer,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    cache: MakeCache = GroupedKVCache,
) -> Comparison:
    """Compare a model with a reference on a text of token ids. `cache` is the other model's; the reference has its usual one.

    Raises `UsageError` for different vocabularies, and for a text or a window that cannot be scored.
    """
    V = reference.config.vocab_size
    if other.config.vocab_size != V:
        raise UsageError(
            f"The models have {V} and {other.config.vocab_size} tokens: compare models of the same vocabulary."
        )
    nll = kl = 0.0
    agreed = positions = 0
    for piece in _windows(reference, tokens, window):
        log_p = _log_probabilities(reference, piece, GroupedKVCache)
        log_q = _log_probabilities(other, piece, cache).to(log_p.device)
        nll += _nll(log_q, piece)
        kl += (log_p.exp() * (log_p - log_q)).sum(-1).sum(dtype=torch.float64).item()
        agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        positions += len(log_p)
    return Comparison(math.exp(nll / positions), kl / positions, agreed / positions, positions)


def _windows(model: Transformer, tokens: Sequence[int], window: int) -> Iterator[list[int]]:
    """Pieces of 2 to `window` tokens. A last token alone in its window predicts nothing and is left out."""
    config = model.config
    check_text(tokens)
    if window < 2 or min(window, len(tokens)) > config.max_positions:
        raise UsageError(
            f"The window is {window}; it must lie between 2 and the model's {config.max_positions} positions."
        )
    ids = [check_token(token, config.vocab_size) for token in tokens]
    pieces = (ids[start : start + window] for start in range(0, len(ids), window))
    return (piece for piece in pieces if len(piece) > 1)


@torch.inference_mode()
def _log_probabilities(model: Transformer, piece: list[int], cache: MakeCache) -> Tensor:
    """(T-1, V) in float32: what the model expects at each token but the first, given those before it."""
    given = torch.tensor([piece[:-1]], device=model.device)  # (1, T-1)
    return model(given, cache(model, len(piece) - 1))[0].float().log_softmax(-1)


def _nll(log_p: Tensor, piece: list[int]) -> float:
    targets = torch.tensor(piece[1:], device=log_p.device)[:, None]
    return -log_p.gather(1, targets).sum(dtype=torch.float64).item()
