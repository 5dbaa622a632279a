"""A picture that a notebook shows by itself, without a plotting state that depends on how the kernel was started."""

from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.2  # inches: 792 pixels at this resolution, the width of a page on a code host
DPI = 110

# Told apart in black and white: by lightness, and where areas touch by hatching as well.
DARK, BLUE, ORANGE, GRAY, PALE = "#222222", "#1f6fb4", "#d9822b", "#8a8a8a", "#e6e6e6"
# The i-th curve of a picture has the i-th of each: no two look alike in black and white.
COLORS = (BLUE, ORANGE, DARK, GRAY)
LINES = ("-", "--", "-.", ":")
DOTS = "os^D"


class Picture(Figure):
    """A figure that shows itself as PNG, and as a sentence where there is no screen: `alt` says what it shows."""

    def __init__(self, alt: str, height: float = 3.2) -> None:
        super().__init__(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        self.alt = alt

    def __repr__(self) -> str:
        return f"[picture: {self.alt}]"

    def _repr_png_(self) -> bytes:
        stream = BytesIO()
        self.savefig(stream, format="png", metadata={"Software": None})  # the same bytes for the same picture
        return stream.getvalue()


def picture(alt: str, height: float = 3.2, **subplots: Any) -> tuple[Picture, Any]:
    """A picture and its axes; `subplots` as for `Figure.subplots`."""
    result = Picture(alt, height)
    return result, result.subplots(**subplots)


def plain(axes: Axes) -> None:
    """Leave only the two lines that carry a scale."""
    axes.spines[["top", "right"]].set_visible(False)


def blank(axes: Axes, width: float, height: float) -> None:
    """No scales at all: a canvas of width x height for a drawing."""
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
