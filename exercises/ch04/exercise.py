"""Chapter 4, exercises: batching.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch04` or `pytest exercises/ch04` shows what you have earned. B sequences, T new tokens, S tokens in all, P
weights that a token is multiplied with.
"""

# %%
from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import ceil

import torch
from torch import Tensor

from minillm.config import ModelConfig

# %% [markdown]
# ## Prompts of different lengths in one batch
# Short prompts are padded on the left. Column j of the batch is the j-th token of every row, pads included.


# %%
def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts of any lengths as one batch: tokens (B, T) and the pads (B,) in front of each row, both int64. 1 point.

    T is the length of the longest prompt. Every row ends in the last column with the last token of its prompt. Any token id may
    stand in a pad, 0 for one, since nothing will look at it. Hint: a prompt may begin with token 0 as well.
    """
    raise NotImplementedError("Return the tokens, padded on the left, and the number of pads in each row.")


# %%
def padded_positions(pads: Tensor, start: int, n_tokens: int) -> Tensor:
    """Positions (B, T) of the tokens in a pass over T = n_tokens columns, which come after `start` columns; int64. 1 point.

    `pads` (B,) says how many columns of each row are pads. In the prefill `start` is 0; a pass may also be a chunk of the
    prompts, which can end among the pads of a row, or a decode step of one column. A pad's own position may be any number that
    is not negative. Hint: a row counts from its own first token.
    """
    raise NotImplementedError("Return the position of each new token in its own row.")


# %%
def padding_mask(pads: Tensor, start: int, n_tokens: int) -> Tensor:
    """Who sees whom: (B, T, S) of bools, True where a query sees a key. 3 points.

    The pass is that of `padded_positions`: T = n_tokens columns after `start` columns, S = start + T, a prefill, a chunk or a
    decode step. A token sees itself and the tokens of its row before it, and never a pad. A pad must see something, whatever it
    is: a row of the mask that is all False makes NaN, which goes on to the tokens. Hint: compare the numbers of columns.
    """
    raise NotImplementedError(
        "Return True where a key is neither a pad nor after its query, or where a pad looks at itself."
    )


# %% [markdown]
# ## Rows that have ended


# %%
def static_loop(
    step: Callable[[Tensor], Tensor], prompts: Tensor, limits: Sequence[int], stop_tokens: Sequence[Collection[int]]
) -> list[list[int]]:
    """Answer a static batch of prompts (B, T): the new tokens of each row. 2 points.

    `step(tokens)` is one pass of the model. It takes what the batch brings, the prompts (B, T) at first and then the last token
    of every row (B, 1), and returns the next token of every row (B,), of rows that have ended too. What these bring is of no
    interest, but they stay in the batch. Row b ends with its first token that is in stop_tokens[b], which is kept, or after
    limits[b] tokens (1 at least); nothing after that is kept. Once all rows have ended, `step` is not called again.
    """
    raise NotImplementedError("Run steps until every row has ended, and return the list of what each row keeps.")


# %% [markdown]
# ## Requests that come and go


# %%
class Scheduler:
    """Decides which requests run in the next step of a continuous batch. Two exercises, 4 points in all.

    At most `max_batch` requests run at a time, and together they never keep more than `max_tokens` tokens in the cache. From
    the moment it is admitted, a request counts with all that it may come to keep: its prompt and its longest answer without
    the last token, which is never fed back. So what was admitted runs until it is done, in every step.
        scheduler_step   3 points: who runs
        scheduler_refuses   1 point: a request that could never run
    """

    def __init__(self, max_batch: int, max_tokens: int) -> None:
        """Nothing runs and nothing waits."""
        raise NotImplementedError("Prepare a scheduler with an empty queue, of which nothing runs.")

    def submit(self, name: str, prompt_tokens: int, max_new_tokens: int) -> None:
        """Put a request at the end of the queue. Each has a name of its own.

        For one that does not fit even when nothing else runs, raise a ValueError, and go on as if it had never come: left in
        the queue, it would block it for ever.
        """
        raise NotImplementedError("Put the request at the end of the queue, or raise a ValueError if it can never run.")

    def step(self, finished: Sequence[str]) -> list[str]:
        """The names of all requests that run in the next step, in any order.

        `finished` has the names of those that ended in the last step, some before their limit (a stop token); their room is
        free at once. Requests are admitted in the order in which they came, as many as there is room for, and nobody overtakes:
        while the first in the queue does not fit, those behind it wait too. Hint: forget the finished ones, then admit.
        """
        raise NotImplementedError(
            "Take out the finished requests, admit from the head of the queue, and return who runs."
        )


# %% [markdown]
# ## What a step takes


# %%
def step_seconds(
    config: ModelConfig,
    new: Sequence[int],
    seen: Sequence[int],
    peak: float,
    bandwidth: float,
    element_bytes: float = 2.0,
) -> float:
    """Predict the seconds of one step of a continuous batch. 2 points.

    Request i brings new[i] tokens, 1 in decode and its whole prompt when it is new, and attends over seen[i], the new ones
    included. The products do 2 P FLOPs for every token, P = config.matmul_params, and while they run the P weights are read,
    once for all: the longer of the two counts. Then attention reads every request's own keys and values, one for each KV head,
    and its FLOPs are left out. `peak` is in FLOP/s, `bandwidth` in bytes/s; weights, keys and values take `element_bytes` each.
    Within 1 %. Hint: what do requests share, and what not?
    """
    raise NotImplementedError(
        "Return the seconds of the products or of their weights, and those of the keys and values."
    )


# %%
def batch_at_ridge(
    config: ModelConfig,
    context: int,
    peak: float,
    bandwidth: float,
    weight_bytes: float = 2.0,
    element_bytes: float = 2.0,
) -> int | None:
    """The smallest batch whose whole decode step is no longer bound by memory; None where no batch is large enough. 2 points.

    B users attend over `context` tokens each. With P = config.matmul_params, A = config.n_heads x config.head_dim and L =
    config.n_layers, a user's token does 2 P + 4 A L context FLOPs. The step reads P weights of `weight_bytes`, once, and each
    user's keys and values of `element_bytes`, one for each KV head. Activations are left out. `peak` is in FLOP/s, `bandwidth`
    in bytes/s. Hint: computing must take at least as long as reading; each user adds to both sides.
    """
    raise NotImplementedError(
        "Return the smallest whole B from which on FLOPs / peak reach bytes / bandwidth, or None."
    )


# %% [markdown]
# ## What fits


# %%
def users_that_fit(
    config: ModelConfig,
    memory: float,
    requests: Sequence[tuple[int, int]],
    weight_bytes: float = 2.0,
    element_bytes: float = 2.0,
) -> tuple[int, int]:
    """How many of these requests run at a time in `memory` bytes, beside the weights, reserved in two ways. 2 points.

    Each of `requests` is (tokens of its prompt, new tokens at most) and keeps all of these but the last new one, a key and a
    value of `element_bytes` for each KV head. All parameters (config.parameter_count) stay in memory at `weight_bytes` each.
        first    in slots of one size, that of the request which keeps most: how many slots fit, and are of use
        second   each takes what it may keep itself, in the order of the list, and nobody overtakes: how many fit
    0 where not even the weights fit. Hint: the longest prompt and the longest answer may be those of two requests.
    """
    raise NotImplementedError("Return how many fit in equal slots, and how many fit when each takes its own tokens.")


# %%
def batch_guesses() -> tuple[float, float]:
    """Before you run anything: how many times the tokens/s of one user do B users get, all together, in decode? 1 point.

    1. SmolLM2-135M in float32 on a laptop's CPU with 100 GFLOP/s and 20 GB/s: 16 users with 64 tokens each.
    2. Llama-3-8B in bfloat16 on an H100 with 989 TFLOP/s and 3350 GB/s: 64 users with 4,096 tokens each.
    Each within 15 % of what minillm predicts operator by operator. Hint: neither is B, for two different reasons.
    """
    raise NotImplementedError("Return your two estimates, (on the CPU, on the H100).")
