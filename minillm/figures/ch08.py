"""Pictures of chapter 8's first half: who waits for whom, steps against overhead, parts of a step, break-even, splits."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minillm.figures.picture import BLUE, COLORS, DARK, DOTS, LINES, ORANGE, PALE, Picture, blank, picture, plain

FACES = ((BLUE, ""), (ORANGE, "//"), (PALE, ""))


def lanes(device_us: Sequence[float], overhead_us: float) -> Picture:
    """Operators that take `device_us` each: the host hands them over one by one, and then all of them at once.

    An operator starts when it has been handed over and the one before it is done.
    """
    ends, ready = [], 0.0
    for i, busy in enumerate(device_us):
        ready = max(ready, (i + 1) * overhead_us) + busy
        ends.append(ready)
    at_once = overhead_us + sum(device_us)
    alt = f"{len(device_us)} operators: one by one they end after {ready:.3g} us, handed over at once after {at_once:.3g} us"
    result, all_axes = picture(alt, height=2.7, nrows=2, sharex=True)
    starts = [end - busy for end, busy in zip(ends, device_us, strict=True)]
    whole, offset = [], overhead_us
    for busy in device_us:
        whole.append(offset)
        offset += busy
    panels = {
        f"one by one: {ready:.3g} us": ([(i * overhead_us, overhead_us) for i in range(len(device_us))], starts),
        f"all at once: {at_once:.3g} us": ([(0.0, overhead_us)], whole),
    }
    for axes, (title, (launches, begins)) in zip(all_axes, panels.items(), strict=True):
        for x, width in launches:
            axes.add_patch(Rectangle((x, 1.1), width, 0.8, facecolor=ORANGE, edgecolor=DARK, linewidth=0.5))
        for x, busy in zip(begins, device_us, strict=True):
            axes.add_patch(Rectangle((x, 0.1), busy, 0.8, facecolor=BLUE, edgecolor=DARK, linewidth=0.3))
        axes.set(ylim=(0, 2), xlim=(0, 1.02 * max(ready, at_once)))
        axes.set_yticks([0.5, 1.5], ["device", "host"], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    all_axes[-1].set_xlabel("us")
    return result


def against_overhead(overheads_us: Sequence[float], steps_ms: Mapping[str, Sequence[float]]) -> Picture:
    """Predicted milliseconds of a decode step against what an operator costs, a line a model."""
    result, axes = picture("a step's time against the overhead of an operator: flat, then a slope", height=3.1)
    for i, (name, values) in enumerate(steps_ms.items()):
        axes.plot(overheads_us, values, LINES[i % 4], color=COLORS[i % 4], linewidth=1.4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="overhead of an operator, us", ylabel="ms a decode step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def parts(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Milliseconds of some steps, a bar each, made up of named parts."""
    totals = {name: sum(values.values()) for name, values in steps.items()}
    alt = "; ".join(f"{name} {total:.3g} ms" for name, total in totals.items())
    result, axes = picture(alt, height=0.9 + 0.38 * len(steps))
    names = list(dict.fromkeys(part for values in steps.values() for part in values))
    for row, values in enumerate(steps.values()):
        left = 0.0
        for part, value in values.items():
            face, hatch = FACES[names.index(part) % len(FACES)]
            axes.barh(row, value, 0.62, left, color=face, hatch=hatch, edgecolor=DARK, linewidth=0.6)
            left += value
        axes.annotate(f"{left:.3g}", (left, row), xytext=(4, 0), textcoords="offset points", fontsize=8, va="center")
    looks = [{"facecolor": face, "hatch": hatch, "edgecolor": DARK, "linewidth": 0.6} for face, hatch in FACES]
    key = [Patch(label=part, **looks[i % len(FACES)]) for i, part in enumerate(names)]  # type: ignore[arg-type]
    axes.set_yticks(range(len(steps)), list(steps), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms a decode step", xlim=(0, 1.12 * max(totals.values())))
    axes.legend(handles=key, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    plain(axes)
    return result


def break_even(eager_s: float, programs: Mapping[str, tuple[float, float]]) -> Picture:
    """Seconds until n tokens are there: eager, and with programs of (seconds to compile, seconds a step); where they cross."""
    crossings = {name: wait / (eager_s - step) for name, (wait, step) in programs.items() if step < eager_s}
    alt = "; ".join(f"{name} is ahead from {n:,.0f} tokens on" for name, n in crossings.items())
    result, axes = picture(alt or "no program is ever ahead of eager steps", height=2.9)
    most = 1.6 * max(crossings.values(), default=1000.0)
    axes.plot([0, most], [0, most * eager_s], LINES[0], color=DARK, linewidth=1.4, label="eager")
    for i, (name, (wait, step)) in enumerate(programs.items()):
        color = COLORS[i % 2]
        axes.plot([0, most], [wait, wait + most * step], LINES[1 + i % 3], color=color, linewidth=1.4, label=name)
        if name in crossings:
            n = crossings[name]
            axes.plot(n, n * eager_s, DOTS[i % 4], color=color, markersize=6)
            axes.annotate(f"{n:,.0f}", (n, n * eager_s), xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set(xlabel="tokens", ylabel="seconds", xlim=(0, most), ylim=(0, None))
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def splits(n_heads: int, n_columns: int, size: int) -> Picture:
    """KV heads (rows) by cached tokens (columns): one program a row, and one program for each split of a row."""
    n = -(-n_columns // size)
    alt = (
        f"{n_heads} programs walk a whole row each; cut into splits of {size}, {n_heads * n} programs walk a part each"
    )
    result, (left, right) = picture(alt, height=2.2, ncols=2)
    _grid(left, n_heads, n_columns, n_columns, f"a program a KV head: {n_heads}")
    _grid(right, n_heads, n_columns, size, f"and a split of {size} tokens: {n_heads * n}")
    return result


def _grid(axes: Axes, n_heads: int, n_columns: int, size: int, title: str) -> None:
    blank(axes, n_columns, n_heads)
    axes.set_ylim(-0.75, n_heads)
    for head in range(n_heads):
        for i, start in enumerate(range(0, n_columns, size)):
            width = min(size, n_columns - start)
            face, hatch = ((BLUE, ""), (PALE, "//"))[(i + head) % 2]
            box = Rectangle(
                (start, head + 0.08), width, 0.84, facecolor=face, hatch=hatch, edgecolor=DARK, linewidth=0.6
            )
            axes.add_patch(box)
    axes.text(0, -0.4, "cached tokens, 0", fontsize=8, va="center")
    axes.text(n_columns, -0.4, f"{n_columns:,}", fontsize=8, ha="right", va="center")
    axes.set_title(title, fontsize=9)
