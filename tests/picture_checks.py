"""What the tests of the chapters' pictures share: what is drawn on a picture, and what every picture must keep."""

from collections import Counter
from collections.abc import Callable
from io import BytesIO

import matplotlib.image
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minillm.figures.picture import Picture
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost, Operator
from minillm.roofline.position import Position

CPU = Ceilings("a CPU", "fp32", bandwidth=20e9, peak=100e9, overhead=0.0)


def position(phase: str, flops: int, moved: int, ceilings: Ceilings = CPU) -> Position:
    """A phase of one operator, where its prediction puts it."""
    return Position(phase, Cost(Counter({Operator("linear", "", flops, moved, 0, moved): 1})), ceilings)


def boxes(axes: Axes, color: str = "", hatch: str = "") -> list[Rectangle]:
    """Rectangles of this color, or of this hatching."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [p for p in found if (p.get_hatch() == hatch if hatch else to_hex(p.get_facecolor()) == color)]


def lines(axes: Axes) -> dict[str, np.ndarray]:
    """The points (N, 2) of each line, by its label."""
    return {str(line.get_label()): line.get_xydata() for line in axes.get_lines()}


def markers(axes: Axes) -> list[Line2D]:
    """The lines that have a marker, in the order in which they were drawn."""
    return [line for line in axes.get_lines() if line.get_marker() not in ("None", None, "")]


def points(axes: Axes) -> list[tuple[float, float]]:
    """Where the first point of each marker's line lies."""
    return [tuple(line.get_xydata()[0]) for line in markers(axes)]


def words(picture: Picture) -> list[str]:
    return [text.get_text() for axes in picture.axes for text in axes.texts]


def assert_a_page_wide_and_the_same_each_time(draw: Callable[[], Picture]) -> None:
    first, second = draw(), draw()
    assert first._repr_png_() == second._repr_png_()
    assert matplotlib.image.imread(BytesIO(first._repr_png_())).shape[1] == 792
    assert first.alt


# The tests that every file of pictures imports; conftest.py gives them each picture of its `ALL`.


def test_picture_is_a_page_wide_and_the_same_each_time(draw: Callable[[], Picture]) -> None:
    assert_a_page_wide_and_the_same_each_time(draw)


def test_text_is_large_enough_and_inside_the_picture(draw: Callable[[], Picture]) -> None:
    picture = draw()
    picture.draw_without_rendering()
    for axes in picture.axes:
        legend = axes.get_legend()
        labels = [axes.title, axes.xaxis.label, axes.yaxis.label, *(legend.get_texts() if legend else [])]
        for text in [*axes.texts, *labels]:
            if text.get_text():
                assert text.get_fontsize() >= 6.5, text.get_text()
                box = text.get_window_extent()
                assert box.x0 > -1 and box.x1 < 793, text.get_text()
                assert box.y0 > -1 and box.y1 < picture.bbox.height + 1, text.get_text()
