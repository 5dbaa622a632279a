"""Chapter 8, kernels for linear layers whose weight is stored in codes: what comes from memory are the codes.

A program makes BLOCK_N output columns: it walks along their BLOCK_N rows of the weight, turns codes into numbers in registers,
multiplies them with the activations and adds up in float32. Each code is loaded by one program, once. Activations are loaded
by every program, but there are few of them, and they stay in the GPU's caches.

For each scheme there are two kernels. With one row of activations there is nothing for a tensor core to share: multiply, and
add up at the end. With 2 to 16 rows a tile of the weight is a factor of a matrix product (`tl.dot`), made from 16 bits as the
readable layers have it.

    int8   out = s sum of q x                                      the scale comes after the sum, once
    int4   out = sum over groups of (s sum of q x + (z - 8 s) sum of x)      since s (q - 8) + z = s q + (z - 8 s)

Triton is needed to import this file; `triton_kernels.py` is the door to it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
import torch
import triton
import triton.language as tl
from torch import Tensor

# Whether Triton's interpreter runs the kernels: `triton.jit` decides that when it defines one, so here and for good.
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def int8_row(x, codes, scales, out, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x (1, K), codes (N, K), scales (N, 1) -> out (1, N)"""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # n times K may pass 2^31
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (n[:, None] < N) & (k[None, :] < K)
        tile = tl.load(codes + n[:, None] * K + k[None, :], mask=inside, other=0)
        row = tl.load(x + k, mask=k < K, other=0.0)
        products += tile.to(tl.float32) * row.to(tl.float32)[None, :]
    scale = tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, scale * tl.sum(products, axis=1), mask=n < N)


@triton.jit
def int8_rows(x, codes, scales, out, M, N, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x (M, K), codes (N, K), scales (N, 1) -> out (M, N), for M up to ROWS"""
    m = tl.arange(0, ROWS)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    products = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(codes + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        products = tl.dot(rows, tl.trans(tile.to(rows.dtype)), products, input_precision="ieee")  # 7 bits: exact
    scale = tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], scale[None, :] * products, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def int4_row(
    x, packed, scales, zeros, out, N, n_groups, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr
):
    """x (1, K), packed (N, K/2), scales and zeros (N, K/g) -> out (1, N); HALF is g/2, the bytes of a group"""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    sums = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    for start in range(0, n_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        byte = group[:, None] * HALF + tl.arange(0, HALF)[None, :]  # (GROUPS, HALF): which of a row's K/2 bytes
        inside = (n[:, None] < N) & (group[None, :] < n_groups)  # (BLOCK_N, GROUPS)
        place = n[:, None, None] * (n_groups * HALF) + byte[None, :, :]  # (BLOCK_N, GROUPS, HALF)
        tile = tl.load(packed + place, mask=inside[:, :, None], other=0)
        even = tl.load(x + 2 * byte, mask=group[:, None] < n_groups, other=0.0).to(tl.float32)
        odd = tl.load(x + 2 * byte + 1, mask=group[:, None] < n_groups, other=0.0).to(tl.float32)
        scale = tl.load(scales + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
        products = (tile >> 4).to(tl.float32) * even[None, :, :] + (tile & 15).to(tl.float32) * odd[None, :, :]
        sums += scale * tl.sum(products, axis=2) + (zero - 8 * scale) * tl.sum(even + odd, axis=1)[None, :]
    tl.store(out + n, tl.sum(sums, axis=1), mask=n < N)


@triton.jit
def int4_rows(
    x, packed, scales, zeros, out, M, N, n_groups,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """x (M, K), packed (N, K/2), scales and zeros (N, K/g) -> out (M, N), for M up to ROWS; HALF is g/2"""
    m = tl.arange(0, ROWS)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    K = 2 * n_groups * HALF
    products = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, n_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        byte = start * HALF + tl.arange(0, GROUPS * HALF)  # which of a row's K/2 bytes
        inside = (n[:, None] < N) & (group[None, :] < n_groups)  # (BLOCK_N, GROUPS)
        scale = tl.load(scales + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
        place = n[:, None] * (n_groups * HALF) + byte[None, :]  # (BLOCK_N, GROUPS * HALF)
        tile = tl.load(packed + place, mask=(n[:, None] < N) & (byte[None, :] < n_groups * HALF), other=0)
        given = (m[:, None] < M) & (byte[None, :] < n_groups * HALF)
        even = tl.load(x + m[:, None] * K + 2 * byte[None, :], mask=given, other=0.0)  # (ROWS, GROUPS * HALF)
        odd = tl.load(x + m[:, None] * K + 2 * byte[None, :] + 1, mask=given, other=0.0)
        upper = dequantized(tile >> 4, scale, zero, HALF).to(even.dtype)
        lower = dequantized(tile & 15, scale, zero, HALF).to(odd.dtype)
        products = tl.dot(even, tl.trans(upper), products, input_precision="ieee")
        products = tl.dot(odd, tl.trans(lower), products, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], products, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def dequantized(codes, scale, zero, HALF: tl.constexpr):
    """s (q - 8) + z of codes (BLOCK_N, GROUPS * HALF), with scale and zero (BLOCK_N, GROUPS)."""
    groups = tl.reshape(codes, (scale.shape[0], scale.shape[1], HALF)).to(tl.float32)
    return tl.reshape(scale[:, :, None] * (groups - 8) + zero[:, :, None], codes.shape)


def has_tensor_cores(x: Tensor) -> bool:
    """Whether Triton multiplies tiles by tensor cores: in 16 bits from capability 8.0 on. Elsewhere they fill registers."""
    return x.is_cuda and x.dtype.itemsize == 2 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def run_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    M, (N, K) = len(x), codes.shape
    out = x.new_empty(M, N)
    if M == 1:
        int8_row[(triton.cdiv(N, 8),)](x, codes, scales, out, N, K, BLOCK_N=8, BLOCK_K=1024)
    else:
        ROWS, BLOCK_K = triton.next_power_of_2(M), 128 if has_tensor_cores(x) else 64
        int8_rows[(triton.cdiv(N, 32),)](x, codes, scales, out, M, N, K, ROWS=ROWS, BLOCK_N=32, BLOCK_K=BLOCK_K)
    return out


def run_int4(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    M, (N, n_groups) = len(x), scales.shape
    HALF = packed.shape[1] // n_groups
    out = x.new_empty(M, N)
    given = (x, packed, scales, zeros, out)
    if M == 1:
        int4_row[(triton.cdiv(N, 8),)](*given, N, n_groups, BLOCK_N=8, GROUPS=512 // HALF, HALF=HALF)
    else:
        ROWS, BLOCK_BYTES = triton.next_power_of_2(M), 64 if has_tensor_cores(x) else 32
        GROUPS = max(1, BLOCK_BYTES // HALF)
        int4_rows[(triton.cdiv(N, 32),)](*given, M, N, n_groups, ROWS=ROWS, BLOCK_N=32, GROUPS=GROUPS, HALF=HALF)
    return out
