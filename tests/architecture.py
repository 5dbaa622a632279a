"""The picture in ARCHITECTURE.md, drawn from the imports: `python tests/architecture.py` writes it anew.

Every import counts, also one inside a function; only those for a type checker do not, since they never run.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
# From the bottom to the top: a module imports from its own layer and from those below. A name stands for all that it contains.
LAYERS = {
    "core": [
        "errors", "files", "json_lines", "config", "latent_config", "device", "limits", "download", "model", "weights", "cpu",
        "sampling", "generation", "batch", "metrics", "values", "roofline.counting", "roofline.formulas",
    ],
    "loading": [
        "gguf_file", "checkpoint_config", "tokenizer_check", "template_worker", "chat_template", "text_stream", "tokenizer",
        "tokenizer_sources", "checkpoint", "__init__",
    ],
    "stages": ["stages"],
    "roofline": ["roofline"],
    "book": ["book", "side_by_side", "figures"],
    "tasks": ["report", "tour", "trace", "workload", "answer_file", "evaluation", "schemes", "doctor"],
    "commands": ["commands"],
    "grading": ["grading"],
    "cli": ["cli"],
}  # fmt: skip
LADDER = "stages.__init__"  # the table of all stages, above them


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name in it; a package's own module is called __init__."""
    package = ROOT / "minillm"
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


@cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports."""
    known = modules()
    return {name: _imported(ast.parse(path.read_text("utf-8")), known) - {name} for name, path in known.items()}


def _imported(tree: ast.AST, known: Iterable[str]) -> set[str]:
    found = set()
    for node in _run(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "minillm":
                # minillm.a.b is a module, a name in minillm/a.py, or one in minillm/a/__init__.py.
                places = [".".join(parts[1:]), ".".join(parts[1:-1]), ".".join([*parts[1:-1], "__init__"])]
                places.append(".".join([*parts[1:], "__init__"]))
                found.add(next(place for place in places if place in known))
    return found


def _run(tree: ast.AST) -> Iterable[ast.AST]:
    """All nodes but those that only a type checker sees."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _run(child)


def layer(module: str) -> str | None:
    """The layer that a module belongs to: by the longest of the names that contain it; None where there is none."""
    fitting = [
        (len(name), layer) for layer, names in LAYERS.items() for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(fitting, default=(0, None))[1]


@cache
def chapter(stage: str) -> int | None:
    """The chapter of a module of stages/, from the first words of its docstring; None where they do not say."""
    text = ast.get_docstring(ast.parse(modules()[stage].read_text("utf-8"))) or ""
    match = re.match(r"Chapter (\d+)\b", text)
    return int(match[1]) if match else None


def upward(graph: dict[str, set[str]]) -> list[str]:
    """The imports that lead from a module to a higher layer, each as a sentence."""
    order = [*LAYERS]
    return [
        f"{module} is in the layer {layer(module)} and imports {target}, which is above it, in {layer(target)}."
        for module, targets in graph.items()
        for target in sorted(targets)
        if order.index(layer(module) or "") < order.index(layer(target) or "")
    ]


def forward(graph: dict[str, set[str]]) -> list[str]:
    """The imports of stages from anything but the core, earlier chapters and their own, each as a sentence."""
    return [
        f"{stage} is of chapter {chapter(stage)} and imports {target}."
        for stage in graph
        if layer(stage) == "stages" and stage != LADDER
        for target in sorted(graph[stage])
        if layer(target) != "core" and not (layer(target) == "stages" and _at(target) <= _at(stage))
    ]


def _at(stage: str) -> float:
    return float("inf") if stage == LADDER else chapter(stage) or 0


def box(module: str) -> str:
    """Where the picture shows a module: with its layer, and a stage with its chapter."""
    if layer(module) != "stages":
        return layer(module) or module
    return "ladder" if module == LADDER else f"ch{chapter(module):02d}"


def arrows() -> list[tuple[str, str]]:
    """What imports what, in boxes. An arrow that a longer way replaces is left out."""
    edges: dict[str, set[str]] = {}
    for module, targets in imports().items():
        edges.setdefault(box(module), set()).update(box(target) for target in targets)
    for name, targets in edges.items():
        targets.discard(name)
    order = list(TopologicalSorter(edges).static_order())  # those that import nothing come first
    below: dict[str, set[str]] = {}  # all that can be reached
    kept = []
    for name in order:
        below[name] = set().union(edges[name], *(below[target] for target in edges[name]))
        kept += [(name, t) for t in edges[name] if not any(t in below[other] for other in edges[name] - {t})]
    return sorted(kept, key=lambda arrow: (order.index(arrow[0]), order.index(arrow[1])))


def picture() -> str:
    """The boxes and arrows as a Mermaid diagram."""
    inside: dict[str, list[str]] = {}
    for module in modules():
        inside.setdefault(box(module), []).append(_short(module))
    lines = ["flowchart TD"]
    for name in reversed(LAYERS):
        if name != "stages":
            lines.append(f"    {name}[{_label(name, inside[name])}]")
            continue
        chapters = sorted(key for key in inside if key.startswith("ch"))
        lines.append('    subgraph stages[" "]')
        lines.append('        ladder["<b>stages</b><br>the table of them all"]')
        lines += [f"        {key}[{_label(f'chapter {int(key[2:])}', inside[key])}]" for key in reversed(chapters)]
        lines.append("    end")
    lines += [f"    {source} --> {target}" for source, target in arrows()]
    return "\n".join(lines)


def _short(module: str) -> str:
    """A module's name in its box: without the package that the box is about, and another package as a whole."""
    package, _, name = module.rpartition(".")
    if package in ("", layer(module)):
        return name
    return module if module in LAYERS[layer(module) or ""] else f"{package}/"


def _label(title: str, names: list[str]) -> str:
    names = [name for name in dict.fromkeys(names) if name not in ("__init__", "__main__", title)]
    return f'"<b>{title}</b>{"<br>" if names else ""}{", ".join(names)}"'


def page_with(diagram: str) -> str:
    """The text of ARCHITECTURE.md with this diagram in place of the one that it has."""
    return re.sub(r"(?<=```mermaid\n).*?(?=```)", lambda _: f"{diagram}\n", PAGE.read_text("utf-8"), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with(picture()), "utf-8")
