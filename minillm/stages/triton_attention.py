"""Chapter 8, a kernel for the attention of one new token: each key and value is loaded once, and the whole GPU loads.

Plain attention gives each sequence and KV head to one program: at batch 1 that is Hkv programs on a GPU that has room for
hundreds. Flash-decoding (Dao et al., 2023) cuts the S cached tokens into splits as well. A program walks its split block by
block with the *online softmax* of FlashAttention (arXiv 2205.14135; 2307.08691, section 2.3.1). For the columns j seen so far
it keeps, for each of the G query heads of its group,

    top = max s_j          total = sum of exp(s_j - top)          mix = sum of exp(s_j - top) v_j

and a higher top shrinks what was added up before by exp(old top - new top). Splits are put together by the same rule, in a
second, small kernel: the shares exp(top of a split - highest top) weigh totals and mixes, and out = mix / total.

Triton is needed to import this file; `triton_kernels.py` is the door to it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.stages.triton_linear import has_tensor_cores

LOWEST = tl.constexpr(-3e38)  # the top of nothing: finite, since infinity minus infinity is NaN


@triton.jit
def attend_split(
    q, k, v, lengths, tops, totals, mixes, scale, window, S, split_size,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for each split, KV head and sequence makes its tops and totals (B, Hq, splits), mixes (B, Hq, splits, D)."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)  # times a stride it may pass 2^31
    length = tl.minimum(tl.load(lengths + b), S).to(tl.int32)  # of a slot that is out of use it may be stale
    start = tl.maximum(split * split_size, length - window)
    end = tl.minimum((split + 1) * split_size, length)

    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    heads = kv_head * G + g  # (ROWS,) query heads that share this KV head, of which the first G are real
    of_head = d[None, :] < D
    real = (g[:, None] < G) & of_head  # (ROWS, BLOCK_D)
    queries = tl.load(q + b * q_b + heads[:, None] * q_h + d[None, :], mask=real, other=0.0)

    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in range(start, end, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        seen = columns < end
        inside = seen[:, None] & of_head  # elsewhere nothing is read: memory there may hold NaN, and 0 times NaN is NaN
        keys = tl.load(k + b * k_b + kv_head * k_h + columns[:, None] * k_s + d[None, :], mask=inside, other=0.0)
        values = tl.load(v + b * v_b + kv_head * v_h + columns[:, None] * v_s + d[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # (ROWS, BLOCK)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)  # (ROWS,)
        weights = tl.exp(scores - higher[:, None])  # (ROWS, BLOCK)
        total = total * shrink + tl.sum(weights, axis=1)
        mix = mix * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher

    place = (b * tl.num_programs(1) * G + heads) * tl.num_programs(0) + split  # in (B, Hq, splits)
    tl.store(tops + place, top, mask=g < G)
    tl.store(totals + place, total, mask=g < G)
    tl.store(mixes + place[:, None] * D + d[None, :], mix, mask=real)


@triton.jit
def combine_splits(
    tops, totals, mixes, out, n_splits, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One program for each query head of each sequence: its splits, put together, are its row of `out` (B, Hq, 1, D)."""
    row = tl.program_id(0)
    i, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    place = row * n_splits + i
    inside = (i[:, None] < n_splits) & (d[None, :] < D)  # (SPLITS, BLOCK_D)
    top = tl.load(tops + place, mask=i < n_splits, other=LOWEST)
    total = tl.load(totals + place, mask=i < n_splits, other=0.0)
    mix = tl.load(mixes + place[:, None] * D + d[None, :], mask=inside, other=0.0)
    share = tl.exp(top - tl.max(top, axis=0))  # (SPLITS,)
    whole = tl.sum(share * total, axis=0)  # at least 1, the highest score's exp(0), unless no column was seen at all
    mixed = tl.sum(share[:, None] * mix, axis=0)  # (BLOCK_D,)
    tl.store(out + row * D + d, mixed / tl.maximum(whole, 1.0), mask=d < D)


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None, split_size: int) -> Tensor:
    """Launch both kernels. `triton_kernels.split_attention` says what comes in; a split is `split_size` columns."""
    B, Hq, _, D = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    n_splits = triton.cdiv(S, split_size)
    # The sides of a tile are powers of two, and those that are added up over in its product are 16 and more.
    ROWS, BLOCK_D = triton.next_power_of_2(Hq // Hkv), max(16, triton.next_power_of_2(D))
    BLOCK = min(64, 2**13 // BLOCK_D) if has_tensor_cores(q) else 16
    tops, totals = q.new_empty((2, B, Hq, n_splits), dtype=torch.float32)
    mixes = q.new_empty((B, Hq, n_splits, D), dtype=torch.float32)
    out = q.new_empty(q.shape)
    attend_split[(n_splits, Hkv, B)](
        q, k, v, lengths, tops, totals, mixes, D**-0.5, S if window is None else window, S, split_size,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        G=Hq // Hkv, D=D, ROWS=ROWS, BLOCK=BLOCK, BLOCK_D=BLOCK_D, num_stages=2,
    )  # fmt: skip
    SPLITS = triton.next_power_of_2(n_splits)
    combine_splits[(B * Hq,)](tops, totals, mixes, out, n_splits, D=D, SPLITS=SPLITS, BLOCK_D=BLOCK_D, num_warps=8)
    return out
