"""The pictures of chapter 6: each shows the numbers that it is given, read back from what was drawn."""

from itertools import pairwise

import numpy as np
from picture_checks import (
    boxes,
    lines,
    markers,
    points,
    position,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch06
from minillm.figures.picture import BLUE, ORANGE
from minillm.roofline.position import Position

STEPS = [
    (["a", " b", "\n "], 2, "$x$"),
    ([], 0, "def"),
    (["c", "d", "e"], 3, "f"),
]
P, Q = [0.375, 0.3125, 0.1875, 0.125], [0.25, 0.125, 0.5, 0.125]
SPEEDUPS = {"alpha = 0.9": [1, 1.5, 1.75, 1.7], "alpha = 0.5": [1, 0.9, 0.8, 0.7]}
BEST = {"alpha = 0.9": [3, 2, 1], "alpha = 0.5": [1, 0, 0]}
MEASURED = {"fp32": {1: 1.0, 2: 1.3, 5: 1.5}, "bf16": {1: 1.0, 2: 1.0, 5: 1.1}}
PREDICTED = {"fp32": {1: 1.0, 2: 1.01, 5: 1.1}, "bf16": {1: 1.0, 2: 1.0, 5: 1.0}}


def pass_over(n: int) -> Position:
    return position("verify", n * 10**9, 2 * 10**9)


PANELS = {"on paper": {1: pass_over(1), 5: pass_over(5)}, "here": {1: pass_over(1), 2: pass_over(2), 9: pass_over(9)}}
GAINS = {"one layer": {1: 1.75, 8: 1.5, 64: 0.75}, "a small model": {1: 2, 8: 1.9, 64: 1.0}}
PUBLISHED = {"EAGLE": {2: 1.3, 32: 0.93}, "EAGLE-3": {2: 1.75, 56: 1.01}}
ALL = {
    "rounds": lambda: ch06.rounds(STEPS),
    "overlap": lambda: ch06.overlap(P, Q),
    "gain": lambda: ch06.gain(SPEEDUPS, [0.0, 0.1, 0.2], BEST, 0.1),
    "passes": lambda: ch06.passes(MEASURED, PREDICTED, "a model on a machine"),
    "shift": lambda: ch06.shift(PANELS),
    "temperature": lambda: ch06.temperature([0.0, 0.5, 1.0], {"draws": [0.9, 0.9, 0.9], "certain": [0.9, 0.6, 0.3]}),
    "batches": lambda: ch06.batches(GAINS, PUBLISHED),
}


def test_rounds_colors_what_was_accepted_the_own_token_and_what_was_refused():
    picture = ch06.rounds(STEPS)
    (axes,) = picture.axes
    assert len(boxes(axes, BLUE)) == 2 + 0 + 3
    assert len(boxes(axes, ORANGE)) == len(STEPS)
    assert len(boxes(axes, hatch="////")) == 1
    assert "3 rounds give 8 tokens" in picture.alt


def test_rounds_shows_tokens_in_the_order_in_which_they_come_and_refused_ones_last():
    (axes,) = ch06.rounds(STEPS).axes
    heights = sorted({box.get_y() for box in boxes(axes, ORANGE)}, reverse=True)
    from_the_left = sorted(axes.texts, key=lambda text: text.get_position()[0])
    shown = [[text.get_text() for text in from_the_left if y < text.get_position()[1] < y + 1] for y in heights]
    assert shown == [["1", "a", "·b", r"\$x\$", r"\n·"], ["2", "def"], ["3", "c", "d", "e", "f"]]


def test_boxes_of_a_round_do_not_overlap_and_hold_their_text():
    picture = ch06.rounds([(["a long token", " and", "\n        "], 1, " another")] * 3)
    picture.draw_without_rendering()
    (axes,) = picture.axes
    places = sorted((box.get_y(), box.get_x(), box.get_width()) for box in axes.patches)
    for (y, x, width), (other_y, other_x, _) in pairwise(places):
        assert y != other_y or x + width < other_x
    extents = [box.get_window_extent() for box in axes.patches]
    for text in axes.texts[1:]:
        if not text.get_text().isdigit():
            x0, x1 = text.get_window_extent().intervalx
            assert any(box.x0 <= x0 and x1 <= box.x1 for box in extents), text.get_text()


def test_overlap_stacks_both_laws_to_their_full_height():
    (axes,) = ch06.overlap(P, Q).axes
    shared, mine, theirs = ([bar.get_height() for bar in container] for container in axes.containers)
    np.testing.assert_allclose(shared, [0.25, 0.125, 0.1875, 0.125])
    np.testing.assert_allclose(np.add(shared, mine), P)
    np.testing.assert_allclose(np.add(shared, theirs), Q)
    assert "0.6875" in ch06.overlap(P, Q).alt


def test_gain_marks_the_best_lookahead_and_steps_where_it_changes():
    speed, best = ch06.gain(SPEEDUPS, [0.0, 0.1, 0.2], BEST, 0.1).axes
    np.testing.assert_allclose(lines(speed)["alpha = 0.9"], list(enumerate(SPEEDUPS["alpha = 0.9"])))
    assert points(speed) == [(2, 1.75), (0, 1)]
    np.testing.assert_allclose(lines(best)["alpha = 0.9"], [[0, 3], [0.1, 2], [0.2, 1]])
    assert {line.get_drawstyle() for line in best.get_lines()} == {"steps-post"}


def test_passes_sets_what_was_measured_beside_what_was_predicted():
    (axes,) = ALL["passes"]().axes
    drawn = lines(axes)
    np.testing.assert_allclose(drawn["fp32, measured"], list(MEASURED["fp32"].items()))
    np.testing.assert_allclose(drawn["bf16, predicted"], list(PREDICTED["bf16"].items()))
    np.testing.assert_allclose(drawn["n passes of one token"], [[1, 1], [2, 2], [5, 5]])


def test_shift_has_a_marker_a_length_and_decode_apart_from_the_others():
    picture = ch06.shift(PANELS)
    for axes, (title, positions) in zip(picture.axes, PANELS.items(), strict=True):
        np.testing.assert_allclose(points(axes), [(p.cost.intensity, p.achieved) for p in positions.values()])
        assert [line.get_marker() for line in markers(axes)] == ["D" if n == 1 else "o" for n in positions]
        assert axes.get_title() == title
    assert words(picture) == ["decode", "5 tokens", "ridge 5", "decode", "9 tokens", "ridge 5"]


def test_temperature_has_a_line_a_drafter():
    (axes,) = ALL["temperature"]().axes
    np.testing.assert_allclose(lines(axes)["certain"], [[0, 0.9], [0.5, 0.6], [1, 0.3]])


def test_batches_draws_predictions_as_lines_and_published_figures_as_markers():
    (axes,) = ch06.batches(GAINS, PUBLISHED).axes
    np.testing.assert_allclose(lines(axes)["one layer"], list(GAINS["one layer"].items()))
    np.testing.assert_allclose(lines(axes)["EAGLE-3"], list(PUBLISHED["EAGLE-3"].items()))
    styles = {str(line.get_label()): line.get_linestyle() for line in axes.get_lines()}
    assert styles["EAGLE"] == styles["EAGLE-3"] == "None"
    assert styles["one layer"] == "-"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "8", "64"]
