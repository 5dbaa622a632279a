"""The pictures of chapter 5: each shows the numbers that it is given, read back from what was drawn."""

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from picture_checks import (
    markers,
    points,
    position,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch05
from minillm.figures.picture import BLUE
from minillm.roofline.ceilings import Ceilings

BF16 = Ceilings("a GPU", "bf16", bandwidth=2e12, peak=400e12, overhead=0.0)
FP8 = Ceilings("a GPU", "fp8", bandwidth=2e12, peak=800e12, overhead=0.0)


STAGES = {
    "bf16": [position("decode", 10**9, 10**9, BF16), position("prefill", 10**12, 10**9, BF16)],
    "int4": [position("decode", 10**9, 3 * 10**8, BF16), position("prefill", 10**12, 3 * 10**8, BF16)],
    "fp8": [position("decode", 10**9, 5 * 10**8, FP8), position("prefill", 10**12, 5 * 10**8, FP8)],
}
WEIGHTS = [-0.4, -0.1, 0.05, 0.3]
VALUES = {"int8": [i / 100 for i in range(-127, 128)], "int4": [-0.4, -0.2, 0.0, 0.2, 0.9]}
ERRORS = {"g = 6": [0.1, 0.2, 0.0, 0.1, 0.3, 0.2], "g = 3": [0.1, 0.2, 0.0, 0.01, 0.02, 0.01]}
POINTS = {"int8": (8.0, 0.003), "its own grid": (5.0, 0.0001), "int4": (4.5, 0.26)}
SECONDS = {
    "predicted": {"bf16": [0.01, 0.01, 0.02], "int8": [0.005, 0.006, 0.02]},
    "measured": {"bf16": [0.02, 0.02, 0.03], "int8": [0.01, 0.03, 0.09]},
}
ALL = {
    "grids": lambda: ch05.grids(WEIGHTS, VALUES),
    "nibbles": lambda: ch05.nibbles([3, 12, 15, 0]),
    "outlier": lambda: ch05.outlier(ERRORS, at=2),
    "loss": lambda: ch05.loss(POINTS, hollow=["its own grid"]),
    "two_roofs": lambda: ch05.two_roofs(STAGES, BF16, FP8),
    "rows_of": lambda: ch05.rows_of(SECONDS, [1, 4, 16]),
}


def test_grids_show_each_weight_and_the_values_within_reach_of_them():
    (axes,) = ch05.grids(WEIGHTS, VALUES).axes
    (dots,) = markers(axes)
    assert list(dots.get_xdata()) == WEIGHTS
    int8, int4 = (c for c in axes.collections if isinstance(c, LineCollection))
    assert [segment[0][0] for segment in int4.get_segments()] == [-0.4, -0.2, 0.0, 0.2]  # 0.9 lies outside
    ticks = [segment[0][0] for segment in int8.get_segments()]
    np.testing.assert_allclose(ticks, np.arange(-42, 33) / 100)  # and a margin of 0.028 on both sides
    assert [label.get_text() for label in axes.get_yticklabels()] == ["weights", "int8", "int4"]


def test_nibbles_are_shown_as_codes_bits_and_bytes():
    picture = ch05.nibbles([3, 12, 15, 0])
    (axes,) = picture.axes
    shown = words(picture)
    assert [text for text in shown if text in ("3", "12", "15")] == ["3", "12", "15"]
    bits = [text.get_text() for text in axes.texts if text.get_position()[1] == 2.9 and text.get_text() != "bits"]
    assert "".join(bits) == "0011110011110000"
    assert [text for text in shown if "0x" in text] == ["3 x 16 + 12 = 60 = 0x3C", "15 x 16 + 0 = 240 = 0xF0"]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert sorted({box.get_width() for box in boxes}) == [1, 4, 8]


def test_outlier_draws_the_error_of_each_weight_on_one_scale():
    picture = ch05.outlier(ERRORS, at=2)
    for axes, (name, row) in zip(picture.axes, ERRORS.items(), strict=True):
        assert [bar.get_height() for bar in axes.patches] == row
        assert axes.get_title() == name
        (dashed,) = axes.get_lines()
        assert list(dashed.get_xdata()) == [2, 2]
    assert picture.axes[0].get_ylim() == picture.axes[1].get_ylim()


def test_loss_has_a_named_marker_a_scheme_and_hollow_ones_where_told():
    picture = ch05.loss(POINTS, hollow=["its own grid"])
    (axes,) = picture.axes
    assert points(axes) == list(POINTS.values())
    assert words(picture) == list(POINTS)
    assert [line.get_markerfacecolor() == "white" for line in markers(axes)] == [False, True, False]
    assert to_hex(markers(axes)[0].get_markerfacecolor()) == BLUE
    assert axes.get_yscale() == "log"


def test_two_roofs_place_both_phases_of_each_scheme_under_its_own_roof():
    picture = ch05.two_roofs(STAGES, BF16, FP8)
    (axes,) = picture.axes
    positions = [p for pair in STAGES.values() for p in pair]
    np.testing.assert_allclose(points(axes), [(p.cost.intensity, p.achieved) for p in positions])
    assert [line.get_markerfacecolor() == "white" for line in markers(axes)] == [True, False] * 3
    roofs = [line for line in axes.get_lines() if line.get_marker() == "None"]
    assert [max(line.get_ydata()) for line in roofs] == [BF16.peak, FP8.peak]
    assert words(picture) == ["bf16, 400 TFLOP/s", "fp8, 800 TFLOP/s"]
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == list(STAGES)


def test_rows_of_draws_milliseconds_of_each_scheme_in_each_panel():
    rows = [1, 4, 16]
    picture = ch05.rows_of(SECONDS, rows)
    for axes, (title, schemes) in zip(picture.axes, SECONDS.items(), strict=True):
        assert axes.get_title() == title
        for line, (name, times) in zip(markers(axes), schemes.items(), strict=True):
            assert line.get_label() == name
            np.testing.assert_allclose(line.get_xydata(), [(m, 1e3 * t) for m, t in zip(rows, times, strict=True)])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "16"]
