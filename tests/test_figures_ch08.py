"""The pictures of chapter 8's first half: each shows the numbers that it is given, read back from what was drawn."""

import numpy as np
from matplotlib.patches import Rectangle
from picture_checks import (
    boxes,
    lines,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch08
from minillm.figures.picture import BLUE, ORANGE

DEVICE = [4.0, 1.0, 1.0, 9.0, 1.0]  # us
OVERHEADS = [0.1, 1.0, 10.0]
STEPS = {"8B": [4.5, 4.5, 9.0], "135M": [0.1, 0.6, 5.8]}
PARTS = {"eager": {"products": 3.0, "others": 5.0, "between": 1.0}, "compiled": {"products": 3.0, "others": 1.5}}
PROGRAMS = {"one layer": (5.0, 0.006), "slower": (2.0, 0.012)}
ALL = {
    "lanes": lambda: ch08.lanes(DEVICE, 5.0),
    "against_overhead": lambda: ch08.against_overhead(OVERHEADS, STEPS),
    "parts": lambda: ch08.parts(PARTS),
    "break_even": lambda: ch08.break_even(0.01, PROGRAMS),
    "splits": lambda: ch08.splits(3, 1000, 256),
}


def spans(rectangles: list[Rectangle]) -> list[tuple[float, float]]:
    return [(box.get_x(), box.get_x() + box.get_width()) for box in rectangles]


def test_operators_one_by_one_wait_for_the_host_and_for_each_other():
    one_by_one, _ = ch08.lanes(DEVICE, 5.0).axes
    assert spans(boxes(one_by_one, ORANGE)) == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 25)]
    # The fourth takes longer than a launch: the fifth has been handed over by then, and waits for the device.
    assert spans(boxes(one_by_one, BLUE)) == [(5, 9), (10, 11), (15, 16), (20, 29), (29, 30)]


def test_operators_handed_over_at_once_follow_each_other_without_a_gap():
    picture = ch08.lanes(DEVICE, 5.0)
    _, at_once = picture.axes
    assert spans(boxes(at_once, ORANGE)) == [(0, 5)]
    assert spans(boxes(at_once, BLUE)) == [(5, 9), (9, 10), (10, 11), (11, 20), (20, 21)]
    assert "after 30 us" in picture.alt and "after 21 us" in picture.alt


def test_against_overhead_draws_a_line_a_model():
    (axes,) = ch08.against_overhead(OVERHEADS, STEPS).axes
    for name, values in STEPS.items():
        np.testing.assert_allclose(lines(axes)[name], np.transpose([OVERHEADS, values]))


def test_parts_of_a_step_are_stacked_to_its_total():
    picture = ch08.parts(PARTS)
    (axes,) = picture.axes
    bars: dict[int, list[tuple[float, float]]] = {}
    for box in axes.patches:
        bars.setdefault(round(box.get_y() + box.get_height() / 2), []).extend(spans([box]))
    assert bars == {0: [(0, 3), (3, 8), (8, 9)], 1: [(0, 3), (3, 4.5)]}
    assert words(picture) == ["9", "4.5"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["products", "others", "between"]


def test_break_even_marks_where_a_program_has_paid_for_its_compilation():
    picture = ch08.break_even(0.01, PROGRAMS)
    (axes,) = picture.axes
    drawn = lines(axes)
    wait, step = PROGRAMS["one layer"]
    assert words(picture) == ["1,250"]  # 5 s / 4 ms
    (point,) = (line.get_xydata() for line in axes.get_lines() if line.get_marker() == ch08.DOTS[0])
    np.testing.assert_allclose(point, [[1250, 12.5]])
    most = drawn["eager"][-1, 0]
    assert most > 1250
    np.testing.assert_allclose(drawn["one layer"], [[0, wait], [most, wait + most * step]])
    np.testing.assert_allclose(drawn["slower"], [[0, 2.0], [most, 2.0 + most * 0.012]])


def test_break_even_says_so_where_no_program_pays():
    picture = ch08.break_even(0.01, {"slower": (2.0, 0.012)})
    assert words(picture) == []
    assert picture.alt == "no program is ever ahead of eager steps"


def test_splits_cover_each_row_once_and_the_last_one_is_shorter():
    picture = ch08.splits(3, 1000, 256)
    whole, cut = picture.axes
    assert len(whole.patches) == 3 and len(cut.patches) == 3 * 4
    rows = {}
    for box in cut.patches:
        rows.setdefault(round(box.get_y() - 0.08), []).extend(spans([box]))
    assert rows == {head: [(0, 256), (256, 512), (512, 768), (768, 1000)] for head in range(3)}
    assert "3 programs walk" in picture.alt and "12 programs walk" in picture.alt


def test_neighbours_among_splits_are_told_apart():
    (_, axes) = ch08.splits(2, 512, 256).axes
    faces = [(box.get_facecolor(), box.get_hatch()) for box in axes.patches]
    assert faces[0] != faces[1] and faces[0] != faces[2] and faces[0] == faces[3]
