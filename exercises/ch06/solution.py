"""Chapter 6, exercises: speculative decoding.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch06` or `pytest exercises/ch06` shows what you have earned. k drafted tokens, a of them accepted, V tokens in
the vocabulary; p is a law (probabilities) of the target, q one of the drafter, alpha the chance that a guess is right.
"""

# %% [markdown] tags=["active-ipynb"]
# # Exercises to chapter 6: speculative decoding
# Fill in each function, run its cell, then run the checks below it. k drafted tokens, a of them accepted, V tokens in the
# vocabulary; p is a law (probabilities) of the target, q one of the drafter, alpha the chance that a guess is right. The
# outputs that you see first are those of right answers: `pytest --nbval` on this notebook names the cells that do not reach
# them yet.

# %%
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from minillm.config import ModelConfig

# %% tags=["active-ipynb"]
# from minillm.grading import check

# %% [markdown]
# ## Drafting


# %%
def ngram_draft(context: Sequence[int], count: int, max_ngram: int = 3, min_ngram: int = 2) -> list[int]:
    """Look the last words up in the text so far, and propose the `count` tokens that followed them there. 2 points.

    Tries the last `max_ngram` tokens of `context`, then fewer, down to `min_ngram`; of the places where they stand earlier, the
    latest counts. Where none is found, nothing is proposed. What followed may reach the end of the context before there are
    `count` tokens: it goes on with what you propose yourself, so that a text which runs in a circle is drafted in a circle.
    Hint: the last tokens stand at the end as well, and that place says nothing of what follows.
    """
    # BEGIN SOLUTION: Return the `count` tokens that followed the last ones where they stood before, or none.
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(context) - n - 1, -1, -1):
            if list(context[start : start + n]) == list(context[-n:]):
                text = list(context)
                for i in range(count):
                    text.append(text[start + n + i])
                return text[len(context) :]
    return []
    # END SOLUTION


# %%
def draft_from_cache(
    text: Sequence[int],
    held: int,
    run: Callable[[list[int]], int],
    roll_back: Callable[[int], None],
    count: int,
) -> list[int]:
    """Draft `count` tokens (1 at least) after `text` with a small model that has a cache. 3 points.

    `text` is what is confirmed so far; its last token is the target's own and was never run here. `run(tokens)` is one pass: it
    adds the tokens to the cache and returns the most probable token after them. `roll_back(n)` forgets all but the first n
    tokens of the cache. It holds `held` tokens, none of the prompt at first; later what this function ran, and what was refused
    of that since. As far as it goes it agrees with the text before its last token; what is held beyond that is wrong. Make
    `count` passes, and run each token that the cache lacks once. Hint: where the target accepted all of the last drafts, two
    tokens are missing, since the last of those was not run here either.
    """
    # BEGIN SOLUTION: Roll back to what is confirmed, run what is missing, then a pass for each further token.
    keep = min(held, len(text) - 1)
    roll_back(keep)
    drafts = [run(list(text[keep:]))]
    while len(drafts) < count:
        drafts.append(run(drafts[-1:]))
    return drafts
    # END SOLUTION


# %% [markdown]
# ## Verifying, greedy


# %%
def accept_greedy(choices: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The 1 to k+1 tokens that a greedy round gives. 1 point.

    The target has run the text and the k drafts behind it in one pass. choices[i], of k+1, is its most probable token after the
    text and the first i drafts. The round gives the drafts that the target would have chosen itself, up to the first that it
    would not, and one token of its own after these, a bonus where all were accepted. Hint: behind a draft that is wrong, the
    target was asked about another text.
    """
    # BEGIN SOLUTION: Return the accepted drafts, and the target's own token after them.
    a = 0
    while a < len(drafts) and drafts[a] == choices[a]:
        a += 1
    return [*drafts[:a], choices[a]]
    # END SOLUTION


# %%
def tokens_to_trim(k: int, a: int) -> tuple[int, int]:
    """How many tokens must be cut off the end of two caches after a round, (target's, drafter's). 1 point.

    The target ran the last confirmed token and the k drafts (k at least 1), and accepted the first a of them. The drafter ran
    the last confirmed token and, to get the next draft, each draft but the last. Neither has run the token of the target's own
    that now follows. A cache must hold nothing that was refused, and everything else that it has. Hint: a may be k.
    """
    # BEGIN SOLUTION: Return the numbers of tokens to cut off, (of the target's cache, of the drafter's).
    return k - a, max(0, k - 1 - a)
    # END SOLUTION


# %%
def speculate(
    verify: Callable[[list[int], int], list[int]],
    draft: Callable[[list[int], int], list[int]],
    prompt: Sequence[int],
    max_new_tokens: int,
    lookahead: int,
    stop_tokens: Collection[int],
) -> list[int]:
    """Generate greedily with a drafter: the new tokens, the very ones that the target gives alone. 3 points.

    `draft(text, count)` guesses up to `count` tokens after the text, sometimes fewer or none. `verify(tokens, n)` is one pass
    of the target over the text and the guesses behind it; it returns the n choices after each of the last n tokens. A round is
    a draft, a pass that verifies all of it, and the tokens that `accept_greedy` gives. The answer ends with its first token
    that is in `stop_tokens`, which is kept, or after `max_new_tokens`. A pass must never reach beyond the request: its caches
    have no place for more than prompt and answer without the last token. Hint: one token of each round is the target's own.
    """
    # BEGIN SOLUTION: Run rounds until the answer ends, and return its tokens.
    text, end = list(prompt), len(prompt) + max_new_tokens
    while len(text) < end:
        guesses = draft(text, min(lookahead, end - len(text) - 1))
        choices = verify(text + guesses, len(guesses) + 1)
        for token in accept_greedy(choices, guesses):
            text.append(token)
            if token in stop_tokens:
                return text[len(prompt) :]
    return text[len(prompt) :]
    # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# from minillm.grading import example_model
# from minillm.stages.naive import NoCache
#
# model, tokenizer, which = example_model()  # the real model, if it is on this machine
# week = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "
# prompt = tokenizer.encode(f"{week}Monday, Tuesday, Wednesday,")
# passes = 0
#
#
# @torch.inference_mode()
# def verify(tokens, n):
#     global passes
#     passes += 1
#     return model(torch.tensor([tokens]), NoCache(model))[0, -n:].argmax(-1).tolist()
#
#
# new = speculate(verify, ngram_draft, prompt, 24, lookahead=6, stop_tokens=())
# print(f"{which} took {passes} passes for {len(new)} tokens:{tokenizer.decode(new)}")

# %% [markdown]
# ## Verifying, sampled


# %%
def laws(target: Tensor, drafter: Tensor, n_tokens: int, temperature: float) -> tuple[Tensor, Tensor]:
    """p (k+1, n_tokens) and q (k, n_tokens), float32, from the logits of the target and of the drafter. 2 points.

    The logits are (k+1, V) and (k, V'), of any floating dtype. The tokenizer that both models share has `n_tokens` tokens; a
    model may have more logits than that, to round its matrices up. Those beyond stand for no token, whatever they say, and
    nothing is drawn from them. A model with fewer logits has another vocabulary: raise a ValueError. `temperature` is above 0.
    Hint: p and q are what tokens are really drawn from, on both sides by the same rule.
    """
    # BEGIN SOLUTION: Return the two laws, or raise a ValueError if a model knows fewer tokens.
    if min(target.shape[-1], drafter.shape[-1]) < n_tokens:
        raise ValueError(f"both models need logits for {n_tokens} tokens: draft with a model of the same tokenizer")
    p, q = ((logits[:, :n_tokens].float() / temperature).softmax(-1) for logits in (target, drafter))
    return p, q
    # END SOLUTION


# %%
def count_accepted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> int:
    """How many of the drafts (k,) are accepted before the first that is not. 2 points.

    p (k+1, V) are the target's laws after the text and the first 0 to k drafts, q (k, V) those that the drafts were drawn from.
    A draft x is accepted with probability min(1, p(x) / q(x)). To decide, u (k,) has a number for each draft, uniform from 0
    (included) to 1 (excluded): accept where it is smaller than that probability. Hint: a token that the target never gives is
    never accepted, not even where u is 0.
    """
    # BEGIN SOLUTION: Return the number of drafts before the first that is refused.
    a = 0
    while a < len(drafts) and u[a] * q[a, drafts[a]] < p[a, drafts[a]]:
        a += 1
    return a
    # END SOLUTION


# %%
def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)), (V,) each: the law of the token that stands in for a refused one. 1 point.

    Its numbers are at least 0 and add up to 1. Where p exceeds q nowhere, as for two equal laws, nothing is refused, but for
    rounding; return p there. Hint: 0 / 0 is NaN, and what is added to prevent it must change nothing else.
    """
    # BEGIN SOLUTION: Return the excess of p over q as a law, or p where there is none.
    excess = (p - q).clamp_min(0)
    total = excess.sum()
    return excess / total if total > 0 else p
    # END SOLUTION


# %%
def sampled_round(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor, draw: Callable[[Tensor], int]) -> list[int]:
    """The 1 to k+1 tokens that a round gives when tokens are sampled: their law is exactly the target's. 3 points.

    p, q, drafts and u are as in `count_accepted`, k may be 0. q is None for a drafter that draws nothing, such as an n-gram
    look-up: it was certain of each draft. `draw(law)` draws a token from a law (V,); call it once, for the token of the
    target's own. You may use your functions from above. Hint: what is that token's law after a refusal, and what without one?
    """
    # BEGIN SOLUTION: Return the accepted drafts, and one token drawn from the law that is right behind them.
    if q is None:
        q = torch.nn.functional.one_hot(drafts, p.shape[1]).to(p.dtype)
    a = count_accepted(p, q, drafts, u)
    law = p[a] if a == len(drafts) else residual(p[a], q[a])
    return [*drafts[:a].tolist(), draw(law)]
    # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# target, drafter = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
# torch.manual_seed(0)
# first = torch.zeros(4)
# for _ in range(5000):
#     guess = drafter.multinomial(1)
#     new = sampled_round(target.expand(2, 4), drafter[None], guess, torch.rand(1), lambda law: int(law.multinomial(1)))
#     first[new[0]] += 1 / 5000
# for name, law in (("the drafter alone", drafter), ("your rounds", first), ("the target alone", target)):
#     print(f"{name:18}", *(f"{share:.2f}" for share in law.tolist()))

# %% [markdown]
# ## What it gains


# %%
def expected_tokens(alpha: float, lookahead: int) -> float:
    """The tokens that a round gives on average, with `lookahead` guesses. 1 point.

    Each guess is right with chance alpha, from 0 to 1 (both included), if those before it were. The token of the target's own
    counts. Hint: the i-th guess counts only where the i - 1 before it were right too.
    """
    # BEGIN SOLUTION: Return the expected number of tokens a round.
    return sum(alpha**i for i in range(lookahead + 1))
    # END SOLUTION


# %%
def best_lookahead(alpha: float, c: float, longest: int = 16) -> tuple[int, float]:
    """The lookahead from 0 to `longest` that gains most, and its speed-up over plain decoding. 2 points.

    A draft step takes c decode steps of the target; a pass that verifies takes one, however many guesses there are. Lookahead 0
    is plain decoding, of speed-up 1: the best where no drafting pays. On a tie, the shortest. Hint: `expected_tokens`, over
    the decode steps that a round takes.
    """
    # BEGIN SOLUTION: Return the best lookahead, and how many times faster than plain decoding it is.
    speedups = [expected_tokens(alpha, k) / (k * c + 1) for k in range(longest + 1)]
    return speedups.index(max(speedups)), max(speedups)
    # END SOLUTION


# %%
def speedup_at_batch(
    config: ModelConfig,
    batch: int,
    context: int,
    alpha: float,
    lookahead: int,
    peak: float,
    bandwidth: float,
    element_bytes: float = 2.0,
) -> float:
    """Predict what speculation with a free drafter (n-gram look-up) gains in a batch: speed-up over plain decoding. 2 points.

    `batch` answers attend over `context` tokens each. A pass does 2 P FLOPs for every token that it runs, P =
    config.matmul_params, and while it does, the P weights are read, once for all: the longer of the two counts. Then attention
    reads the keys and values of each answer, one for each KV head, once however many tokens of it are run; its FLOPs are left
    out. `peak` is in FLOP/s, `bandwidth` in bytes/s; weights, keys and values take `element_bytes` each. Every answer drafts
    `lookahead` tokens, of which each is right with chance alpha. Within 1 %. Hint: how many tokens does either pass run?
    """
    # BEGIN SOLUTION: Return tokens a round times the seconds of a plain step over those of a pass that verifies.
    P = config.matmul_params
    kv = batch * context * 2 * config.n_layers * config.n_kv_heads * config.head_dim * element_bytes / bandwidth
    plain, verification = (
        max(2 * P * batch * tokens / peak, P * element_bytes / bandwidth) + kv for tokens in (1, lookahead + 1)
    )
    return expected_tokens(alpha, lookahead) * plain / verification
    # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# from minillm.config import KNOWN_MODELS
#
# print("Llama-3-8B on an H100, alpha 0.7, lookahead 4: the speed-up at a context of 256 and of 8,192 tokens")
# for batch in (1, 16, 64, 128, 256):
#     short, long = (speedup_at_batch(KNOWN_MODELS["llama-3-8b"], batch, n, 0.7, 4, 989e12, 3.35e12) for n in (256, 8192))
#     print(f"{batch:4d} answers {short:8.2f} {long:8.2f}")


# %%
def speculation_guesses() -> tuple[float, float, float]:
    """Before you run anything: how many decode steps does each of these take? A decode step runs one token. 1 point.

    1. A pass over 33 tokens of SmolLM2-135M, in steps of the same model: float32, a CPU with 100 GFLOP/s and 20 GB/s.
    2. A pass over 33 tokens of Llama-3-8B, in steps of the same model: bfloat16, an H100 with 989 TFLOP/s and 3350 GB/s.
    3. A step of SmolLM2-135M (30 layers), which drafts, in steps of SmolLM2-1.7B (24 layers), its target: bfloat16, that H100,
       10 microseconds for each operator that it launches.
    Each within 15 % of what minillm counts by operators, at short contexts. Hint: three limits, one for each line.
    """
    # BEGIN SOLUTION: Return your three estimates, (on the CPU, on the H100, of the drafter).
    return 3.4, 1.0, 1.2
    # END SOLUTION
