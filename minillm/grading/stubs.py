"""From a chapter's `solution.py` to what the learner gets: `exercise.py` and `notebook.ipynb`, and the digests of the graders.

A solution is a Python script in jupytext's percent format; cells tagged `active-ipynb` are for the notebook alone. What the
learner has to write stands between two marks, the first of which says what to do; in the stub it becomes the message of an
exception:

    # BEGIN SOLUTION: Return the seconds from the sending of the request to its first token.
    return tokens[0] - start
    # END SOLUTION
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from minillm.files import write_file
from minillm.grading import catalog, manifest

_REGION = re.compile(r"^( *)# BEGIN SOLUTION: (.+)\n(?:.*\n)*?\1# END SOLUTION\n", re.MULTILINE)
_CELL = re.compile(r"^# %%(?P<title>.*)\n(?P<body>(?:(?!# %%).*\n?)*)", re.MULTILINE)
LINE = 120  # characters, as ruff has it
SOURCES = ("mutants.py", "solution.py", "test_exercise.py")  # of a chapter: all else is made from them
# Of the clone that this package lies in: what is generated must fit its graders, wherever the command is given.
MANIFEST = Path(manifest.__file__)
EXERCISES = MANIFEST.parents[2] / "exercises"


def make_stub(solution: str) -> str:
    """The learner's file. Raises `ValueError` for marks without a partner."""
    stub = _REGION.sub(lambda match: _raise(match[1], match[2].strip()), solution)
    if "SOLUTION" in stub:
        raise ValueError("a BEGIN SOLUTION or END SOLUTION mark has no partner")
    kept = [match[0] for match in _CELL.finditer(stub) if "active-ipynb" not in match["title"]]
    return stub[: stub.index("# %%")] + "".join(kept).rstrip() + "\n"


def _raise(indent: str, sentence: str) -> str:
    text = json.dumps(sentence, ensure_ascii=False)
    line = f"{indent}raise NotImplementedError({text})\n"
    if len(line) <= LINE + 1:
        return line
    return f"{indent}raise NotImplementedError(\n{indent}    {text}\n{indent})\n"


def is_untouched(text: str, solution: Path, names: Iterable[str]) -> bool:
    """Whether the definitions of `names` in the learner's text are still the stub's. It is not parsed, only searched."""
    stub = _definitions(make_stub(solution.read_text("utf-8")))
    text = text.replace("\r\n", "\n")
    return all(stub[name] in text for name in names)


@cache
def _definitions(source: str) -> dict[str, str]:
    """The functions and classes at the top of a source text, by name."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(source, node) or "" for node in nodes}


def make_notebook(solution: str, chapter: str, exercises: Mapping[str, tuple[tuple[str, ...], int]], stub: bool) -> str:
    """The chapter's exercises as a notebook: a check after each cell that completes what an exercise needs.

    `exercises` gives the needs and points of each. The outputs are the verdicts on right answers, in the stub as well.
    """
    text = _REGION.sub(lambda match: _raise(match[1], match[2].strip()), solution) if stub else solution
    cells: list[dict[str, Any]] = []
    waiting = dict(exercises)
    defined: set[str] = set()
    for match in _CELL.finditer(text):
        title, body = match["title"], match["body"].strip("\n")
        if "[markdown]" in title or "active-ipynb" in title:  # commented out in the script
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.split("\n"))
        if "[markdown]" in title:
            cells.append(_markdown(body))
            continue
        tags = ["nbval-ignore-output"] if "nbval-ignore-output" in title else []
        cells.append(_code(body, tags=tags))
        defined |= {node.name for node in ast.parse(body).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for name, (needs, points) in list(waiting.items()):
            if defined.issuperset(needs):
                del waiting[name]
                verdict = f"{passed(f'{chapter}/{name}', points)}\n"
                cells.append(_code(f'check("{chapter}/{name}", {", ".join(needs)})', verdict))
    for number, cell in enumerate(cells):
        cell["id"] = f"{chapter}-{number:02d}"
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        cell["execution_count"] = number  # nbval compares the outputs of cells that were run
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def passed(name: str, points: int) -> str:
    """The verdict on a right answer."""
    return f"{name}: passed, {points} of {points} point{'s' if points != 1 else ''}."


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": "", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str, output: str = "", tags: list[str] | None = None) -> dict[str, Any]:
    stream = [{"name": "stdout", "output_type": "stream", "text": [output]}] if output else []
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": "",
        "metadata": {"tags": tags} if tags else {},
        "outputs": stream,
        "source": text.splitlines(keepends=True),
    }


# --- writing them


def chapters(folder: Path) -> list[Path]:
    """The folders of the chapters that have a solution, in order."""
    return sorted(path.parent for path in folder.glob("ch[0-9][0-9]/solution.py"))


def generated(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every generated file, and what belongs in it."""
    for chapter in chapters(folder):
        solution = (chapter / "solution.py").read_text("utf-8")
        items = catalog.load_chapter(folder, chapter.name)
        exercises = {item.name: (item.needs, item.points) for item in items}
        yield chapter / "exercise.py", make_stub(solution)
        yield chapter / "notebook.ipynb", make_notebook(solution, chapter.name, exercises, stub=True)


def manifest_text(folder: Path) -> str:
    """The module `manifest.py`: the exercises with their points, and the digests of the files that must not change."""
    exercises = {
        chapter.name: {item.name: item.points for item in catalog.load_chapter(folder, chapter.name)}
        for chapter in chapters(folder)
    }
    files = [folder / "conftest.py"]
    for chapter in chapters(folder):
        files += [chapter / name for name in SOURCES]
    digests = {path.relative_to(folder).as_posix(): catalog.digest(path) for path in files}
    lines = ['"""Written by `python -m minillm.grading`: the exercises, and SHA-256 of the files that grade them."""\n']
    lines.append("EXERCISES: dict[str, dict[str, int]] = {")
    for chapter_name, points in exercises.items():
        lines.append(f'    "{chapter_name}": {{')
        lines += [f'        "{name}": {number},' for name, number in points.items()]
        lines.append("    },")
    lines += ["}\n", "DIGESTS: dict[str, str] = {"]
    lines += [f'    "{name}": "{value}",' for name, value in digests.items()]
    return "\n".join([*lines, "}"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write all generated files. One that differs, because someone filled it in, is kept unless --force is given."""
    parser = argparse.ArgumentParser(prog="python -m minillm.grading", description=main.__doc__)
    parser.add_argument("--force", action="store_true", help="overwrite what was filled in")
    args = parser.parse_args(argv)
    if not chapters(EXERCISES):
        print(f"No solutions in {EXERCISES}: run this in a clone of the course.", file=sys.stderr)
        return 1
    for path in (chapter / name for chapter in chapters(EXERCISES) for name in SOURCES):
        if not path.is_file():
            print(f"{path} is missing: a chapter of exercises is made from {', '.join(SOURCES)}.", file=sys.stderr)
            return 1
    status = 0
    for path, text in generated(EXERCISES):
        if path.is_file() and path.read_text("utf-8") != text and not args.force:
            print(f"Kept: {path} (--force overwrites it)", file=sys.stderr)
            status = 1
        else:
            write_file(path, text.encode())  # in place of a link, not through it: it may lead to the solutions
    MANIFEST.write_text(manifest_text(EXERCISES), "utf-8")
    return status
