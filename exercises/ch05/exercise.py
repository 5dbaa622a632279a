"""Chapter 5, exercises: quantization.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch05` or `pytest exercises/ch05` shows what you have earned. B sequences, S tokens in all, Hkv KV heads, D
numbers a head, L layers; a linear layer has a weight (N, K), N outputs of K inputs each; g neighbours in a row make a group.
"""

# %%
from math import ceil, floor

import torch
from torch import Tensor

from minillm.config import ModelConfig

# %% [markdown]
# ## Numbers into codes
# Numbers that share a *scale* s are rounded to points that lie s apart, which moves each by s/2 at most. That law is what the
# first exercises are graded by.


# %%
def absmax_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, K), int8 from -127 to 127, and scales (N, 1), float32, of w (N, K): w ~ s q, one scale a row. 2 points.

    Codes and scales must keep |w - s q| <= s/2 for every weight, with scales as small as that allows: a row's largest |w| over
    127, or at most half a percent more. It holds for rows of any size, 1e-20 for one, and for w in bfloat16. Every scale is
    above 0: a row of zeros has zeros as codes, and a scale of your choice. Hint: bfloat16 has 8 bits, too few to divide in.
    """
    raise NotImplementedError("Return the codes, each the nearest whole number to w / s, and the scale s of each row.")


# %%
def zeropoint_quantize(w: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K), uint8 from 0 to 15, with scales and zeros, both (N, K/g) float32, of w (N, K). 2 points.

    w ~ s (q - 8) + z, where g = group_size neighbours in a row share s and z: z is the value of code 8, as the int4 kernels of
    PyTorch have it. Keep |w - (s (q - 8) + z)| <= s/2 for every weight, with s at most (largest - smallest weight of the group)
    / 15, or half a percent more. Groups may lie far from 0. In a group of equal weights these come back as they are, and s is
    any number above 0. Raise a ValueError where g does not divide K. Hint: which weight should have code 0?
    """
    raise NotImplementedError("Return codes, scales and zeros of the groups, or raise a ValueError.")


# %% [markdown]
# ## Codes into bytes


# %%
def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte: codes (N, K), uint8 from 0 to 15, K even, into (N, K/2), uint8. 1 point.

    The codes of columns 0 and 1 share byte 0, those of 2 and 3 byte 1: the even column in the upper four bits. Hint: <<, |.
    """
    raise NotImplementedError("Return the bytes, the even column in the upper half of each.")


# %%
def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes again: bytes (N, K/2), uint8, into codes (N, K), uint8. 1 point.

    Hint: >>, &.
    """
    raise NotImplementedError("Return the codes, two columns for each byte.")


# %% [markdown]
# ## A product, and how wrong it can be


# %%
def groupwise_matmul(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x W^T (M, N) in the dtype of x, from x (M, K) and the codes (N, K), scales and zeros (N, K/g) of W. 2 points.

    W ~ s (q - 8) + z, as `zeropoint_quantize` makes it; the codes are uint8. Graded by its values. Hint: uint8 knows no
    negative numbers: 3 - 8 is 251.
    """
    raise NotImplementedError("Return the product of x with the weight that the codes stand for.")


# %%
def error_bound(x: Tensor, scales: Tensor) -> Tensor:
    """How far x W^T can be from what it was before W was quantized: bounds (M, N), float32. 1 point.

    x is (M, K); `scales` is (N, K/g), one for each group of neighbours in a row of W, or (N, 1), one for each row. Every weight
    may be off by up to s/2, up or down. Give the smallest bound that holds whatever the weights are; rounding of the product
    itself is left out. Hint: which signs of the errors are worst?
    """
    raise NotImplementedError("Return for each of M rows and N outputs the sum of |x| s/2 over all K inputs.")


# %% [markdown]
# ## Keys and values


# %%
def quantize_kv(x: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Codes (B, Hkv, S, D), int8 from -127 to 127, and scales, float32, of keys or values x (B, Hkv, S, D): x ~ s q. 1 point.

    axis "token" gives a scale to each token of each head, (B, Hkv, S, 1), axis "channel" to each channel of each head,
    (B, Hkv, 1, D). As in `absmax_quantize`, |x - s q| <= s/2, s is at most half a percent above the largest |x| over 127, every
    scale is above 0, and x may come in bfloat16. Hint: the numbers that share a scale lie along one dimension.
    """
    raise NotImplementedError("Return the codes, and a scale for each token or for each channel.")


# %% [markdown]
# ## What it saves


# %%
def bits_per_weight(bits: float, group_size: int, scale_bits: float = 16.0, zero_bits: float = 16.0) -> float:
    """Bits that a weight takes, its share of its group's scale and zero included. 1 point.

    Hint: int8 with a scale for each row of K weights is bits_per_weight(8, K, 16, 0), a little more than 8.
    """
    raise NotImplementedError("Return the bits of a code, and of a scale and a zero shared by the group.")


# %%
def step_bytes(
    config: ModelConfig, batch: int, context: int, weight_bits: float = 16.0, kv_bits: float = 16.0
) -> float:
    """Bytes that a decode step reads: P weights, and the keys and values of B users with `context` tokens each. 1 point.

    P = config.matmul_params, at `weight_bits` each; a key and a value in each layer for each KV head, of config.head_dim
    numbers at `kv_bits` each. Both include their shares of scales. Activations are left out.
    """
    raise NotImplementedError("Return the bytes of all weights, and of all users' keys and values.")


# %% [markdown]
# ## What it gains


# %%
def weight_only_gain(
    config: ModelConfig, batch: int, context: int, peak: float, bandwidth: float, weight_bits: float
) -> float:
    """Predict how many times faster a decode step is with weights of `weight_bits` than with weights of 16 bits. 2 points.

    B users attend over `context` tokens each; `peak` is in FLOP/s, `bandwidth` in bytes/s. With P = config.matmul_params, a
    step takes two spans of time, one after the other:
        linear layers   the longer of computing, 2 P B FLOPs, and reading P weights
        attention       reading all users' keys and values, 16 bits a number
    Only weights are quantized: the products are still of 16 bits, and `peak` is the same. Within 1 %.
    """
    raise NotImplementedError("Return the seconds of a step with weights of 16 bits divided by those with fewer.")


# %%
def gain_ends(peak: float, bandwidth: float, weight_bits: float) -> tuple[int, int]:
    """The batches between which the gain of the linear layers shrinks to nothing. 1 point.

    Their time is that of `weight_only_gain`. Returns first the largest batch with the whole gain, 16 / weight_bits, and then
    the smallest batch with no gain at all. Hint: P cancels. Where computing takes as long as reading, either limit may be said
    to bind.
    """
    raise NotImplementedError(
        "Return the last batch that waits for quantized weights, and the first that would not wait for 16 bits."
    )


# %%
def quantized_guesses() -> tuple[float, float, float]:
    """Before you run anything: Llama-2-7B on an A100 with 312 TFLOP/s and 2039 GB/s, as reading alone allows. 1 point.

    It has 6.61 billion weights that a token is multiplied with, and 0.52 MB of keys and values a token, in bfloat16.
    1. Tokens/s of one user with 200 tokens, weights in int8.
    2. The same in int4, groups of 32 with a scale and a zero of 16 bits each.
    3. How many times faster than bfloat16 that int4 is for 64 users with 1,000 tokens each.
    Each within 6 % of what minillm counts, operator by operator. Hint: a weight of int4 does not take 4 bits.
    """
    raise NotImplementedError("Return your three estimates: tokens/s, tokens/s and a ratio.")
