"""`minillm evaluate`: what quantization does to any checkpoint, as one table of bytes, answers and speed.

The reference is the checkpoint in fp32. Quantized layers take activations of `--dtype`, so that with fp32 a row shows what its
codes lose and nothing else. How answers are scored is told in evaluation.py.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from minillm.checkpoint import load
from minillm.config import DEFAULT_MODEL
from minillm.cpu import use_fastest_linear
from minillm.device import DTYPE_NAMES, DTYPES, pick_device, pick_dtype
from minillm.errors import MinillmError, UsageError
from minillm.evaluation import WINDOW, Comparison, MakeCache, compare, prose
from minillm.files import check_writable, write_json
from minillm.generation import Recorder, generate_alone
from minillm.json_lines import check_whole
from minillm.metrics import RequestTimes, itl
from minillm.model import Transformer
from minillm.report import figure, make_console, make_table
from minillm.sampling import SamplerLike, greedy
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.quantization import GROUP_SIZES, SCHEMES, has_speed, quantize, weight_bytes
from minillm.stages.quantized_cache import QuantizedKVCache
from minillm.stages.quantized_linear import QuantizedLinear
from minillm.tokenizer import Tokenizer
from minillm.weights import empty_model, named_parts

INT8_CACHE = "int8_kv"
KNOWN = (*DTYPES, *SCHEMES, INT8_CACHE)
DEFAULT_SCHEMES = ("bf16", "int8", "int4", "w8a8", INT8_CACHE)
DEFAULT_GROUPS = (32, 64)
MOST_TOKENS = 1_000_000  # of a text
LONGEST_TOKEN = 100  # characters: so many of a file a token are read, and no more
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
        """The model of this row. Raises `MinillmError` where the model or the device does not allow it."""
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


def evaluate(args: argparse.Namespace) -> None:
    """Print the table. Raises `UsageError` for a wrong command, `MinillmError` also where no scheme that was asked for runs."""
    check_writable(args.json)
    device = pick_device(args.device)
    dtype = DTYPE_NAMES[pick_dtype(args.dtype, device)]
    settings = read_settings(args.schemes, args.group_size, dtype)
    check_whole("tokens", args.tokens, 2, MOST_TOKENS)
    text = _read(args.text, args.tokens)
    model, tokenizer = load(args.model, device, "fp32")
    tokens = _tokens(tokenizer, text, args.tokens)
    console = make_console()

    base = in_dtype(model, DTYPES[dtype])
    results: list[Result] = []
    left_out: dict[str, list[str]] = {}  # why, and which rows
    for setting in track(
        settings, "schemes", console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ):
        try:
            results.append(_result(setting, model, base, tokens))
        except MinillmError as error:
            left_out.setdefault(str(error), []).append(setting.label)
    if len(results) < 2 and left_out:  # of all that was asked for, nothing: fp32 is there even so, if it fits
        raise MinillmError(next(iter(left_out)))

    source = "the package's own prose" if args.text is None else args.text
    title = f"{model.config.name} on {device}, activations in {dtype}"
    console.print(_table(escape(title), results))
    console.print(
        f"[dim]KL (nats a token) and agreement are those with the fp32 model, over {results[0].loss.positions} tokens of "
        f"{escape(source)}. MB: all weights in memory; bits: of a weight of the linear layers, scales and zeros included; "
        f"tokens/s: decode of one sequence, the median of {NEW_TOKENS - 1} steps.[/dim]"
    )
    for why, labels in left_out.items():
        console.print(f"Left out: [bold]{'; '.join(labels)}[/bold]. {escape(why)}")
    for group_size in sorted({result.setting.group_size for result in results if result.setting.group_size}):
        if is_own_grid(model, group_size):
            console.print(escape(_own_grid_note(model.config.name, group_size)))
    if args.json:
        names = {"model": model.config.name, "device": str(device), "dtype": dtype, "text": args.text or "prose"}
        write_json(args.json, names | {"tokens": len(tokens), "rows": [result.as_json() for result in results]})
        console.print(f"Written: {args.json}", markup=False)


def read_settings(schemes: str | None, group_sizes: str | None, dtype: str) -> list[Setting]:
    """The rows that the options ask for, fp32 always first. int4 gives two a group: its head in int8, and all of it in int4.

    `dtype` is what an int8 cache leaves the head in. Raises `UsageError` for unknown schemes and groups.
    """
    names = DEFAULT_SCHEMES if schemes is None else [name.strip() for name in schemes.split(",")]
    groups = DEFAULT_GROUPS if group_sizes is None else [_group_size(text.strip()) for text in group_sizes.split(",")]
    if group_sizes is not None and "int4" not in names:
        raise UsageError("Only int4 has groups: leave --group-size out, or add int4 to --schemes.")
    settings = [Setting("fp32", "fp32")]
    for name in names:
        if name not in KNOWN:
            raise UsageError(f"Unknown scheme {name!r}: choose from {', '.join(KNOWN)}.")
        if name == "int4":
            settings += [Setting(name, head, group) for group in groups for head in ("int8", "int4")]
        else:
            settings.append(Setting(name, dtype if name == INT8_CACHE else name))
    return list(dict.fromkeys(settings))  # each once


def _group_size(text: str) -> int:
    if text not in map(str, GROUP_SIZES):
        raise UsageError(f"The group size is {text!r}; choose from {', '.join(map(str, GROUP_SIZES))}.")
    return int(text)


def _read(path: str | None, tokens: int) -> str:
    """The text, or as much of a long one as so many tokens can hold. Raises `UsageError` where it is none."""
    if path is None:
        return prose()
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(LONGEST_TOKEN * tokens)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8: name another file.") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: name a file with some text.")
    return text


def _tokens(tokenizer: Tokenizer, text: str, n: int) -> list[int]:
    tokens = tokenizer.encode(text)[:n]
    if len(tokens) < 2:
        raise UsageError(f"The text has {len(tokens)} tokens: at least 2 are needed, one to predict another from.")
    return tokens


def in_dtype(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy of the model in another dtype, or the model itself. Raises `MinillmError` where there is no memory for it."""
    if model.dtype == dtype:
        return model
    copy, sources = empty_model(model.config, model.device, dtype), named_parts(model)
    for name, part in named_parts(copy).items():
        part.copy_(sources[name])
    return use_fastest_linear(copy)


def _result(setting: Setting, reference: Transformer, base: Transformer, tokens: list[int]) -> Result:
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


def _own_grid_note(name: str, group_size: int) -> str:
    kind = " (Q4_1)" if name == DEFAULT_MODEL else ""
    return (
        f"{name} was stored in 4 bits with groups of {group_size}{kind}: on the linear layers of its blocks int4 g{group_size} "
        "loses nothing, which is no result about 4 bits, and what it does lose comes from the head."
    )


def _table(title: str, results: Sequence[Result]) -> Table:
    table = make_table(title, "scheme", "MB", "bits", "perplexity", "KL", "agreement", "tokens/s")
    for result in results:
        loss, rate = result.loss, result.tokens_per_s
        table.add_row(
            result.setting.label, f"{result.bytes / 1e6:,.4g}", f"{result.bits_per_weight:.2f}", f"{loss.perplexity:.4g}",
            f"{loss.kl:.4f}", f"{loss.agreement:.1%}", "no speed to show" if rate is None else figure(rate),
        )  # fmt: skip
    return table
