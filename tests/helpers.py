"""What several test files share: tiny configurations of every family, lively random models, and comparisons."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from minillm import stages
from minillm.config import ModelConfig, llama3_rope_factors
from minillm.model import Cache, Transformer
from minillm.stages import naive

# One shape a family, each awkward where bugs hide: several KV heads with groups of more than one, head_dim apart from
# d_model / n_heads, a window shorter than any sequence here, RoPE factors that all differ, an odd vocabulary.
SHAPES = {
    "llama": ModelConfig("llama-tiny", 2, 32, 6, 2, 8, 48, 97, 192, tied_embeddings=True),
    "llama3": ModelConfig(
        "llama3-tiny", 2, 32, 4, 2, 8, 48, 97, 192, rope_factors=llama3_rope_factors(8, 1e4, 8.0, 1.0, 4.0, 64)
    ),
    "qwen2": ModelConfig("qwen2-tiny", 2, 32, 4, 2, 8, 48, 97, 192, qkv_bias=True, architecture="qwen2"),
    "qwen3": ModelConfig(
        "qwen3-tiny",
        2,
        32,
        4,
        2,
        12,
        48,
        97,
        192,
        tied_embeddings=True,
        qk_norm=True,
        norm_eps=1e-6,
        architecture="qwen3",
    ),
    "mistral": ModelConfig("mistral-tiny", 2, 32, 4, 2, 8, 48, 97, 192, sliding_window=5, architecture="mistral"),
    "multi-query": ModelConfig("mqa-tiny", 2, 32, 4, 1, 8, 48, 97, 192),
    "multi-head": ModelConfig("mha-tiny", 2, 32, 4, 4, 8, 48, 97, 192),
}
# Stages that run a model as it is: those that prepare one (quantized, or with a twin that drafts) have tests of their own.
PLAIN_STAGES = {name: stage for name, stage in stages.STAGES.items() if stage.prepare is None}
STAGES = {name: stage.generate for name, stage in PLAIN_STAGES.items()}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For files that import it: a second thread gains little, and loses tenfold by waiting where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def enliven(model: nn.Module, seed: int = 0) -> None:
    """Fill a model, ours or transformers', so that every parameter matters: attention is peaked, no norm is 1, no bias is 0.

    Weights of standard deviation 1.5 / sqrt(fan-in) keep activations and logits of order 1 and let scores spread, so that a
    wrong position, head or mask changes the logits by far more than rounding does.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name:
            parameter.copy_(0.3 * noise)
        elif parameter.dim() == 2:
            parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
        else:
            parameter.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))


def lively_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A random model of ours in which every parameter matters."""
    model = Transformer(config)
    enliven(model, seed)
    return model.to(dtype)


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rounding(dtype: torch.dtype, magnitude: float) -> float:
    """How far two right orders of summation may put logits apart in these tiny models.

    A logit depends on its input through L = 2 layers of four matrix products and attention over S <= 192 tokens: about
    n = 2 (C + D + S + Hq D + C + F) + C = 2 (32 + 12 + 192 + 48 + 32 + 48) + 32 = 760 additions, each of which rounds with a
    relative error of at most u = eps / 2. Errors of random sign add up to sqrt(n) u; RMSNorm, softmax and the weights' gain of
    1.5 a product amplify what enters them, by at most about 2 a layer for each of the two residual branches, 16 in all:
    16 sqrt(760) eps / 2 = 220 eps of the largest logit (2.6e-5 of it in fp32, 5e-14 in fp64). The faults that these tests are
    for change logits by a tenth of that logit and more.
    """
    return 220 * torch.finfo(dtype).eps * magnitude


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    tolerance = rounding(expected.dtype, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@torch.inference_mode()
def logits_whole(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, naive.NoCache(model))


@torch.inference_mode()
def logits_through(model: Transformer, tokens: Tensor, cache: Cache, size: int) -> Tensor:
    """Logits of all positions, the tokens being fed in chunks of `size`."""
    return torch.cat([model(chunk, cache) for chunk in tokens.split(size, dim=1)], dim=1)


class Columns:
    """A recorder for `run`, which keeps the tokens of all rows and says stop after so many."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.columns: list[list[int]] = []
        self.stop_after = stop_after

    def add(self, tokens: Tensor) -> bool:
        self.columns.append(tokens.tolist())
        return len(self.columns) == self.stop_after

    @property
    def rows(self) -> list[list[int]]:
        return [list(row) for row in zip(*self.columns, strict=True)]


@contextmanager
def fresh_memory_full_of_nan() -> Iterator[None]:
    """The memory that torch.empty returns is filled with NaN, and of whole numbers with the largest."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def chi_square_z(statistic: float, df: int) -> float:
    """How many standard deviations a chi-square statistic of `df` degrees of freedom lies above its mean.

    Wilson and Hilferty: the cube root of statistic / df is normal, with mean 1 - 2 / (9 df) and variance 2 / (9 df).
    """
    return ((statistic / df) ** (1 / 3) - 1 + 2 / (9 * df)) / (2 / (9 * df)) ** 0.5


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and len(message) > 20 and "Traceback" not in message
