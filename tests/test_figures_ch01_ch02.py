"""The pictures of chapters 1 and 2: each shows the numbers that it is given, read back from what was drawn."""

import numpy as np
import pytest
from picture_checks import (
    CPU,
    boxes,
    lines,
    position,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.config import known_model
from minillm.figures import ch01, ch02
from minillm.figures.picture import BLUE, DARK, PALE

SMOLLM2 = known_model("smollm2-135m")
LLAMA_2_13B = known_model("llama-2-13b")


ALL = {
    "forward_pass": lambda: ch01.forward_pass(SMOLLM2),
    "attention_weights": lambda: ch01.attention_weights(np.tri(3) / np.arange(1, 4)[:, None], ["a", "b", "c"]),
    "rotations": lambda: ch01.rotations(64, 1e5),
    "filters": lambda: ch01.filters({"as it is": [0.5, 0.3, 0.2], "top-k 1": [1.0, 0.0, 0.0]}, ["a", "b", "c"]),
    "triangle": lambda: ch01.triangle(prompt=5, new=6),
    "cost": lambda: ch01.cost(SMOLLM2),
    "step_times": lambda: ch01.step_times("steps", {"naive": [0.1, 0.2, 0.3]}, {"naive": [0.1, 0.15, 0.2]}),
    "roofline": lambda: ch01.roofline("title", {"naive": [position("decode", 10**9, 10**8)]}, CPU),
    "phases": lambda: ch02.phases(prompt=5, new=6),
    "filling": lambda: ch02.filling(prompt=5, new=6),
    "masks": lambda: ch02.masks(),
    "memory": lambda: ch02.memory(LLAMA_2_13B, 819_200, (1, 8, 32), 80, "H100"),
    "speedup": lambda: ch02.speedup([16, 64, 256], {"CPU": [1.3, 3.5, 13], "GPU": [1.0, 1.0, 1.1]}),
}


@pytest.mark.parametrize(("prompt", "new"), [(5, 6), (1, 4), (3, 1)])
def test_triangle_has_a_square_for_every_token_that_is_run(prompt, new):
    picture = ch01.triangle(prompt, new)
    (axes,) = picture.axes
    processed, distinct = sum(range(prompt, prompt + new)), prompt + new - 1
    assert len(boxes(axes, DARK)) == distinct
    assert len(boxes(axes, PALE)) == processed - distinct
    assert f"gives token {prompt + new}" in words(picture)


def test_cost_marks_where_the_cubic_term_overtakes():
    picture = ch01.cost(SMOLLM2)
    (axes,) = picture.axes
    curves = lines(axes)
    linear, attention = curves["linear layers, P n²"], curves["attention, 4/3 A L n³"]
    n = linear[np.argmin(abs(np.log(linear[:, 1] / attention[:, 1]))), 0]
    assert n == pytest.approx(5837, rel=0.05)
    assert "n* = 5,837 tokens" in words(picture)
    np.testing.assert_allclose(curves["naive: sum of both"][:, 1], linear[:, 1] + attention[:, 1])


def test_rotations_name_the_turn_of_each_pair():
    picture = ch01.rotations(64, 1e5, pairs=(0, 16))
    assert [axes.get_title() for axes in picture.axes] == [
        "pair 0: a full turn\nin 6 positions",  # 2 pi
        "pair 16: a full turn\nin 1,987 positions",  # 2 pi sqrt(1e5)
    ]


def test_attention_weights_show_nothing_above_the_diagonal():
    weights = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.1, 0.2, 0.7]])
    shown = words(ch01.attention_weights(weights, ["a", "b", "c"]))
    assert shown == ["1.00", "·", "·", "0.25", "0.75", "·", "0.10", "0.20", "0.70"]


def test_filters_show_probabilities():
    picture = ch01.filters({"all": [0.5, 0.3, 0.2], "best": [1.0, 0.0, 0.0]}, ["a", "b", "c"])
    assert [axes.get_title() for axes in picture.axes] == ["all", "best"]
    assert [bar.get_height() for bar in picture.axes[1].patches] == [1.0, 0.0, 0.0]


def test_step_times_are_in_milliseconds_with_predictions_as_lines():
    (axes,) = ch01.step_times("t", {"naive": [0.1, 0.2], "kv_cache": [0.1, 0.03]}, {"naive": [0.1, 0.15]}).axes
    curves = lines(axes)
    np.testing.assert_allclose(curves["naive, measured"], [[1, 100], [2, 200]])
    np.testing.assert_allclose(curves["naive, predicted"], [[1, 100], [2, 150]])
    assert "kv_cache, predicted" not in curves
    assert axes.get_ylim()[1] > 200


def test_roofline_names_its_stages():
    stages = {"naive": [position("decode", 10**9, 10**8)], "kv_cache": [position("decode", 10**7, 2 * 10**7)]}
    shown = words(ch01.roofline("title", stages, CPU))
    assert any("naive decode" in text for text in shown)
    assert any("kv_cache decode" in text for text in shown)


@pytest.mark.parametrize(("prompt", "new"), [(5, 6), (1, 3)])
def test_phases_are_as_long_as_the_tokens_they_run(prompt, new):
    picture = ch02.phases(prompt, new)
    (axes,) = picture.axes
    repeated = sum(range(prompt, prompt + new)) - prompt - (new - 1)
    assert sum(box.get_width() for box in boxes(axes, PALE)) == pytest.approx(repeated)  # naive alone
    assert sum(box.get_width() for box in boxes(axes, DARK)) == pytest.approx(2 * (new - 1))
    assert sum(box.get_width() for box in boxes(axes, BLUE)) == pytest.approx(2 * prompt)


def test_filling_writes_each_slot_once_and_never_one_more():
    picture = ch02.filling(prompt=5, new=6)
    (axes,) = picture.axes
    written = boxes(axes, DARK)
    assert sorted(round(box.get_x()) for box in written) == sorted(round(4.6 + slot) for slot in range(10))
    assert "wrote 1, attends over 10" in words(picture)


def test_masks_show_which_keys_are_seen():
    square, lower_right, upper_left = ch02.masks(new=2, seen=4).axes
    assert len(boxes(square, BLUE)) == 21
    assert len(boxes(lower_right, BLUE)) == 5 + 6
    assert len(boxes(upper_left, BLUE)) == 1 + 2
    assert sorted(box.get_x() for box in boxes(upper_left, BLUE)) == [0, 0, 1]


def test_memory_lines_are_batch_times_context_times_bytes():
    (axes,) = ch02.memory(LLAMA_2_13B, 819_200, (1, 32), 80, "H100").axes
    for batch in (1, 32):
        line = lines(axes)[f"batch {batch}"]
        np.testing.assert_allclose(line[:, 1], batch * line[:, 0] * 819_200 / 1e9)
    heights = sorted(line.get_ydata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2)
    assert heights == pytest.approx([26.03, 80], abs=0.01)


def test_speedup_curves_differ_without_color():
    curves = {f"machine {i}": [1.0, 2.0 + i] for i in range(5)}
    (axes,) = ch02.speedup([64, 256], curves).axes
    drawn = [line for line in axes.get_lines() if str(line.get_label()).startswith("machine")]
    assert len({line.get_marker() for line in drawn}) == 5
    np.testing.assert_allclose(lines(axes)["machine 4"], [[64, 1], [256, 6]])
