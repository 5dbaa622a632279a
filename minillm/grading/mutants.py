"""Mutants: plausible wrong answers, each a small change to a solution, by which a grader is proven.

`exercises/chNN/mutants.py` lists them:

    Mutant("ttft", "Forgets that the clock does not begin at 0.", ("tokens[0] - start", "tokens[0]"))

A change that does not fit the solution exactly once is an error, so that no mutant is silently the solution itself.
"""

import ast
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path


class Mutant:
    """A wrong answer to one exercise: the sentence that names the mistake, and the changes (old, new) that make it.

    `code` is a whole definition in place of the solution's. `says` is what the grader's sentence must contain, where the grader
    can tell this mistake from others.
    """

    def __init__(self, exercise: str, mistake: str, *changes: tuple[str, str], code: str = "", says: str = "") -> None:
        self.exercise, self.mistake, self.changes, self.code, self.says = exercise, mistake, changes, code, says

    def __repr__(self) -> str:
        return f"{self.exercise}: {self.mistake}"

    def apply(self, solution: str, names: Iterable[str]) -> str:
        """The solution with its changes, all of which lie in the definitions of `names`. Raises `ValueError` otherwise."""
        tree = ast.parse(solution)
        if self.code:
            code = textwrap.dedent(self.code).strip("\n")
            defined = {getattr(node, "name", "") for node in ast.parse(code).body}
            if not defined & set(names):
                raise ValueError(f"{self!r}: its code defines none of {', '.join(names)}.")
            solution = f"{solution}\n\n{code}\n"
        starts = [0]
        for line in solution.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        spans = [
            (starts[node.lineno - 1], starts[node.end_lineno or node.lineno])
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in set(names)
        ]
        edits = []
        for old, new in self.changes:
            places = [i for start, end in spans for i in _places(solution, old, start, end)]
            if len(places) != 1:
                raise ValueError(f"{self!r}: {old!r} stands {len(places)} times in the solution, not once.")
            edits.append((places[0], old, new))
        for place, old, new in sorted(edits, reverse=True):
            solution = solution[:place] + new + solution[place + len(old) :]
        return solution


def changed(code: str, *changes: tuple[str, str]) -> str:
    """An answer of another build, with these changes (old, new). Raises `ValueError` where an old part is not there once."""
    for old, new in changes:
        if code.count(old) != 1:
            raise ValueError(f"{old!r} stands {code.count(old)} times in the answer, not once.")
        code = code.replace(old, new)
    return code


def _places(text: str, part: str, start: int, end: int) -> list[int]:
    found = []
    while (start := text.find(part, start, end)) >= 0:
        found.append(start)
        start += 1
    return found


def load_mutants(folder: Path, chapter: str) -> list[Mutant]:
    """The mutants of a chapter."""
    path = folder / chapter / "mutants.py"
    module = types.ModuleType(f"{chapter}_mutants")
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return list(module.MUTANTS)
