"""The kernels that gpu_operators.py sets beside each other, in the shapes of a model."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu_part import need
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.stages.gqa import decode_attention
from minillm.stages.quantized_linear import FastInt4Linear, FastInt8Linear, Int4Linear
from minillm.stages.triton_kernels import TritonInt4Linear, TritonInt8Linear, split_attention

GROUP = 32  # of int4
SDPA = ("grouped sdpa", "masked sdpa", "enable_gqa sdpa")
WRONG = 0.02  # relative error: bf16 rounds by up to 0.004, and a tile or a group left out costs far more

LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda linear: linear,
    "int8 pytorch": FastInt8Linear,
    "int8 triton": lambda linear: TritonInt8Linear(FastInt8Linear(linear)),
    "int4 pytorch": lambda linear: FastInt4Linear(linear, GROUP),
    "int4 triton": lambda linear: TritonInt4Linear(Int4Linear(linear, GROUP)),
}


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """N and K of each weight of a layer, the largest first, and of the head."""
    C, A = config.d_model, config.n_heads * config.head_dim
    return {
        "gate_up": (2 * config.d_ff, C),
        "down": (C, config.d_ff),
        "qkv": (A + 2 * config.n_kv_heads * config.head_dim, C),
        "o": (C, A),
        "head": (config.vocab_size, C),
    }


def checked(found: Tensor, expected: Tensor) -> float:
    """The relative error, in the norm. Raises `MinillmError` where it is larger than 16 bits explain."""
    error = ((found.float() - expected).norm() / expected.norm()).item()
    need(error < WRONG, f"the kernel is wrong: its relative error is {error:.3g}")
    return error


def attention_of(kernel: str, lengths: Tensor, S: int, split: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of one new token by "split_attention", or one of `SDPA`. A size of its own for the splits needs Triton."""
    if kernel == "grouped sdpa":  # the rows of a group are one matrix: what the stages call
        return decode_attention
    if kernel == "masked sdpa":  # what the static cache calls without Triton
        visible = torch.ones(1, 1, 1, S, dtype=torch.bool, device=lengths.device)
        return lambda q, k, v: decode_attention(q, k, v, visible)
    if kernel == "enable_gqa sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if split is None:
        return lambda q, k, v: split_attention(q, k, v, lengths)
    from minillm.stages import triton_attention

    return lambda q, k, v: triton_attention.run(q, k, v, lengths, None, split)


def launch_int8(x: Tensor, codes: Tensor, scales: Tensor, out: Tensor, tile: dict[str, int]) -> None:
    """`triton_linear.run_int8` with a tile size of its own: into out (M, N), from x (M, K)."""
    from minillm.stages import triton_linear as kernels

    M, (N, K) = len(x), codes.shape
    grid = (-(-N // tile["BLOCK_N"]),)
    if M == 1:
        kernels.int8_row[grid](x, codes, scales, out, N, K, **tile)
    else:
        kernels.int8_rows[grid](x, codes, scales, out, M, N, K, ROWS=1 << (M - 1).bit_length(), **tile)


def launch_int4(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, out: Tensor, tile: dict[str, int]) -> None:
    """`triton_linear.run_int4` with a tile size of its own: into out (M, N), from x (M, K)."""
    from minillm.stages import triton_linear as kernels

    M, (N, groups) = len(x), scales.shape
    grid, half = (-(-N // tile["BLOCK_N"]),), packed.shape[1] // groups
    if M == 1:
        kernels.int4_row[grid](x, packed, scales, zeros, out, N, groups, HALF=half, **tile)
    else:
        rows = 1 << (M - 1).bit_length()
        kernels.int4_rows[grid](x, packed, scales, zeros, out, M, N, groups, ROWS=rows, HALF=half, **tile)
