"""What the commands print: tables of ceilings, predictions, the five numbers and positions on the roofline."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from minillm.metrics import FiveNumbers
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.plot import si
from minillm.roofline.position import Position

TEXT_COLUMNS = ("stage", "phase", "limit", "ceiling", "scheme", "operator")


def make_console() -> Console:
    """Standard output. Redirected, its lines are as long as the tables need."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False)  # ":heart:" is text


def make_table(title: str, *columns: str) -> Table:
    """A table without rows: what is text stands left, figures right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    return table


def ceilings_table(measured: Ceilings, datasheet: Ceilings | None) -> Table:
    """The measured ceilings, with the datasheet's beside them where it is known."""
    table = make_table(f"{measured.device}, {measured.dtype}", "ceiling", "measured", "datasheet")
    sheet = _ceiling_figures(datasheet) if datasheet else {}
    for name, value in _ceiling_figures(measured).items():
        table.add_row(name, value, sheet.get(name, "not in the table"))
    table.add_row("overhead", f"{duration(measured.overhead)} an operator", "-")
    return table


def _ceiling_figures(c: Ceilings) -> dict[str, str]:
    return {
        "read bandwidth": f"{si(c.bandwidth)}B/s",
        "matrix product": f"{si(c.peak)}FLOP/s",
        "ridge": f"{c.ridge:.3g} FLOP/byte",
    }


def predictions_table(title: str, stages: Mapping[str, Sequence[Position]]) -> Table:
    """What each phase costs and will take, from counts and ceilings alone."""
    table = make_table(title, "stage", "phase", "FLOP", "bytes moved", "FLOP/byte", "predicted", "limit")
    for stage, positions in stages.items():
        for p in positions:
            cost = p.cost
            table.add_row(
                stage, p.phase, si(cost.flops), f"{si(cost.bytes)}B", f"{cost.intensity:.3g}", duration(p.predicted_s), p.bound,
            )  # fmt: skip
    return table


def metrics_table(metrics: Mapping[str, FiveNumbers]) -> Table:
    """The five numbers of each stage."""
    table = make_table("The five numbers", "stage", "TTFT", "ITL p50", "ITL P99", "tokens/s", "$ per M tokens")
    for stage, m in metrics.items():
        table.add_row(
            stage, duration(m["ttft_s"]), duration(m["itl_p50_s"]), duration(m["itl_p99_s"]),
            figure(m["tokens_per_s"]), figure(m["usd_per_million_tokens"]),
        )  # fmt: skip
    return table


def positions_table(stages: Mapping[str, Sequence[Position]]) -> Table:
    """Predicted beside measured, and where each phase stands on the roofline."""
    columns = ("stage", "phase", "FLOP/byte", "predicted", "measured", "ratio", "FLOP/s", "of the roof", "limit")
    table = make_table("On the roofline", *columns)
    for stage, positions in stages.items():
        for p in positions:
            ratio = f"{p.ratio:.2f}" if p.ratio else "-"
            table.add_row(
                stage, p.phase, f"{p.cost.intensity:.3g}", duration(p.predicted_s), duration(p.measured_s), ratio,
                si(p.achieved), f"{p.fraction_of_roofline:.0%}", p.bound,
            )  # fmt: skip
    return table


def figure(value: float | None) -> str:
    """Three digits, or a dash where there is no value."""
    return "-" if value is None else f"{value:.3g}"


def duration(value: float | None) -> str:
    """Seconds with the prefix that fits: 0.0125 -> "12.5 ms". A dash where there is no value."""
    return "-" if value is None else f"{si(value)}s"


def one_line(m: FiveNumbers, tokens: int, price_per_hour: float) -> str:
    """The five numbers of one request in a sentence's length."""
    itl = f"ITL p50 {duration(m['itl_p50_s'])}, P99 {duration(m['itl_p99_s'])}"
    price = f"${figure(m['usd_per_million_tokens'])} per million tokens at ${price_per_hour:g} an hour"
    return f"{tokens} tokens, TTFT {duration(m['ttft_s'])}, {itl}, {figure(m['tokens_per_s'])} tokens/s, {price}"
