"""The pictures of chapter 0: each shows the numbers that it is given, read back from what was drawn."""

import numpy as np
import pytest
from matplotlib.text import Text
from picture_checks import (
    CPU,
    boxes,
    points,
    position,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch00
from minillm.figures.picture import BLUE
from minillm.roofline.hardware import known_hardware

H100 = known_hardware("h100-sxm").ceilings("bf16")
INTENSITIES = {"decode": 1, "a batch of 32": 31.5, "a long prefill": 1024}
LATENCIES = [0.5, 0.02, 0.04]
STAGES = {"kv_cache": [position("prefill", 10**9, 10**8), position("decode", 10**7, 2 * 10**7)]}
ALL = {
    "three_layers": lambda: ch00.three_layers(),
    "timeline": lambda: ch00.timeline(),
    "percentiles": lambda: ch00.percentiles(LATENCIES, {"P50": 0.04, "P99": 0.49, "mean": 0.19}),
    "roofline": lambda: ch00.roofline(H100, INTENSITIES),
    "batch": lambda: ch00.batch(
        [1, 4, 16, 64], {0: [1, 4, 16, 64], 4096: [1, 3, 6, 9]}, fits={0: 64, 4096: 16}, ridge=H100.ridge
    ),
    "limits": lambda: ch00.limits({"a small model": {"compute": 3e-7, "memory": 1e-4, "overhead": 2.9e-3}}),
    "measured_roofline": lambda: ch00.measured_roofline(STAGES, CPU, None),
}


def test_layers_lie_inside_each_other_with_the_runtime_in_the_middle():
    picture = ch00.three_layers()
    (axes,) = picture.axes
    tooling, infrastructure, runtime, chip = (box.get_bbox() for box in axes.patches)
    for outer, inner in ((tooling, infrastructure), (infrastructure, runtime)):
        assert outer.x0 < inner.x0 < inner.x1 < outer.x1
        assert outer.y0 < inner.y0 < inner.y1 < outer.y1
    assert chip.y1 < tooling.y0
    assert [text[:2] for text in words(picture) if text[1:2] == "."] == ["3.", "2.", "1."]


def test_timeline_measures_from_sending_to_the_first_token_and_between_two_tokens():
    (axes,) = ch00.timeline().axes
    at = {text.get_text(): text.get_position()[0] for text in axes.texts if text.get_text()}
    spans = {
        tuple(sorted((text.xy[0], text.xyann[0])))
        for text in axes.texts
        if not text.get_text() and text.xy[1] == text.xyann[1]
    }
    ttft, itl, end_to_end = (at["sent"], at["token 1"]), (at["token 3"], at["token 4"]), (at["sent"], at["token 7"])
    assert spans == {ttft, itl, end_to_end}
    (prefill,) = boxes(axes, BLUE)
    assert prefill.get_x() + prefill.get_width() == at["token 1"]


def test_percentiles_are_heights_over_sorted_latencies():
    picture = ch00.percentiles(LATENCIES, {"P50": 0.04, "mean": 0.19})
    (axes,) = picture.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([20, 40, 500])  # ms
    assert [line.get_ydata()[0] for line in axes.get_lines()] == pytest.approx([40, 190])
    assert words(picture) == ["P50: 40 ms", "mean: 190 ms"]


def test_named_intensities_stand_on_the_roof():
    picture = ch00.roofline(H100, INTENSITIES)
    (axes,) = picture.axes
    # 3.35 TB/s times the intensity, and right of the ridge of 295 FLOP/byte 989.4 TFLOP/s.
    np.testing.assert_allclose(points(axes), [(1, 3.35e12), (31.5, 31.5 * 3.35e12), (1024, 989.4e12)])
    assert {*INTENSITIES, "ridge: 295 FLOP/byte", "compute: 989 TFLOP/s", "bandwidth: 3.35 TB/s"} <= set(words(picture))


def test_batch_is_drawn_bold_only_where_it_fits():
    figure = ch00.batch([1, 4, 16, 64], {4096: [1, 3, 6, 9]}, fits={4096: 16}, ridge=295)
    bold = [line for line in figure.axes[0].lines if line.get_linewidth() > 2]
    assert [line.get_xydata().tolist() for line in bold] == [[[1, 1], [4, 3], [16, 6]]]


def test_limits_are_bars_in_milliseconds_and_the_longest_is_the_one_in_bold():
    figure = ch00.limits({"decode": {"compute": 1e-5, "memory": 4e-3, "overhead": 3e-3}})
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.01, 4, 3])
    assert words(figure) == ["10 us", "4 ms", "3 ms"]
    assert [text.get_text() for text in figure.findobj(Text) if text.get_weight() == "bold"] == ["4 ms"]


def test_measured_roofline_places_each_phase():
    picture = ch00.measured_roofline(STAGES, CPU, None)
    # Each at its intensity, and on the roof, where an undisturbed operator without overhead stands.
    np.testing.assert_allclose(points(picture.axes[0]), [(10, 100e9), (0.5, 10e9)])
    assert {"kv_cache prefill, 100%", "kv_cache decode, 100%"} <= set(words(picture))
