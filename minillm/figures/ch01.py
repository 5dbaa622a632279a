"""Pictures of chapter 1: the forward pass, attention, RoPE, sampling, and what naive generation repeats."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

from minillm.config import ModelConfig
from minillm.figures.picture import BLUE, DARK, DOTS, GRAY, LINES, ORANGE, PALE, Picture, blank, picture, plain
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.plot import draw_roofline
from minillm.roofline.position import Position


def forward_pass(config: ModelConfig) -> Picture:
    """One pass through the model: the residual stream runs left to right, each half of a layer adds to it."""
    alt = f"token ids, embedding, {config.n_layers} layers of attention and MLP beside a residual stream, norm, head, logits"
    result, axes = picture(alt, height=2.7)
    blank(axes, 100, 36)
    stream, branch = 10.0, 24.0
    axes.add_patch(Rectangle((28, 0.5), 46, 32.5, fill=False, edgecolor=GRAY, linestyle="--"))
    axes.text(29, 30.5, f"one of L = {config.n_layers} layers", fontsize=8, color=DARK, va="center")
    for x, text in ((0.5, "token\nids"), (13, "embed"), (77, "norm"), (90.5, "head")):
        _box(axes, x, stream - 4, 9, 8, text)
    for left, right in ((9.5, 13), (22, 77), (86, 90.5)):
        _arrow(axes, (left, stream), (right, stream))
    for x, text in ((32, "attention"), (54, "MLP")):
        _box(axes, x, branch - 3.5, 7.5, 7, "norm")
        _box(axes, x + 10, branch - 3.5, 9.5, 7, text)
        _arrow(axes, (x - 1.5, stream), (x - 1.5, branch), head=False)
        _arrow(axes, (x - 1.5, branch), (x, branch))
        _arrow(axes, (x + 7.5, branch), (x + 10, branch))
        axes.plot([x + 14.7, x + 14.7], [branch - 3.5, stream + 2.2], color=DARK, linewidth=1)
        axes.add_patch(Circle((x + 14.7, stream), 1.6, facecolor="white", edgecolor=DARK, zorder=3))
        axes.text(x + 14.7, stream - 0.1, "+", ha="center", va="center", fontsize=10, zorder=4)
    for x, text in ((5, "(B, T)"), (17.5, "(B, T, C)"), (51, "residual stream: (B, T, C) everywhere")):
        axes.text(x, stream - 5.6, text, ha="center", va="top", fontsize=8)
    axes.text(95, stream - 5.6, "logits\n(B, T, V)", ha="center", va="top", fontsize=8)
    return result


def attention_weights(weights: np.ndarray, pieces: Sequence[str]) -> Picture:
    """How much each token (a row) attends to each earlier one (a column). Each row of `weights` (T, T) sums to 1."""
    result, axes = picture(
        "attention weights as a lower triangle: a token sees itself and the tokens before", height=3.4
    )
    n = len(pieces)
    axes.imshow(weights, cmap="Greys", vmin=0, vmax=1)
    for row in range(n):
        for column in range(n):
            if column > row:
                axes.text(column, row, "·", ha="center", va="center", color=GRAY)
            else:
                shade = "white" if weights[row, column] > 0.5 else DARK
                text = f"{weights[row, column]:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=shade)
    axes.set_xticks(range(n), pieces, fontsize=8, rotation=30, ha="right")
    axes.set_yticks(range(n), pieces, fontsize=8)
    axes.set_xlabel("key: the token that is looked at")
    axes.set_ylabel("query: the token that looks")
    return result


def rotations(head_dim: int, theta: float, pairs: Sequence[int] = (0, 4, 8, 16)) -> Picture:
    """What RoPE does to some pairs of a head's numbers: each turns with the position, the first pair fastest."""
    positions = 8
    result, all_axes = picture("hands that turn by one angle a position, fast for the first pair, slowly for later ones", 1.9,
                               ncols=len(pairs))  # fmt: skip
    for axes, pair in zip(all_axes, pairs, strict=True):
        frequency = theta ** (-2 * pair / head_dim)
        axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
        axes.set_axis_off()
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=GRAY))
        for position in range(positions):
            x, y = math.cos(position * frequency), math.sin(position * frequency)
            axes.plot([0, x], [0, y], color=str(0.75 - 0.75 * position / (positions - 1)), linewidth=1.4)
            # 0.18 radians: the number of a hand nearer to the first one would lie on that one's.
            apart = position == 0 or frequency * position > 0.18
            if apart and position in (0, 1, 2, 3, positions - 1):
                axes.text(1.2 * x, 1.2 * y, str(position), fontsize=8, ha="center", va="center")
        turn = 2 * math.pi / frequency
        axes.set_title(f"pair {pair}: a full turn\nin {turn:,.0f} positions", fontsize=8)
    return result


def filters(p: Mapping[str, Sequence[float]], tokens: Sequence[str]) -> Picture:
    """One distribution over a few tokens under several samplers. `p` has a row of probabilities for each sampler."""
    result, all_axes = picture("bars of one distribution under several samplers", height=2.3, ncols=len(p), sharey=True)
    for axes, (name, row) in zip(all_axes, p.items(), strict=True):
        bars = axes.bar(range(len(row)), row, color=BLUE, edgecolor=DARK, linewidth=0.6)
        for bar, value in zip(bars, row, strict=True):
            label = f"{value:.2f}" if value else "0"
            axes.text(bar.get_x() + bar.get_width() / 2, value + 0.02, label, ha="center", fontsize=6.5)
        axes.set_xticks(range(len(row)), tokens, fontsize=7, rotation=40)
        axes.set_title(name, fontsize=8)
        axes.set_ylim(0, 1.12)
        plain(axes)
    all_axes[0].set_ylabel("probability")
    return result


def triangle(prompt: int, new: int) -> Picture:
    """Which tokens each pass of naive generation runs: new ones dark, those that have been run before pale."""
    processed = sum(range(prompt, prompt + new))
    distinct = prompt + new - 1
    alt = f"{new} passes over {prompt} to {distinct} tokens: {processed} token passes, {processed - distinct} of them repeated"
    result, axes = picture(alt, height=0.5 + 0.34 * new)
    blank(axes, distinct + 9.5, new + 1.6)
    for row in range(new):
        y = new - 1 - row
        for column in range(prompt + row):
            fresh = row == 0 or column == prompt + row - 1
            style = {"facecolor": DARK} if fresh else {"facecolor": PALE, "hatch": "////", "linewidth": 0.3}
            axes.add_patch(Rectangle((4.1 + column, y + 0.1), 0.88, 0.8, edgecolor=GRAY, **style))
        axes.text(3.8, y + 0.5, f"pass {row + 1}", ha="right", va="center", fontsize=8)
        axes.text(4.4 + prompt + row, y + 0.5, f"gives token {prompt + row + 1}", va="center", fontsize=8)
    axes.text(4.1, new + 0.9, f"dark: run for the first time ({distinct} tokens)", fontsize=8, va="center")
    axes.text(
        4.1 + distinct / 2 + 1, new + 0.9, f"pale: run again ({processed - distinct} of {processed})",
        fontsize=8, va="center",
    )  # fmt: skip
    return result


def cost(config: ModelConfig) -> Picture:
    """FLOPs of naive generation against length, both logarithmic, and where the cubic term overtakes the square."""
    P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
    crossover = 3 * P / (4 * A * L)
    alt = f"FLOPs of naive generation of {config.name}: slope 2, from {crossover:,.0f} tokens on slope 3"
    result, axes = picture(alt, height=3.4)
    n = np.geomspace(16, 100_000, 200)
    linear, attention = P * n**2, 4 / 3 * A * L * n**3
    axes.plot(n, linear + attention, color=DARK, linewidth=2.2, label="naive: sum of both")
    axes.plot(n, linear, color=BLUE, linestyle="--", label="linear layers, P n²")
    axes.plot(n, attention, color=ORANGE, linestyle="-.", label="attention, 4/3 A L n³")
    axes.plot(crossover, P * crossover**2, "o", color=DARK, markerfacecolor="white", markersize=8, zorder=4)
    axes.annotate(f"n* = {crossover:,.0f} tokens", (crossover, P * crossover**2), xytext=(-8, 12),
                  textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    axes.axvline(config.max_positions, color=GRAY, linestyle=":")
    axes.text(config.max_positions * 1.06, linear[0] / 50, f"longest text of\n{config.name}", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="n, tokens generated from an empty prompt", ylabel="FLOP in total")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def step_times(title: str, stages: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]]) -> Picture:
    """Milliseconds that each new token took, by stage, beside what was predicted. Seconds in, the first token included."""
    result, axes = picture(f"milliseconds a token: {title}", height=2.9)
    looks = zip(DOTS, (ORANGE, BLUE, DARK, GRAY), LINES, strict=True)
    for (name, times), (marker, color, line) in zip(stages.items(), looks, strict=False):
        numbers = np.arange(1, len(times) + 1)
        axes.plot(numbers, 1e3 * np.asarray(times), marker, color=color, markersize=4.5, label=f"{name}, measured")
        if name in predicted:
            axes.plot(
                numbers, 1e3 * np.asarray(predicted[name]), line, color=color, linewidth=1.2, label=f"{name}, predicted"
            )
    axes.set(
        xlabel="number of the new token",
        ylabel="ms",
        ylim=(0, 1.4 * max(map(max, [*stages.values(), *predicted.values()])) * 1e3),
    )
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    plain(axes)
    return result


def roofline(title: str, stages: Mapping[str, Sequence[Position]], ceilings: Ceilings) -> Picture:
    """The roofline of one device with the phases of some stages on it, arrows from each stage to the next."""
    result, axes = picture(f"roofline: {title}", height=4.4)
    draw_roofline(axes, stages, ceilings)
    axes.set_title(title, fontsize=9)
    return result


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.8", "facecolor": PALE, "edgecolor": DARK, "linewidth": 0.9}
    axes.add_patch(FancyBboxPatch((x, y), width, height, **style))  # type: ignore[arg-type]
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], head: bool = True) -> None:
    style = {"arrowstyle": "->" if head else "-", "color": DARK, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
