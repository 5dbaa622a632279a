"""The pictures of the book: drawn, the same bytes each time, as wide as a page, and said in words."""

import importlib
import inspect
import pkgutil
from io import BytesIO

import matplotlib.image
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from minillm import figures
from minillm.figures import ch00
from minillm.figures.picture import Picture, blank, picture, plain
from minillm.roofline.hardware import known_hardware

MODULES = [info.name for info in pkgutil.iter_modules(figures.__path__) if info.name.startswith("ch")]


def test_picture_shows_itself_and_says_what_it_shows():
    figure, axes = picture("a line that rises", height=2.0)
    axes.plot([0, 1], [0, 1])
    plain(axes)
    image = matplotlib.image.imread(BytesIO(figure._repr_png_()))
    assert image.shape[:2] == (220, 792)
    assert repr(figure) == "[picture: a line that rises]"
    assert figure._repr_png_() == figure._repr_png_()


def test_blank_canvas_has_no_axes():
    _, axes = picture("nothing")
    blank(axes, 10, 4)
    assert not axes.axison
    assert axes.get_xlim() == (0, 10)


@pytest.mark.parametrize("name", MODULES)
def test_functions_of_a_chapter_say_what_they_draw(name):
    module = importlib.import_module(f"minillm.figures.{name}")
    public = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    drawn = [f for f in public if not f.__name__.startswith("_")]
    assert drawn
    for function in drawn:
        assert function.__doc__, function.__name__
        assert function.__annotations__["return"] is Picture, function.__name__


H100 = known_hardware("h100-sxm").ceilings("bf16")
DRAWN = {
    "three_layers": lambda: ch00.three_layers(),
    "timeline": lambda: ch00.timeline(),
    "percentiles": lambda: ch00.percentiles([0.02, 0.04, 0.5], {"P50": 0.04, "P99": 0.49, "mean": 0.19}),
    "roofline": lambda: ch00.roofline(H100, {"decode": 1, "a batch of 32": 31.5, "a long prefill": 1024}),
    "batch": lambda: ch00.batch(
        [1, 4, 16, 64], {0: [1, 4, 16, 64], 4096: [1, 3, 6, 9]}, fits={0: 64, 4096: 16}, ridge=H100.ridge
    ),
    "limits": lambda: ch00.limits({"a small model": {"compute": 3e-7, "memory": 1e-4, "overhead": 2.9e-3}}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_all_words_of_a_picture_of_chapter_0_lie_on_it(name):
    figure = DRAWN[name]()
    figure.draw_without_rendering()
    page = figure.bbox.expanded(1.01, 1.01)
    words = [
        text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label) if text.get_text()
    ]
    assert words
    outside = [text.get_text() for text in words if not _inside(text.get_window_extent(), page)]
    assert not outside


def _inside(box: Bbox, page: Bbox) -> bool:
    return page.x0 <= box.x0 and page.y0 <= box.y0 and box.x1 <= page.x1 and box.y1 <= page.y1


def test_longest_limit_is_the_one_in_bold():
    figure = ch00.limits({"decode": {"compute": 1e-5, "memory": 4e-3, "overhead": 3e-3}})
    assert [text.get_text() for text in figure.findobj(Text) if text.get_weight() == "bold"] == ["4 ms"]


def test_batch_is_drawn_bold_only_where_it_fits():
    figure = ch00.batch([1, 4, 16, 64], {4096: [1, 3, 6, 9]}, fits={4096: 16}, ridge=295)
    bold = [line for line in figure.axes[0].lines if line.get_linewidth() > 2]
    assert [list(line.get_xdata()) for line in bold] == [[1, 4, 16]]
