"""Chapter 8, exercises: overhead and kernels.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch08` or `pytest exercises/ch08` shows what you have earned. B sequences, S columns of a cache, Hq query heads on
Hkv KV heads, G = Hq / Hkv, D numbers a head; a weight has N rows and K columns. Kernels run on the CPU, in Triton's
interpreter.
"""

# %%
import os
from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined: it decides there where it will run
try:
    import triton
    import triton.language as tl
except ImportError:  # the two exercises with a kernel cannot be graded then; the others can
    from types import SimpleNamespace

    triton = tl = SimpleNamespace(jit=lambda kernel: kernel, constexpr=None)

# %% [markdown]
# ## Overhead


# %%
def launch_gains(
    work: Sequence[float], kernels: Sequence[int], overhead: float, replay: float
) -> tuple[float, float, float]:
    """How many times faster a decode step becomes: (compiled, captured, both). 2 points.

    Operator i of the step takes work[i] seconds on the device, but none takes less than `overhead` seconds: that long the host
    needs to launch it. A compiler makes one kernel of neighbours: kernels[j] says how many operators the j-th has, in order. It
    does the work of all of them, and is launched once. A captured graph changes no operator; the GPU launches each in `replay`
    seconds. Both: the kernels of the compiler, in a graph. Hint: for each launch the longer of the two counts.
    """
    raise NotImplementedError(
        "Return how many times faster than eager it is when it is compiled, when it is captured, and with both."
    )


# %%
def break_even(prompt: int, eager: float, compiled: float, compile_s: float, smallest: int = 128) -> int | None:
    """The fewest decode steps after which compiling has paid, or None if it never does. 2 points.

    A step takes `eager` seconds, or `compiled` seconds by a program. The first step attends over prompt + 1 columns, each later
    one over one more. A program is good for one bucket, which is the next power of two, `smallest` at least: 128, 256, 512 and
    so on. The first step in a bucket that has no program yet waits `compile_s` seconds (above 0) for it. Compiling has paid as
    soon as all steps so far, with the compiler's time, have taken no longer than they would have taken eagerly. Hint: where a
    step gains anything, it pays in the end.
    """
    raise NotImplementedError("Return the number of steps, or None.")


# %% [markdown]
# ## A cache that is the same at every step


# %%
def visible_columns(length: int, window: int | None = None, smallest: int = 128) -> Tensor:
    """Which columns of a static cache the new token sees: (S,) of bool, True where it sees. 1 point.

    `length` tokens are in the cache, the new one included, from column 0 on. S is the bucket: the next power of two that has
    room for them, `smallest` (a power of two) at least. With a window the token sees the last `window` tokens only, itself
    included. Hint: 128 is a power of two.
    """
    raise NotImplementedError("Return a mask over the columns of the bucket.")


# %%
class StaticLayer:
    """Keys and values of one layer, in memory that never moves: a decode step on it can be captured. One exercise, 3 points.

    The grader records a step once for each bucket, as a CUDA graph does: the operators, and the tensors they read and write.
    Then it repeats the recording, with new numbers in the tensors. Whatever Python knew while it was recorded stays as it was.
        static_attend   3 points: the attention of steps that were recorded, and the bytes that they move
    """

    def __init__(self, batch: int, n_kv_heads: int, columns: int, head_dim: int) -> None:
        """Room for `columns` tokens, float32. Hint: hidden columns are read too, and 0 times NaN is NaN."""
        raise NotImplementedError("Prepare keys and values, (B, Hkv, columns, D) each.")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """Keep k and v, (B, Hkv, 1, D); return the attention (B, Hq, 1, D) of q, (B, Hq, 1, D), over the columns it sees.

        `position`, one int64 in a tensor (1,), is the column of the new token. `visible`, (1, 1, 1, S) of bool, says which of
        the first S columns the token sees; those behind them, up to `columns`, must not even be read. Query head h reads KV
        head h // G. The host must not wait for a number that is in a tensor. Hint: index_copy_, and no copy for each query
        head.
        """
        raise NotImplementedError(
            "Write the new column where `position` says, and return the attention over the visible ones."
        )


# %% [markdown]
# ## Attention in splits


# %%
def combine_splits(tops: Tensor, totals: Tensor, mixes: Tensor) -> Tensor:
    """Put P splits together: tops and totals (B, Hq, P), mixes (B, Hq, P, D) -> attention (B, Hq, D). 2 points.

    Of the scores s_j of its columns a split has its top = max s_j, its total = sum of exp(s_j - top), and its mix = sum of
    exp(s_j - top) v_j, where v_j are the values. A split in which nothing was seen has top -3e38, total 0 and mix 0. A row that
    saw nothing at all gets 0. Return the attention that softmax over all columns gives. Hint: scores may be 1000, or -1000.
    """
    raise NotImplementedError("Return the attention over the columns of all splits.")


# %%
def split_attention_cost(
    batch: int, context: int, n_heads: int, n_kv_heads: int, head_dim: int, split: int, element_bytes: int = 2
) -> tuple[int, int]:
    """Attention of one new token for each of B sequences over splits: (bytes that it moves, programs at work). 2 points.

    A program takes one sequence, one KV head with all its query heads, and a split of up to `split` of the S = context columns.
    It reads its queries, keys and values; the query, keys, values and output take `element_bytes` a number. It writes a top, a
    total and a mix of D numbers for each of its query heads, in float32, and a second kernel reads these and writes the output.
    It reads the length of its sequence, too, of 8 bytes. Count what lies in memory once for each kernel that reads or writes
    it, however many programs do. Programs are those of the first kernel. Hint: the last split may be short.
    """
    raise NotImplementedError("Return the bytes of both kernels, and the number of programs of the first one.")


# %%
@triton.jit
def attend_split(
    q, k, v, lengths, tops, totals, mixes, scale, window, S,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program of split attention: the top, total and mix of one split for the G query heads of one KV head. 3 points.

    Row b of q (B, Hq, 1, D) sees the columns of k and v (B, Hkv, S, D) below lengths[b], and of those the last `window`. Query
    head h reads KV head h // G. The split with the number `split` begins at column split * SPLIT and ends before the next one
    begins. Write the three lines that say who reads what. ROWS, a power of two, may be more than G: rows from G on are masked
    below. Only columns that are seen are read; elsewhere may be anything. Hint: of 4 query heads, 0 and 1 read KV head 0 of 2.
    """
    split, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_splits, Hkv = tl.num_programs(0), tl.num_programs(1)
    length = tl.minimum(tl.load(lengths + b), S)
    g, d = tl.arange(0, ROWS), tl.arange(0, D)  # rows of the tile, and dimensions of a head
    raise NotImplementedError(
        "Set heads (ROWS,), the query heads that read kv_head; start and end, of the columns seen in this split."
    )
    real = (g < G)[:, None] & (d >= 0)[None, :]  # (ROWS, D)
    queries = tl.load(q + (b * Hkv * G + heads)[:, None] * D + d[None, :], mask=real, other=0.0)
    top = tl.full((ROWS,), -3e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, D), tl.float32)
    for block in range(0, SPLIT + BLOCK, BLOCK):  # blocks begin at multiples of BLOCK, a split need not
        columns = split * SPLIT // BLOCK * BLOCK + block + tl.arange(0, BLOCK)
        seen = (columns >= start) & (columns < end)
        place = ((b * Hkv + kv_head) * S + columns)[:, None] * D + d[None, :]  # (BLOCK, D)
        keys = tl.load(k + place, mask=seen[:, None], other=0.0)
        values = tl.load(v + place, mask=seen[:, None], other=0.0)
        scores = tl.sum(queries[:, None, :] * keys[None, :, :], axis=2) * scale  # (ROWS, BLOCK)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mix = mix * shrink[:, None] + tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
        top = higher
    place = (b * Hkv * G + heads) * n_splits + split  # in (B, Hq, splits)
    tl.store(tops + place, top, mask=g < G)
    tl.store(totals + place, total, mask=g < G)
    tl.store(mixes + place[:, None] * D + d[None, :], mix, mask=real)


def attend_in_splits(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, split: int) -> list[Tensor]:
    """Launch your kernel: tops and totals (B, Hq, P), mixes (B, Hq, P, D). Nothing is to be written here."""
    (B, Hq, _, D), (Hkv, S) = q.shape, k.shape[1:3]
    n_splits, G = -(-S // split), Hq // Hkv
    # Not a number until the kernel writes one; and a sequence more, so that what is written too far harms nothing else.
    tops, totals = torch.full((2, B + 1, Hq, n_splits), torch.nan)
    mixes = torch.full((B + 1, Hq, n_splits, D), torch.nan)
    attend_split[(n_splits, Hkv, B)](
        q, k, v, lengths, tops, totals, mixes, D**-0.5, window, S,
        G=G, D=D, ROWS=triton.next_power_of_2(G), SPLIT=split, BLOCK=8,
    )  # fmt: skip
    return [tops[:B], totals[:B], mixes[:B]]


# %% [markdown]
# ## A product with a weight in int4


# %%
@triton.jit
def int4_row(
    x, packed, scales, zeros, out, N, n_groups, BLOCK: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """x (K,) times a weight in int4, packed (N, K/2), with scales and zeros (N, K/g) -> out (N,). 3 points.

    A program makes BLOCK numbers of `out`. It walks along its rows of the weight, GROUPS groups at a time, of HALF = g / 2
    bytes each. A byte has the even column in its upper half, the odd one in its lower. The weight is s (q - 8) + z, q being the
    code; since that is s q + (z - 8 s), z and 8 s meet the sum of x only. Add to `sums` what each row and group gives. All in
    float32: a code is an integer of 8 bits until you convert it. n_groups need not be a multiple of GROUPS, nor N of BLOCK, and
    nothing outside of the tensors may be read. Hint: what a mask leaves out of a load is `other`.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK, GROUPS), tl.float32)
    for start in range(0, n_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (n[:, None] < N) & (group[None, :] < n_groups)  # (BLOCK, GROUPS)
        raise NotImplementedError(
            "Load bytes, activations, scales and zeros of these groups, and add their products to `sums`."
        )
    tl.store(out + n, tl.sum(sums, axis=1), mask=n < N)


def int4_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Launch your kernel, whose inputs and output lie between NaN: (N + 128,). Nothing is to be written here."""
    (N, n_groups), HALF = scales.shape, packed.shape[1] // scales.shape[1]
    x, scales, zeros = (F.pad(given.flatten(), (64, 64), value=torch.nan) for given in (x, scales, zeros))
    out = torch.full((N + 128,), torch.nan)
    int4_row[(triton.cdiv(N, 8),)](
        x[64:], packed, scales[64:], zeros[64:], out[64:], N, n_groups, BLOCK=8, GROUPS=4, HALF=HALF
    )
    return out
