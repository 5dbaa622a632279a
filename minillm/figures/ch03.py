"""Pictures of chapter 3: heads that share, rows of one matrix, intensity, bytes a token, times over context, and latents."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.figures.picture import BLUE, DARK, DOTS, GRAY, LINES, ORANGE, Picture, blank, picture, plain
from minillm.latent_config import LatentConfig

KINDS = {"MHA": ("s", DARK), "GQA": ("o", BLUE), "MQA": ("^", ORANGE), "MLA": ("D", GRAY)}  # marker and color


class Model(NamedTuple):
    """A row of `bytes_per_token`: bytes of one cached token as stored, and with a key and value for each query head."""

    name: str
    kind: str  # one of KINDS
    stored: int
    expanded: int
    beyond_window: int | None = None  # bytes of one more token, once the sliding windows are full


def head_maps(n_heads: int, kv_heads: Sequence[int]) -> Picture:
    """Which KV head each query head reads, one panel for each number of KV heads."""
    alt = f"{n_heads} query heads on {', '.join(map(str, kv_heads))} KV heads: neighbours share one"
    result, all_axes = picture(alt, height=1.9, ncols=len(kv_heads))
    for axes, n_kv in zip(all_axes, kv_heads, strict=True):
        blank(axes, n_heads + 0.4, 4.6)
        group = n_heads // n_kv
        kind = "MHA" if group == 1 else "MQA" if n_kv == 1 else "GQA"
        for h in range(n_heads):
            center = (h // group + 0.5) * group + 0.2  # of the KV head, under the middle of its group
            axes.plot([h + 0.7, center], [3.0, 1.6], color=GRAY, linewidth=1)
            _square(axes, h + 0.3, 3.0, "white", str(h))
        for j in range(n_kv):
            _square(axes, (j + 0.5) * group - 0.2, 0.8, BLUE, str(j))
        axes.text(n_heads / 2 + 0.2, 0.1, f"Hkv = {n_kv}, G = {group}", ha="center", fontsize=8)
        axes.set_title(kind, fontsize=9)
    all_axes[0].text(0.2, 4.15, "query heads (white) on KV heads (blue)", fontsize=8)
    return result


def rows_of_one_matrix(group: int = 3, keys: int = 7) -> Picture:
    """A group's queries against copies of the keys, one copy each, and as rows of one matrix against one."""
    alt = f"left {group} queries each with a copy of the keys, right {group} rows of one matrix with the keys once"
    result, (left, right) = picture(alt, height=2.6, ncols=2)
    for axes in (left, right):
        blank(axes, keys + 6.5, 3.6 * group + 0.8)
    for g in range(group):
        y = 3.6 * (group - 1 - g) + 0.9
        _grid(left, 0.4, y + 0.5, 1, 3, DARK)
        _grid(left, 5.4, y - 0.4, 3, keys, BLUE)
        left.text(4.4, y + 1.0, "x", ha="center", va="center", fontsize=11)
        _grid(right, 0.4, 3.6 * group / 2 + group / 2 - g - 0.6, 1, 3, DARK)
    _grid(right, 5.4, 3.6 * group / 2 - 1.1, 3, keys, BLUE)
    right.text(4.4, 3.6 * group / 2 + 0.4, "x", ha="center", va="center", fontsize=11)
    left.set_title(f"{group} copies of the keys: loaded {group} times", fontsize=9)
    right.set_title(f"{group} rows of one matrix: keys loaded once", fontsize=9)
    return result


def intensity(
    cached: int, groups: Mapping[str, int], ridge: float, device: str, latent: tuple[str, float] | None = None
) -> Picture:
    """Attention in 16 bits: g S T / (S + g T) FLOP a byte, for T new tokens, the last of S; of a latent, a point at T = 1."""
    alt = (
        f"intensity of attention over {cached:,} tokens against new tokens, by group size, beside the ridge of {device}"
    )
    result, axes = picture(alt, height=3.3)
    T = np.geomspace(1, cached, 100)
    for i, (name, g) in enumerate(groups.items()):
        color = (DARK, BLUE, ORANGE, GRAY)[i % 4]
        axes.plot(T, g * cached * T / (cached + g * T), linestyle=LINES[i % 4], color=color, label=f"{name}, G = {g}")
        axes.plot(1, g * cached / (cached + g), "o", color=color, markersize=5)
    if latent is not None:
        axes.plot(1, latent[1], "D", color=DARK, markerfacecolor="white", markersize=7)
        axes.annotate(latent[0], (1, latent[1]), xytext=(9, 9), textcoords="offset points", fontsize=8)
    axes.axhline(ridge, color=GRAY, linewidth=0.9)
    axes.text(cached, ridge * 1.12, f"ridge of {device}, {ridge:.0f}", fontsize=8, ha="right")
    axes.set(
        xscale="log",
        yscale="log",
        ylabel="FLOP per byte",
        xlabel=f"T, new tokens of one pass, the last of S = {cached:,}",
    )
    axes.grid(True, color="0.92")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    plain(axes)
    return result


def bytes_per_token(models: Sequence[Model]) -> Picture:
    """Bytes of one cached token, 2 bytes a number, on a log scale; hollow: with a key and value for each query head."""
    alt = f"KV bytes a token of {len(models)} models, from {models[0].name} to {models[-1].name}"
    result, axes = picture(alt, height=0.9 + 0.26 * len(models))
    for y, model in enumerate(models):
        marker, color = KINDS[model.kind]
        axes.plot([model.stored, model.expanded], [y, y], color=GRAY, linewidth=0.9, zorder=1)
        axes.plot(model.expanded, y, marker, color=color, markerfacecolor="white", markersize=5)
        axes.plot(model.stored, y, marker, color=color, markersize=7)
        if model.beyond_window is not None:
            end = max(model.beyond_window, 1_600)  # 0 has no place on a log scale: it points at the edge
            arrow = {"arrowstyle": "->", "color": color, "linestyle": ":", "linewidth": 1}
            axes.annotate("", (end, y), (model.stored * 0.9, y), arrowprops=arrow)
    axes.set_yticks(range(len(models)), [f"{m.name}  {m.stored:,}" for m in models], fontsize=8)
    axes.set(xscale="log", xlim=(1_500, 8e6), xlabel="bytes a token (2 bytes a number)")
    axes.set_ylim(len(models) - 0.3, -0.8)
    for kind, (marker, color) in KINDS.items():
        if any(model.kind == kind for model in models):
            axes.plot([], [], marker, color=color, label=kind)
    axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=2, title="hollow: for each query head",
                title_fontsize=8)  # fmt: skip
    axes.grid(True, axis="x", color="0.92")
    axes.set_axisbelow(True)
    plain(axes)
    return result


Curves = Mapping[str, Sequence[float]]  # seconds by name, one for each context


def step_over_context(contexts: Sequence[int], panels: Mapping[str, tuple[Curves, Curves]]) -> Picture:
    """Milliseconds of a decode step against the tokens in the cache: a panel for each title, measured and predicted."""
    result, all_axes = picture(
        f"decode step over context, {' and '.join(panels)}", height=3.2, ncols=len(panels), squeeze=False
    )
    looks = list(zip(DOTS, (ORANGE, BLUE, DARK, GRAY), LINES, strict=True))
    for axes, (title, (measured, predicted)) in zip(all_axes[0], panels.items(), strict=True):
        for (name, seconds), (marker, color, line) in zip(measured.items(), looks, strict=False):
            axes.plot(contexts, 1e3 * np.asarray(seconds), marker, color=color, markersize=5, label=f"{name}, measured")
            if name in predicted:
                axes.plot(
                    contexts,
                    1e3 * np.asarray(predicted[name]),
                    line,
                    color=color,
                    linewidth=1.2,
                    label=f"{name}, predicted",
                )
        axes.set(xlabel="S, tokens in the cache", ylabel="ms a step")
        axes.set_ylim(0, 1.45e3 * max(map(max, [*measured.values(), *predicted.values()])))
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="upper left")
        plain(axes)
    return result


def latents(config: LatentConfig) -> Picture:
    """What latent attention keeps of a token, and the two ways to attend over it."""
    Hq, d_c, d_r = config.n_heads, config.kv_rank, config.head_dim
    alt = f"{config.name}: {d_c} + {d_r} numbers are kept; expanded for {Hq} heads, or absorbed"
    result, axes = picture(alt, height=3.3)
    blank(axes, 100, 46)
    _box(axes, 1, 20, 12, 8, f"token\nC = {config.d_model:,}", "white")
    _box(axes, 24, 26, 17, 8, f"latent c\n{d_c} numbers", BLUE)
    _box(axes, 24, 14, 17, 8, f"rotated key\n{d_r} numbers", BLUE)
    axes.add_patch(Rectangle((22, 12), 21, 24, fill=False, edgecolor=DARK, linestyle="--", linewidth=1))
    axes.text(32.5, 8.2, f"kept: {d_c + d_r} numbers\na layer, for all heads", ha="center", va="center", fontsize=8)
    expanded = f"expanded: keys {Hq} x ({config.d_nope} + {d_r}),\nvalues {Hq} x {config.d_v}"
    _box(axes, 60, 31, 38, 9, expanded + f" = {Hq * (config.d_qk + config.d_v):,} numbers", "white")
    _box(axes, 60, 8, 38, 9, f"absorbed: {Hq} queries of {d_c} + {d_r}\nagainst the {d_c + d_r} kept numbers", "white")
    axes.text(79, 42.5, "make keys and values for each head, as in MHA", ha="center", fontsize=8)
    axes.text(79, 4, "move the matrices to the query and the output", ha="center", fontsize=8)
    for start, end in (((13, 25), (24, 30)), ((13, 23), (24, 18)), ((43, 27), (60, 35)), ((43, 21), (60, 13))):
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=10, color=DARK, shrinkA=0, shrinkB=0)
        )
    return result


def latent_flops(config: LatentConfig, cached: int) -> Picture:
    """FLOPs of one head's attention against T, the last of S tokens, expanded and absorbed, and where they cross."""
    result, axes = picture(f"{config.name}: absorbed needs fewer FLOPs up to a chunk of some tokens", height=3.1)
    T = np.geomspace(1, cached, 200)
    up = 2 * config.kv_rank * (config.d_nope + config.d_v)
    expanded = 4 * config.d_qk * T * cached + up * cached
    absorbed = 4 * config.d_latent * T * cached + up * T
    crossing = up * cached / (4 * (config.d_latent - config.d_qk) * cached + up)
    axes.plot(T, expanded, "--", color=ORANGE, label="expanded: keys and values of all S tokens are made")
    axes.plot(T, absorbed, "-", color=BLUE, label="absorbed: queries and outputs of T tokens are multiplied")
    axes.plot(crossing, np.interp(crossing, T, absorbed), "o", color=DARK, markerfacecolor="white", markersize=8)
    axes.annotate(f"T = {crossing:.0f}", (crossing, np.interp(crossing, T, absorbed)), xytext=(10, -12),
                  textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set(
        xscale="log",
        yscale="log",
        ylabel="FLOP, one head and layer",
        xlabel=f"T, new tokens of one pass, the last of S = {cached:,}",
    )
    axes.grid(True, color="0.92")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    plain(axes)
    return result


def _square(axes: Axes, x: float, y: float, color: str, text: str) -> None:
    axes.add_patch(Rectangle((x, y), 0.8, 0.8, facecolor=color, edgecolor=DARK, linewidth=0.8))
    axes.text(x + 0.4, y + 0.38, text, ha="center", va="center", fontsize=7, color="white" if color == BLUE else DARK)


def _grid(axes: Axes, x: float, y: float, rows: int, columns: int, color: str) -> None:
    for row in range(rows):
        for column in range(columns):
            box = Rectangle((x + column, y + row), 0.92, 0.88, facecolor=color, edgecolor="white", linewidth=0.5)
            axes.add_patch(box)


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=DARK, linewidth=0.9))
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color="white" if color == BLUE else DARK,
    )
