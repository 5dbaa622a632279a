"""Chapter 1, exercises: naive generation.

Each function says what it is given, what it returns and in which shapes. Replace the line that raises NotImplementedError.
`minillm grade ch01` or `pytest exercises/ch01` shows what you have earned. B sequences, H heads, T new tokens, S tokens in all,
D numbers a head, V tokens in the vocabulary, L layers.
"""

# %% [markdown] tags=["active-ipynb"]
# # Exercises to chapter 1: naive generation
# Fill in each function, run its cell, then run the check below it. B sequences, H heads, T new tokens, S tokens in all,
# D numbers a head, V tokens in the vocabulary, L layers. The outputs that you see first are those of right answers:
# `pytest --nbval` on this notebook names the cells that do not reach them yet.

# %%
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from minillm.config import ModelConfig

# %% tags=["active-ipynb"]
# from minillm.grading import check

# %% [markdown]
# ## The model's two odd parts


# %%
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which a query sees no key after itself: softmax(q k^T / sqrt(D)) v. 3 points.

    q is (B, H, T, D); k and v are (B, H, S, D); the result is (B, H, T, D) in the dtype of q. The T queries are the *last* T of
    the S positions, so query i stands at position S - T + i and sees the keys 0 to S - T + i, its own among them.
    T = S is a whole prompt, T = 1 one new token, which sees everything.
    Hint: write the position of each query and of each key down before you compare them.
    """
    # BEGIN SOLUTION: Return softmax(q k^T / sqrt(D)) v, in which query i sees the keys up to position S - T + i.
    T, S, D = q.shape[2], k.shape[2], q.shape[3]
    scores = q @ k.transpose(2, 3) / D**0.5  # (B, H, T, S)
    query_positions = torch.arange(S - T, S)[:, None]  # (T, 1)
    key_positions = torch.arange(S)
    scores = scores.masked_fill(key_positions > query_positions, -torch.inf)
    return scores.softmax(dim=-1) @ v
    # END SOLUTION


# %%
def rope(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary embedding in the half-split order of Llama checkpoints. 3 points.

    x is (B, H, T, D), positions are (B, T) whole numbers; the result has the shape and dtype of x, and x stays as it is.
    Number i of a head, i < D/2, makes a pair with number i + D/2. The pair (a, b) turns by the angle
    position x theta^(-2 i / D): to (a cos - b sin, b cos + a sin).
    Hint: compute the angles in float32 whatever the dtype of x, since bfloat16 cannot tell position 300 from 301.
    """
    # BEGIN SOLUTION: Return x with each pair (i, i + D/2) turned by position x theta^(-2 i / D).
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half).float() / half)  # (D/2,)
    angles = positions[:, None, :, None].float() * frequencies  # (B, T) -> (B, 1, T, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    # END SOLUTION


# %% [markdown]
# ## From logits to a token


# %%
def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row: logits (B, V) -> token ids (B,). 1 point.

    Hint: softmax keeps the order, so it is not needed.
    """
    # BEGIN SOLUTION: Return the id of the largest logit of each row.
    return logits.argmax(dim=-1)
    # END SOLUTION


# %%
def top_p(logits: Tensor, p: float) -> Tensor:
    """The distribution of top-p (nucleus) sampling: logits (B, V) -> probabilities (B, V), each row summing to 1. 2 points.

    Of each row keep the smallest set of most probable tokens whose probabilities reach p: going down from the most
    probable, the token that crosses p is still in. All others get 0, what is kept is scaled to sum to 1, and every token stays
    at its own id. The most probable token is always kept, so p near 0 is greedy. The result is float32, and so is the
    arithmetic, whatever the dtype of the logits: in bfloat16 a sum over a vocabulary drifts.
    Hint: a token is kept if the tokens *before* it, in descending order, have not reached p.
    """
    # BEGIN SOLUTION: Return the probabilities with all but the nucleus at 0, scaled to sum to 1 in each row.
    probabilities, ids = logits.float().softmax(dim=-1).sort(dim=-1, descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = before < p
    keep[:, 0] = True
    kept = probabilities * keep
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, ids, kept)
    # END SOLUTION


# %%
def draw(probabilities: Tensor, seed: int) -> Tensor:
    """Draw one token a row: probabilities (B, V) -> token ids (B,), token v of a row with its probability. 2 points.

    Rows are drawn independently. The same seed gives the same tokens again, another seed others; a token of probability 0 is
    never drawn. Hint: a torch.Generator with a seed of its own, so that no other draw can disturb it.
    """
    # BEGIN SOLUTION: Return a token drawn from each row's probabilities by a generator with this seed.
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    # END SOLUTION


# %% [markdown]
# ## The loop


# %%
def generate(
    forward: Callable[[Tensor], Tensor], prompt: list[int], max_new_tokens: int, stop_tokens: Collection[int] = ()
) -> list[int]:
    """Naive generation: the ids of the new tokens, each the most probable after everything before it. 3 points.

    `forward` is a model without a memory: token ids (1, T), int64, to logits (1, T, V), one row for what follows each of the
    T tokens. Run it once for each new token, over the prompt and all tokens so far. Stop after `max_new_tokens`, or after a
    token that is among `stop_tokens`; that one still belongs to the result. The prompt does not.
    Hint: only the logits at the last position speak of the next token.
    """
    # BEGIN SOLUTION: Return up to max_new_tokens greedy token ids, running forward over all tokens so far for each.
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = forward(torch.tensor([tokens]))
        token = int(logits[0, -1].argmax())
        tokens.append(token)
        if token in stop_tokens:
            break
    return tokens[len(prompt) :]
    # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# from minillm.grading import PROMPT, example_model
# from minillm.stages.naive import NoCache
#
# model, tokenizer, which = example_model()  # the real model, if it is on this machine
# tokens = generate(lambda tokens: model(tokens, NoCache(model)), tokenizer.encode(PROMPT), 8)
# print(f"Your loop in {which}: {PROMPT}{tokenizer.decode(tokens)}")

# %% [markdown]
# ## What it costs


# %%
def naive_flops(config: ModelConfig, prompt_tokens: int, new_tokens: int) -> int:
    """Exact FLOPs of `generate` with a model of this shape. 3 points.

    A pass over i tokens takes 2 P i in the linear layers, with P = config.matmul_params (the head included, at every position),
    and 4 A i^2 in the attention of each of the L = config.n_layers layers, with A = config.n_heads x config.head_dim: q k^T,
    then the weights times v, with nothing taken off for the half that the mask hides. A sum or a closed form will do, if it is
    exact.
    Hint: how many tokens does the first pass see, and how many the last?
    """
    # BEGIN SOLUTION: Return the sum over all passes of 2 P i + 4 A L i^2, i being the tokens that a pass sees.
    P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
    first, last = prompt_tokens, prompt_tokens + new_tokens - 1

    def sum_to(n: int) -> int:  # of i, and of i^2
        return 2 * P * (n * (n + 1) // 2) + 4 * A * L * (n * (n + 1) * (2 * n + 1) // 6)

    return sum_to(last) - sum_to(first - 1)
    # END SOLUTION


# %%
def crossover(config: ModelConfig) -> float:
    """The length n at which attention has cost as much as the linear layers, over all of a naive generation. 2 points.

    From an empty prompt, n tokens take about P n^2 FLOPs in the linear layers and (4/3) A L n^3 in attention, in the letters of
    `naive_flops`. Below this length the quadratic term rules, above it the cubic one. Leading terms are enough: no rounding.
    Hint: set the two equal and solve for n.
    """
    # BEGIN SOLUTION: Return the n at which P n^2 equals (4/3) A L n^3.
    P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
    return 3 * P / (4 * A * L)
    # END SOLUTION
