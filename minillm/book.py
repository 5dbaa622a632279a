"""What the chapters show with: the package's own source by name, and small tables. Both read as text anywhere.

In a notebook an object is shown by the richest form it has: Markdown where Jupyter asks for it, its `repr` elsewhere.
"""

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm.errors import UsageError


class Source:
    """Source of a piece of this package, under the name of its file."""

    def __init__(self, path: str, code: str) -> None:
        self.path, self.code = path, code

    def __repr__(self) -> str:
        return f"# {self.path}\n{self.code}"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self!r}\n```"


def show(thing: Any, *methods: str) -> Source:
    """The source of a module, class, function or property of this package, as it stands in its file.

    Of a class, `methods` picks some: the line that names it and only these. Raises `UsageError` for what has no source here.
    """
    target: Any = thing.fget if isinstance(thing, property) else thing
    try:
        target = inspect.unwrap(target)
        code = textwrap.dedent(inspect.getsource(target)).rstrip()
        path = Path(inspect.getsourcefile(target) or "").relative_to(Path(__file__).parent.parent)
        parts = [textwrap.indent(show(inspect.getattr_static(thing, name)).code, "    ") for name in methods]
    except (TypeError, OSError, ValueError, AttributeError):
        raise UsageError(f"{thing!r} has no source in this package: show a module, class or function of it.") from None
    if methods:
        head = code[: code.index("\n", code.index("class "))]  # decorators and the line that names the class
        code = "\n\n".join([f"{head}\n    ...", *parts])
    return Source(path.as_posix(), code)


class Table:
    """Rows of text under a line of column names; the first column stands left, the others right."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.rows = [[str(cell) for cell in row] for row in [columns, *rows]]
        if any(len(row) != len(columns) for row in self.rows):
            raise UsageError(f"Every row needs {len(columns)} cells, one a column.")

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in self.rows]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

    def _repr_markdown_(self) -> str:
        # Of what Markdown reads as its own, figures hold two: a bar parts cells, dollars enclose a formula. JupyterLab looks
        # for formulas once more in the finished page, where a backslash is gone and a tag still keeps two dollars apart.
        cells = [[cell.replace("|", "\\|").replace("$", "<span>\\$</span>") for cell in row] for row in self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        rule = "| :-- |" + " --: |" * (len(self.rows[0]) - 1)
        return "\n".join([lines[0], rule, *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of cells that are shown as they are: format numbers first. Raises `UsageError` for a row of another length."""
    return Table(columns, rows)
