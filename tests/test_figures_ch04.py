"""The pictures of chapter 4: each shows the numbers that it is given, read back from what was drawn."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from picture_checks import (
    CPU,
    boxes,
    lines,
    markers,
    points,
    position,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch04
from minillm.figures.picture import BLUE, ORANGE

SCHEDULES = {
    "static": [("a", "b"), ("a", None), ("c", "d")],
    "continuous": [("a", "b"), ("a", "c"), ("d",)],
}


PANELS = {
    "S = 64": {1: position("decode", 10**9, 2 * 10**9), 8: position("decode", 8 * 10**9, 3 * 10**9)},
    "S = 1,024": {1: position("decode", 10**9, 2 * 10**9), 8: position("decode", 8 * 10**9, 4 * 10**9)},
}
BATCHES = [1, 2, 4]
STEPS = {"S = 64": [0.1, 0.125, 0.16], "S = 1,024": [0.1, 0.2]}
MEASURED = {"S = 64": [0.2, 0.2, 0.2]}
ALL = {
    "padding": lambda: ch04.padding([5, 3, 7]),
    "packing": lambda: ch04.packing([1, 1, 5, 1], [6, 3, 0, 9]),
    "gantt": lambda: ch04.gantt(SCHEDULES),
    "throughput": lambda: ch04.throughput(BATCHES, STEPS, MEASURED, "a model on a machine"),
    "climb": lambda: ch04.climb(PANELS, [90, 4], [math.inf, 1], CPU),
    "knee": lambda: ch04.knee([1, 2, 4], {"median": [0.1, 0.1, 2], "P99": [0.2, 0.3, 5]}, [50, 100, 120], [1, 2, 0.5]),
    "spike": lambda: ch04.spike([0.05, 0.5, 0.06], [4, 404, 5], [4, 5, 5]),
}


@pytest.mark.parametrize("lengths", [[5, 3, 7], [2, 2], [1, 4]])
def test_padding_numbers_the_tokens_of_each_row_on_both_sides(lengths):
    picture = ch04.padding(lengths, new=2)
    (axes,) = picture.axes
    pads = sum(max(lengths) - length for length in lengths)
    assert len(boxes(axes, hatch="////")) == 2 * pads
    assert len(boxes(axes, BLUE)) == 2 * 2 * len(lengths)
    shown = sorted(int(text) for text in words(picture) if text.isdigit())
    assert shown == sorted(2 * [position for length in lengths for position in range(length + 2)])


def test_padding_puts_all_last_tokens_of_the_left_into_one_column():
    (axes,) = ch04.padding([5, 3, 7]).axes
    bold = [text.get_position()[0] for text in axes.texts if text.get_weight() == "bold"]
    right, left = sorted(bold)[:3], sorted(bold)[3:]
    assert len(set(right)) == 3
    assert len(set(left)) == 1


def test_packing_shows_each_new_token_in_the_row_and_in_its_slot():
    picture = ch04.packing([1, 1, 5, 1], [6, 3, 0, 9])
    (axes,) = picture.axes
    assert sorted(text for text in words(picture) if len(text) == 1) == sorted(2 * "ABCCCCCD")
    assert len(boxes(axes, hatch="....")) == 6 + 3 + 0 + 9
    assert any("(1, 8)" in text for text in words(picture))


def test_gantt_draws_every_row_step_once():
    static, continuous = ch04.gantt(SCHEDULES).axes
    assert sum(box.get_width() for box in static.patches) == 6
    assert sum(box.get_width() for box in continuous.patches) == 5
    (wasted,) = boxes(static, hatch="////")
    assert (wasted.get_x(), wasted.get_width(), round(wasted.get_y())) == (1, 1, 1)
    assert not boxes(continuous, hatch="////")
    assert static.get_title(loc="left") == "static: 3 steps, 5 of 6 row-steps used"
    assert continuous.get_title(loc="left") == "continuous: 3 steps, 5 of 5 row-steps used"
    assert static.get_xlim() == continuous.get_xlim()


def test_gantt_joins_the_steps_of_one_request_and_keeps_its_color_when_it_moves():
    (axes,) = ch04.gantt({"continuous": [("a", "b"), ("a", "b"), ("b",), ("b",)]}).axes
    assert sorted((box.get_x(), box.get_width()) for box in axes.patches) == [(0, 2), (0, 2), (2, 2)]
    assert len({to_hex(box.get_facecolor()) for box in axes.patches}) == 2


def test_throughput_is_that_of_all_users_and_of_each():
    everyone, each = ch04.throughput(BATCHES, STEPS, MEASURED, "title").axes
    np.testing.assert_allclose(lines(everyone)["S = 64, predicted"], [[1, 10], [2, 16], [4, 25]])
    np.testing.assert_allclose(lines(everyone)["S = 64, measured"], [[1, 5], [2, 10], [4, 20]])
    np.testing.assert_allclose(lines(each)["S = 64, predicted"], [[1, 10], [2, 8], [4, 6.25]])
    np.testing.assert_allclose(lines(each)["S = 64, measured"], [[1, 5], [2, 5], [4, 5]])
    np.testing.assert_allclose(lines(each)["S = 1,024, predicted"], [[1, 10], [2, 5]])
    assert "S = 1,024, measured" not in lines(each)


def test_climb_has_a_marker_a_batch_and_a_line_at_the_limit():
    picture = ch04.climb(PANELS, [90, 4], [math.inf, 1], CPU)
    for axes, (title, positions), limit in zip(picture.axes, PANELS.items(), (90, 4), strict=True):
        np.testing.assert_allclose(points(axes), [(p.cost.intensity, p.achieved) for p in positions.values()])
        assert axes.get_title() == title
        (dashed,) = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
        assert list(dashed.get_xdata()) == [limit, limit]
    hollow = [line.get_markerfacecolor() == "white" for line in markers(picture.axes[1])]
    assert hollow == [False, True]  # a batch of 8 does not fit there


def test_knee_shows_waiting_tokens_and_goodput_against_the_rate():
    waiting, tokens, good = ALL["knee"]().axes
    np.testing.assert_allclose(lines(waiting)["P99"], [[1, 0.2], [2, 0.3], [4, 5]])
    np.testing.assert_allclose(tokens.get_lines()[0].get_xydata(), [[1, 50], [2, 100], [4, 120]])
    np.testing.assert_allclose(lines(good)["goodput"], [[1, 1], [2, 2], [4, 0.5]])
    np.testing.assert_allclose(lines(good)["all that come"], [[0, 0], [4, 4]])


def test_spike_marks_the_steps_that_hold_a_prompt():
    picture = ALL["spike"]()
    (axes,) = picture.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([50, 500, 60])
    assert [bar.get_height() for bar in boxes(axes, ORANGE)] == pytest.approx([500])
    assert words(picture) == ["404 tokens"]
