"""What all pictures of the book are made of, and that each chapter's functions say what they draw."""

import importlib
import inspect
import pkgutil
from io import BytesIO

import matplotlib.image
import pytest

from minillm import figures
from minillm.figures.picture import Picture, blank, picture, plain

MODULES = [info.name for info in pkgutil.iter_modules(figures.__path__) if info.name.startswith("ch")]


def test_picture_shows_itself_and_says_what_it_shows():
    figure, axes = picture("a line that rises", height=2.0)
    axes.plot([0, 1], [0, 1])
    image = matplotlib.image.imread(BytesIO(figure._repr_png_()))
    assert image.shape[:2] == (220, 792)
    assert repr(figure) == "[picture: a line that rises]"
    assert figure._repr_png_() == figure._repr_png_()


def test_blank_canvas_has_no_axes():
    _, axes = picture("nothing")
    blank(axes, 10, 4)
    assert not axes.axison
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 10), (0, 4))


def test_plain_axes_keep_the_two_lines_that_carry_a_scale():
    _, axes = picture("a line")
    plain(axes)
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["left", "bottom"]


@pytest.mark.parametrize("name", MODULES)
def test_functions_of_a_chapter_say_what_they_draw(name):
    module = importlib.import_module(f"minillm.figures.{name}")
    public = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    drawn = [f for f in public if not f.__name__.startswith("_")]
    assert drawn
    for function in drawn:
        assert function.__doc__, function.__name__
        assert function.__annotations__["return"] is Picture, function.__name__
