"""What was measured beside other engines, read from the results in `benchmarks/`: tables, and sentences on what is lost.

Text and numbers cannot drift apart here, since no number is written down: all come from the JSON of a run of
`benchmarks/peers.py` or `benchmarks/decode.py`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minillm.book import Table, table
from minillm.errors import UsageError

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

Result = Mapping[str, Any]


class Rows(NamedTuple):
    """A table before it is known who shows it: a page or a terminal."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def shown(self) -> Table:
        return table(self.columns, self.rows)


def read(name: str) -> dict[str, Any]:
    """A result of a benchmark, by the name of its file without `.json`. Raises `UsageError` where it is not."""
    path = RESULTS / f"{name}.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise UsageError(
            f"There is no {path}: results lie in a clone of the repository, not in an installed package."
        ) from None
    return result


def figures(spread: Result, scale: float = 1.0) -> str:
    """A median with its lowest and highest round, as a table shows it."""
    median, lowest, highest = (_three_digits(spread[key] * scale) for key in ("median", "min", "max"))
    return f"{median} ({lowest} to {highest})"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def origin(result: Result) -> str:
    """Where, when and of what the figures are."""
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    others = {"transformers": "transformers", "llama_cpp_python": "llama-cpp-python"}
    packages = [f"torch {versions['torch']}", *(f"{others[k]} {versions[k]}" for k in others if k in versions)]
    changed = ", with changes" if result["dirty"] else ""
    busy = result["others_busy_cores"]
    alone = "" if busy is None else f" Other processes kept up to {busy:.2f} cores busy."
    return (
        f"{machine['device']} of {machine['cores']} cores, {result['date'][:10]}, commit {(result['commit'] or 'unknown')[:8]}"
        f"{changed}; Python {versions['python']}, {', '.join(packages)}; {settings['rounds']} rounds.{alone}"
    )


# --- beside other engines -------------------------------------------------------------------------------------------------


def speeds(result: Result) -> Rows:
    """Each engine by itself: tokens of all users a second in decode, and milliseconds of a prefill."""
    rows = [
        (
            f"{row['engine']}, {row['precision']}",
            figures(row["decode_tokens_per_s"]),
            figures(row["prefill_s"], 1e3),
            f"{row['first_calls_s']:.1f}" if "first_calls_s" in row else "-",
        )
        for row in result["engines"]
    ]
    return Rows(("engine", "decode, tokens/s", "prefill, ms", "first calls, s"), rows)


def ratios(result: Result) -> Rows:
    """How many times as fast minillm is as its peers. Above 1 is faster, for prefill too."""
    rows = [
        (
            f"{row['phase']}, {row['precision']}",
            f"{row['peer']}, {row['peer_precision']}",
            figures(row["times_as_fast"]),
            f"{row['target']:g}" if row["target"] else "-",
        )
        for row in sorted(result["ratios"], key=lambda row: (row["phase"], row["peer"] == "llama.cpp"))
    ]
    return Rows(("minillm's", "beside", "times as fast", "target"), rows)


def shortfalls(rows: Sequence[Result]) -> list[str]:
    """One sentence for each phase in which minillm is slower than a peer, or below its target."""
    lines = []
    for row in rows:
        times, target = row["times_as_fast"]["median"], row["target"]
        peer = f"{row['peer']} in {row['peer_precision']}"
        what = f"minillm's {row['phase']} in {row['precision']} is {times:.2f} times as fast as {peer}"
        if times < 1:
            lines.append(f"Slower: {what}.")
        elif target and times < target:
            lines.append(f"Below the target of {target:g}: {what}.")
    return lines or ["Nowhere slower, and no target missed."]


def price_of_compiling(result: Result) -> str:
    """How much longer the first calls of compiled steps take than those of eager ones, and when that is earned back."""
    of = {row["precision"]: row for row in result["engines"] if row["engine"] == "minillm"}
    if "compiled int4" not in of or "int4" not in of:
        return "Nothing was compiled in this run."
    more = of["compiled int4"]["first_calls_s"] - of["int4"]["first_calls_s"]
    compiled, eager = (1 / of[name]["decode_tokens_per_s"]["median"] for name in ("compiled int4", "int4"))  # s a token
    said = f"Compiling takes {more:.0f} s, once on a machine, since what is compiled is kept on disk"
    if compiled >= eager:
        return f"{said}; it is never earned back, as a compiled step is no faster."
    return f"{said}; it is earned back after {more / (eager - compiled):,.0f} tokens."


# --- among ourselves ------------------------------------------------------------------------------------------------------


def steps(result: Result) -> Rows:
    """Each precision by itself, with its decode step beside the prediction: of a result of `benchmarks/decode.py`."""
    rows = [
        (
            row["precision"],
            figures(row["decode_tokens_per_s"]),
            f"{row['step']['measured_s']['median'] * 1e3:.3g}",
            f"{row['step']['predicted_s'] * 1e3:.3g}",
            figures(row["prefill_s"], 1e3),
        )
        for row in result["precisions"]
    ]
    return Rows(("precision", "decode, tokens/s", "a step, ms", "predicted, ms", "prefill, ms"), rows)


def gains(result: Result) -> Rows:
    """What chapters 5 and 6 promise, each beside minillm without it: of a result of `benchmarks/decode.py`."""
    rows = [
        (
            f"{row['phase']}, {row['what']}",
            row["beside"],
            figures(row["times_as_fast"]),
            f"{row['target']:g}",
        )
        for row in result["ratios"]
        if row["target"]
    ]
    return Rows(("minillm's", "beside", "times as fast", "target"), rows)


def losses(result: Result) -> list[str]:
    """Where those gains end: of what such a result names as missed, all but the predictions that were not close."""
    return [line for line in result["missed"] if line.startswith(("Slower", "Below"))] or ["Nowhere slower."]


# --- published by others --------------------------------------------------------------------------------------------------

# gpt-fast's README (commit 6ecad9b): an A100 of 80 GB limited to 330 W, batch 1. GB/s are tokens/s times bytes of weights.
A100_GB_PER_S = 2039  # by the datasheet
GPT_FAST = (
    ("Llama-2-7B", "bf16", 104.9, 1397),
    ("Llama-2-7B", "int8", 155.6, 1069),
    ("Llama-2-7B", "int4, groups of 32", 196.8, 863),
    ("Llama-3.1-8B", "bf16", 93.9, None),
    ("Llama-3.1-8B", "int8", 137.6, None),
)


def published() -> Rows:
    """Decode as gpt-fast publishes it, for one user. Nothing here was measured by us."""
    rows = [
        (
            f"{model}, {precision}",
            f"{tokens:.1f}",
            "-" if rate is None else str(rate),
            "-" if rate is None else f"{rate / A100_GB_PER_S:.1%}",
        )
        for model, precision, tokens, rate in GPT_FAST
    ]
    return Rows(("gpt-fast on an A100, published", "decode, tokens/s", "GB/s", "of the datasheet's"), rows)
