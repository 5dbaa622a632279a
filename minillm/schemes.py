"""What quantization does to a checkpoint: for each scheme its bytes, how far its answers are from those in fp32, and its speed.

The reference is the checkpoint in fp32. Quantized layers take activations of another dtype where that is asked for; in fp32 a
row shows what the codes lose and nothing else. How answers are scored is told in evaluation.py.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.cpu import use_fastest_linear
from minillm.device import DTYPES, pick_dtype
from minillm.evaluation import WINDOW, Comparison, MakeCache, compare
from minillm.generation import Recorder, generate_alone
from minillm.metrics import RequestTimes, itl
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.quantization import GROUP_SIZES, SCHEMES, has_speed, quantize, weight_bytes
from minillm.stages.quantized_cache import QuantizedKVCache
from minillm.stages.quantized_linear import QuantizedLinear
from minillm.weights import empty_model, named_parts

INT8_CACHE = "int8_kv"
PROMPT_TOKENS, NEW_TOKENS = 8, 24  # of the decode that is timed


@dataclass(frozen=True)
class Setting:
    """One row of the table: a scheme for the layers, one for the head, and of int4 the size of a group."""

    scheme: str
    head: str
    group_size: int | None = None

    @property
    def label(self) -> str:
        if self.group_size is None:
            return {INT8_CACHE: "int8 KV cache"}.get(self.scheme, self.scheme)
        head = "" if self.head == self.scheme else f", head {self.head}"
        return f"{self.scheme} g{self.group_size}{head}"

    @property
    def cache(self) -> MakeCache:
        return QuantizedKVCache if self.scheme == INT8_CACHE else GroupedKVCache

    def applied(self, reference: Transformer, base: Transformer) -> Transformer:
        """The model of this row, made of one in fp32 and one in the dtype of the activations.

        Raises `MinillmError` where the model or the device does not allow it.
        """
        if self.scheme in DTYPES:
            return in_dtype(reference, pick_dtype(self.scheme, reference.device))
        if self.scheme == INT8_CACHE:
            return base
        return quantize(base, self.scheme, group_size=self.group_size or GROUP_SIZES[0], head=self.head)


@dataclass(frozen=True)
class Result:
    """What one setting keeps and loses. `tokens_per_s` is None where there is no speed to show."""

    setting: Setting
    bytes: int
    bits_per_weight: float
    loss: Comparison
    tokens_per_s: float | None

    def as_json(self) -> dict[str, object]:
        return {
            "scheme": self.setting.scheme,
            "group_size": self.setting.group_size,
            "head": self.setting.head,
            "bytes": self.bytes,
            "bits_per_weight": self.bits_per_weight,
            "perplexity": self.loss.perplexity,
            "kl": self.loss.kl,
            "agreement": self.loss.agreement,
            "tokens_per_s": self.tokens_per_s,
        }


def in_dtype(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy of the model in another dtype, or the model itself. Raises `MinillmError` where there is no memory for it."""
    if model.dtype == dtype:
        return model
    copy, sources = empty_model(model.config, model.device, dtype), named_parts(model)
    for name, part in named_parts(copy).items():
        part.copy_(sources[name])
    return use_fastest_linear(copy)


def measure(setting: Setting, reference: Transformer, base: Transformer, tokens: list[int]) -> Result:
    """The row of a setting: `reference` is the checkpoint in fp32, `base` in the dtype of the activations.

    Raises `MinillmError` where the model or the device does not allow it, `UsageError` for a text that cannot be scored.
    """
    model = setting.applied(reference, base)
    window = min(WINDOW, model.config.max_positions)
    loss = compare(reference, model, tokens, window=window, cache=setting.cache)
    measured = setting.scheme not in SCHEMES or has_speed(setting.scheme, model.device)
    rate = decode_rate(model, tokens[:PROMPT_TOKENS], setting.cache) if measured else None
    return Result(setting, weight_bytes(model), bits_per_weight(model), loss, rate)


def bits_per_weight(model: Transformer) -> float:
    """Bits that a weight of the linear layers takes, its share of scales and zeros included. Biases are left out."""
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, QuantizedLinear))]
    tensors = [
        tensor
        for layer in layers
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        if name != "bias"
    ]
    stored = sum(tensor.nbytes for tensor in tensors)
    return 8 * stored / sum(layer.in_features * layer.out_features for layer in layers)


def decode_rate(model: Transformer, prompt: Sequence[int], make_cache: MakeCache) -> float:
    """Tokens a second of one sequence: 1 / the median time between two tokens, after a run that warms up."""

    def run(model: Transformer, tokens: Tensor, n: int, sampler: SamplerLike, recorder: Recorder) -> None:
        cache = make_cache(model, tokens.shape[1] + n - 1)
        prefill_and_decode(model, cache, tokens, n, sampler, recorder)

    generate_alone(run, model, prompt, 2, greedy, (), None)
    times = generate_alone(run, model, prompt, NEW_TOKENS, greedy, (), None).times
    return 1 / statistics.median(itl(RequestTimes(0.0, times)))


def is_own_grid(model: Transformer, group_size: int) -> bool:
    """Whether no group of the down projections holds more than 16 values, as where the weights were stored in 4 bits."""
    for name, layer in model.named_modules():
        if name.endswith("mlp.down"):
            weight = layer.weight[:16]  # some rows of each block tell
            if weight.shape[1] % group_size:
                return False
            ordered = weight.unflatten(1, (-1, group_size)).sort(-1).values  # (16, F/g, g)
            if (ordered.diff(dim=-1) != 0).sum(-1).max() >= 16:
                return False
    return True
