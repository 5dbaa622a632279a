"""Chapter 6. Speculative decoding: guess k tokens cheaply, check them all in one pass of the model.

A decode step reads every weight to make one token. A pass over the last token and k guesses reads them once as well, and gives
the model's verdict on every guess. A round:

    draft     a cheap drafter proposes k tokens (minillm/stages/drafters.py)
    verify    one pass of the target over the last token and the k drafted ones: logits at each
    accept    the longest run of guesses that the target agrees with, and one token of its own after it: 1 to k+1 tokens
    roll back both caches forget what was refused (minillm/stages/rollback.py)

Greedy, a guess is right when it is the argmax. Sampling, token x drawn from the drafter's q is accepted with probability
min(1, p(x) / q(x)); where it is refused, the next token is drawn from norm(max(0, p - q)). Then x comes with probability

    q(x) min(1, p(x) / q(x)) + max(0, p(x) - q(x)) = min(q, p) + max(0, p - q) = p(x)

so the text follows the target's own law, whatever the drafter. p and q must be what is drawn from: after temperature, top-k,
top-p and min-p. How many tokens a round gives, and what that is worth, stands in minillm/stages/speculative_gain.py.
Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

What was accepted decides what runs next, so the host reads it: once a round, one read, for all answers together.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.batch import OnBatchToken, Request, Row, check_max_batch, requests_of, rows_of
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, OnToken
from minillm.model import Transformer
from minillm.sampling import SamplerLike, draw, greedy
from minillm.stages.drafters import Answer, Draft, Drafter, ModelDrafter, NGramDrafter, Propose, whole_number
from minillm.stages.rollback import RollbackCache
from minillm.stages.speculative_gain import Speculation

__all__ = ["ModelDrafter", "NGramDrafter", "generate", "generate_batch"]


# --- The rule --------------------------------------------------------------------------------------------------------


def accept_greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Verdict on drafts (k,) from logits (k+1, V): tokens (k+1,) and how many of the drafts are accepted, a, as a tensor ().

    The first a tokens are the accepted drafts, the next one is the target's own.
    """
    choices = greedy(logits)
    return choices, (choices[:-1] == drafts).cumprod(dim=0).sum()


def count_accepted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Tensor:
    """How many drafts (k,) are accepted before the first that is not, (). p is (k+1, V), q is (k, V), u (k,) uniform in [0, 1).

    u < p / q is written u q < p: q may be tiny, and a token of p = 0 is never accepted.
    """
    p, q = (law[: len(drafts)].gather(1, drafts[:, None])[:, 0] for law in (p, q))  # (k,): of the drafted tokens
    return (u * q < p).cumprod(dim=0).sum()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)), (V,) each: what the token in place of a refused one is drawn from.

    It is p where p and q are equal: then nothing is refused, but for rounding.
    """
    rest = (p - q).clamp_min(0.0)
    total = rest.sum()
    return torch.where(total > 0, rest / total, p)


def accept_sampled(
    p: Tensor, q: Tensor | None, drafts: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """As `accept_greedy`, from the probabilities p (k+1, V) of the target and q (k, V) of the drafter, float32.

    q None says that the drafts were certain, not drawn: q is 1 for each, and a refused one cannot come again.
    """
    k, V = len(drafts), p.shape[1]
    if q is None:
        q = F.one_hot(drafts, V).to(p.dtype)
    u = torch.rand(k, generator=generator, device=p.device)
    a = count_accepted(p, q, drafts, u)
    # After the last draft stands no guess, so nothing is taken from p there: all accepted, the bonus token is drawn from p.
    q = torch.cat([q, q.new_zeros(1, V)])
    own = draw(residual(*(law.index_select(0, a[None])[0] for law in (p, q)))[None], generator)  # (1,)
    places = torch.arange(k + 1, device=p.device)
    return torch.where(places < a, torch.cat([drafts, own]), own), a


# --- The loop --------------------------------------------------------------------------------------------------------


class SpeculativeGeneration(Generation):
    """A generation that also tells what speculation did for it."""

    def __init__(self, plain: Generation, speculation: Speculation) -> None:
        super().__init__(plain._tokens, plain._clock)
        self.speculation = speculation


def _verify(answer: Answer, logits: Tensor, drafts: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """The verdict on one answer's drafts (k,) from the target's logits (k+1, V): tokens (k+1,) and the number accepted."""
    if answer.sampler is None or answer.row.finished:
        return accept_greedy(logits, drafts)
    return accept_sampled(answer.sampler.probabilities(logits), q, drafts, answer.generator)


def _round(
    model: Transformer, cache: RollbackCache, answers: Sequence[Answer], propose: Propose, lookahead: int
) -> None:
    """Draft, verify, accept: every answer that is not finished gets 1 to lookahead + 1 tokens.

    Drafts stop one short of what an answer still wants, as the last token is the target's own: no pass goes beyond the request,
    so none goes beyond the cache or the positions of the model.
    """
    asked = [0 if a.row.finished else min(lookahead, a.row.remaining - 1) for a in answers]
    draft = propose(asked) if any(asked) else Draft.certain([[] for _ in answers], model.device)
    if any(count > limit for count, limit in zip(draft.counts, asked, strict=True)):
        raise UsageError(f"The drafter proposed {draft.counts} tokens where at most {asked} were asked for.")
    k = max(draft.counts)
    tokens = cache.feed([answer.known for answer in answers], draft.tokens, draft.counts)  # (B, T)
    logits = model.head(model.hidden(tokens, cache)[:, -(k + 1) :])  # (B, k+1, V)
    verdicts = [
        _verify(answer, logits[b, : n + 1], draft.tokens[b, :n], draft.q[b])
        for b, (answer, n) in enumerate(zip(answers, draft.counts, strict=True))
    ]
    found = torch.cat([part.flatten() for tokens, a in verdicts for part in (a, tokens)])  # k + 2 numbers an answer
    read = iter(found.tolist())  # the one place where the host waits
    for answer, n, (tokens, _) in zip(answers, draft.counts, verdicts, strict=True):
        accepted, values = next(read), [next(read) for _ in range(n + 1)]
        if not (answer.row.is_new or answer.row.finished):
            answer.speculation.add(n, accepted)
        for token, value in zip(tokens.split(1)[: accepted + 1], values, strict=False):
            if not answer.row.finished:  # a stop token ends it in the middle of what was accepted
                answer.row.add(token, value)
                answer.context.append(value)


@torch.inference_mode()
def _serve(
    model: Transformer, answers: Sequence[Answer], drafter: Drafter, lookahead: int
) -> list[SpeculativeGeneration]:
    """Run all answers together until the longest is done."""
    propose = drafter.begin(model, answers)
    cache = RollbackCache(model, max(answer.row.size for answer in answers), len(answers))
    _round(model, cache, answers, propose, lookahead=0)  # the prompts, with no guesses: the first token comes soon
    while not all(answer.row.finished for answer in answers):
        _round(model, cache, answers, propose, lookahead)
    return [SpeculativeGeneration(answer.row.generation(), answer.speculation) for answer in answers]


def _check(model: Transformer, drafter: Drafter, lookahead: int) -> int:
    if model.device.type == "meta":
        raise MinillmError(
            "On the meta device nothing is accepted or refused, so speculation cannot run: count its passes with pass_over."
        )
    if not callable(getattr(drafter, "begin", None)):
        raise UsageError(f"drafter is a {type(drafter).__name__}; give NGramDrafter() or ModelDrafter(model).")
    return whole_number("lookahead", lookahead)


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    drafter: Drafter,
    lookahead: int = 4,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
) -> SpeculativeGeneration:
    """Generate up to `max_new_tokens` after the prompt, up to `lookahead` of them guessed before each pass of the model.

    Tokens of one round come together, at about one time. Where fewer tokens are left, fewer are guessed. Raises `UsageError`
    for a prompt that cannot run, a drafter that does not fit the model, a lookahead below 1 and a sampler of unknown
    probabilities.
    """
    lookahead = _check(model, drafter, lookahead)
    row = Row(model, Request(prompt, max_new_tokens, sampler, stop_tokens, on_token))
    return _serve(model, [Answer(row, model.device)], drafter, lookahead)[0]


def generate_batch(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | Iterable[int] = 0,
    *,
    drafter: Drafter,
    lookahead: int = 4,
    max_batch: int | None = None,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnBatchToken | None = None,
) -> list[SpeculativeGeneration]:
    """Answer the prompts in batches of `max_batch` in their order (None: all at once), each until its longest answer ends.

    In a round every answer accepts a number of its own. Limits, `Request`s and `on_token` are as in `static_batching.generate`;
    as there, an answer that has ended is computed on until the batch is done. Raises `UsageError` as `generate` does, before
    anything runs.
    """
    lookahead = _check(model, drafter, lookahead)
    rows = rows_of(model, requests_of(prompts, max_new_tokens, sampler, stop_tokens, on_token))
    answers = [Answer(row, model.device) for row in rows]
    size = len(answers) if max_batch is None else max_batch
    check_max_batch(size)
    batches = [answers[start : start + size] for start in range(0, len(answers), size)]
    return [generation for batch in batches for generation in _serve(model, batch, drafter, lookahead)]
