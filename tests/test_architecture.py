"""The architecture: who may import whom, and the picture of who does."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import architecture
import pytest

ROOT = Path(__file__).parents[1]
GRAPH = architecture.imports()
PAGES = [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "chapters/README.md", "exercises/README.md")
]  # fmt: skip


def with_import(module: str, target: str) -> dict[str, set[str]]:
    """The imports of the package, and one more."""
    return GRAPH | {module: GRAPH[module] | {target}}


def test_every_module_has_a_layer_and_every_name_of_a_layer_a_module() -> None:
    without = [module for module in GRAPH if architecture.layer(module) is None]
    assert not without, "write into LAYERS of tests/architecture.py where they belong"
    names = [name for layer in architecture.LAYERS.values() for name in layer]
    assert [name for name in names if not any(f"{module}.".startswith(f"{name}.") for module in GRAPH)] == []


def test_every_stage_begins_with_its_chapter() -> None:
    stages = {name for name in GRAPH if architecture.layer(name) == "stages"}
    assert {name for name in stages if architecture.chapter(name) is None} == {architecture.LADDER}


def test_a_module_imports_from_its_own_layer_and_those_below() -> None:
    assert architecture.upward(GRAPH) == []


def test_a_stage_imports_only_from_earlier_stages_and_from_the_core() -> None:
    assert architecture.forward(GRAPH) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize(
    ("module", "target"), [("model", "stages.naive"), ("report", "cli"), ("roofline.counting", "tour")]
)
def test_an_import_from_above_is_found(module: str, target: str) -> None:
    [found] = architecture.upward(with_import(module, target))
    assert found.startswith(f"{module} ") and target in found


@pytest.mark.parametrize(
    "target", ["stages.speculative", "stages.__init__", "tokenizer", "roofline.ceilings", "report"]
)
def test_a_stage_that_looks_ahead_is_found(target: str) -> None:
    assert architecture.forward(with_import("stages.gqa", target)) == [
        f"stages.gqa is of chapter 3 and imports {target}."
    ]


def test_a_cycle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(with_import("errors", "config")).prepare()


def test_imports_of_every_form_are_found() -> None:
    text = """
import torch, minillm.model
from minillm import files
from minillm.stages import gqa as g, known_stage
from minillm.roofline.counting import count
if TYPE_CHECKING:
    from minillm.errors import MinillmError
def later():
    import minillm
"""
    assert architecture._imported(ast.parse(text), GRAPH) == {
        "model", "files", "stages.gqa", "stages.__init__", "roofline.counting", "__init__",
    }  # fmt: skip


def test_the_picture_is_the_one_of_the_imports() -> None:
    text = architecture.PAGE.read_text("utf-8")
    assert text == architecture.page_with(architecture.picture()), "run `python tests/architecture.py`"


def test_the_picture_shows_every_module_outside_a_package_and_no_arrow_that_others_replace() -> None:
    drawn = architecture.picture()
    for module in GRAPH:
        if "." not in module and module != "__init__":
            assert re.search(rf"\b{module}\b", drawn), module
    arrows = architecture.arrows()
    assert ("ch02", "ch01") in arrows
    assert ("ch03", "ch01") not in arrows  # gqa does import naive


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:minillm|chapters|notebooks|exercises|tests|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
