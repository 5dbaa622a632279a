"""The book: every notebook is what its chapter gives, runs anywhere, and says nothing that its cells do not show."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

import minillm
from minillm.book import show, table
from minillm.commands.parser import make_parser
from minillm.errors import UsageError
from minillm.roofline.ceilings import Ceilings
from minillm.stages import kv_cache, naive, static_batching

ROOT = Path(__file__).parent.parent
NOTEBOOK_LIMIT_S = 240  # each is to take under 2 minutes on 2 idle cores; the tests may share them
SECTIONS = [
    "The question",
    "The idea",
    "The prediction",
    "The code",
    "The run",
    "On the roofline",
    "Where it loses",
    "In production engines",
    "Ledger",
    "Exercises",
]
LEDGER = ["Invariant", "Hypothesis", "Wins", "Loses", "Fallback", "Benchmark trap"]


def load_build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", ROOT / "chapters" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build_script()
CHAPTERS, PAGES = build.chapter_paths(), build.page_paths()
FAQ = ROOT / "chapters" / "faq.md"
every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
every_page = pytest.mark.parametrize("chapter", PAGES, ids=lambda path: path.stem)


def read_notebook(chapter: Path) -> NotebookNode:
    return nbformat.read(build.notebook_path(chapter), as_version=4)


def prose(chapter: Path) -> str:
    """The chapter without its code cells."""
    return "\n\n".join(cell.source for cell in build.read_chapter(chapter).cells if cell.cell_type == "markdown")


def sections(page: Path) -> list[str]:
    """The names by which a code host links to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def texts(cell: NotebookNode) -> list[str]:
    """All text that a code cell put out."""
    found = [output.get("text", "") for output in cell.outputs]
    return found + [text for output in cell.outputs for kind, text in output.get("data", {}).items() if "text/" in kind]


# --- notebooks --------------------------------------------------------------------------------------------------------


def test_notebooks_are_those_of_the_chapters():
    assert sorted((ROOT / "notebooks").glob("*.ipynb")) == [build.notebook_path(page) for page in PAGES]


@every_page
def test_notebook_has_the_cells_of_its_chapter(chapter):
    def cells(notebook: NotebookNode) -> list[Any]:
        return [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]

    assert cells(read_notebook(chapter)) == cells(build.read_chapter(chapter)), "run `make notebooks`"


@every_page
def test_notebook_ran_whole_in_order_and_without_error(chapter):
    code = [cell for cell in read_notebook(chapter).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


@every_page
def test_notebook_holds_nothing_that_changes_by_itself(chapter):
    notebook = read_notebook(chapter)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
    assert {tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])} <= {build.TIMED}


@every_page
def test_code_gives_the_outputs_of_the_notebook(chapter, tmp_path):
    """In another folder and under another kernel's name. Cells tagged as timed only have to run."""
    kernel = tmp_path / "jupyter" / "kernels" / "another-name"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Another", "language": "python"}))
    shutil.copy(build.notebook_path(chapter), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",  # cells have an order, also where tests have none
        "--nbval",
        "--nbval-kernel-name=another-name",
    ]
    run = subprocess.run(
        [*command, f"{chapter.stem}.ipynb"], cwd=tmp_path, env=os.environ | {"JUPYTER_PATH": str(tmp_path / "jupyter")},
        capture_output=True, text=True, timeout=NOTEBOOK_LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, f"run `make notebooks` and look at what changed:\n{run.stdout[-6000:]}"


def test_notebook_without_model_and_network_shows_one_sentence(tmp_path, monkeypatch):
    for name, value in {"MINILLM_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    cell = nbformat.v4.new_code_cell('import minillm\nmodel, tokenizer = minillm.load("smollm2-135m")')
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(build.CellExecutionError):
        build.execute(notebook, tmp_path)
    (error,) = [output for output in notebook.cells[0].outputs if output.output_type == "error"]
    assert len(error.traceback) == 1
    assert error.traceback[0].startswith("MinillmError: ")
    assert "\n" not in error.traceback[0]


def test_cell_keeps_its_id_when_others_change(tmp_path):
    def ids(text: str) -> list[str]:
        (tmp_path / "chapter.md").write_text(text)
        return [cell.id for cell in build.read_chapter(tmp_path / "chapter.md").cells]

    first = ids("# A\n\n```python\n1\n```\n\n```python\n1\n```\n")
    assert len(set(first)) == 3
    assert ids("# B\n\nnew\n\n```python\n1\n```\n\n```python\n1\n```\n")[1:] == first[1:]


# --- text -------------------------------------------------------------------------------------------------------------


def test_contents_list_the_chapters_in_order():
    contents = (ROOT / "chapters" / "README.md").read_text()
    assert re.findall(r"\]\((\d\d-[^)]+)\)", contents) == [chapter.name for chapter in CHAPTERS]


@every_chapter
def test_chapter_has_the_sections_in_order(chapter):
    headings = re.findall(r"^## (.+)$", prose(chapter), flags=re.MULTILINE)
    assert headings == SECTIONS


@every_chapter
def test_ledger_is_complete(chapter):
    ledger = prose(chapter).split("\n## Ledger\n")[1].split("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\.\*\*", ledger, flags=re.MULTILINE) == LEDGER


def test_questions_are_answered_in_short_then_by_a_cell_then_by_a_chapter():
    """Of the FAQ. A cell that shows nothing proves nothing."""
    questions = FAQ.read_text().split("\n### ")[1:]
    assert len(questions) >= 30
    for question in questions:
        title, _, answer = question.partition("\n")
        assert title.endswith("?"), title
        parts = r"\n\*\*In short\.\*\* .*?\n```python.*?\n```\n.*Read on: \[[^]]+\]\(\.\./chapters/"
        assert re.match(parts, answer, flags=re.DOTALL), title
    for cell in read_notebook(FAQ).cells:
        assert cell.cell_type == "markdown" or "".join(texts(cell)).strip(), cell.source


@every_page
def test_dollar_signs_in_prose_enclose_formulas(chapter):
    """Two of them in a paragraph would turn what stands between into a formula."""
    assert "$" not in re.sub(
        r"```.*?```|\$\$.*?\$\$|\$[^$\s][^$\n]*\$(?!\d)|`[^`]*`", "", prose(chapter), flags=re.DOTALL
    )


@every_page
def test_links_lead_somewhere(chapter):
    """From chapters/ and from notebooks/ alike, so each begins with ../ or names a section of its own page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(chapter)):
        if not target.startswith("https://"):
            assert target.startswith("../"), target
            path, _, section = target.partition("#")
            assert (ROOT / "chapters" / path).exists(), target
            if section:
                assert section in sections(ROOT / "chapters" / path), target


@every_page
def test_names_in_prose_exist(chapter):
    text = prose(chapter)
    for name in re.findall(r"`(minillm(?:\.\w+)+)(?:\([^`]*\))?`", text):
        thing: Any = minillm
        for i, part in enumerate(name.split(".")[1:], start=2):
            if not hasattr(thing, part):
                importlib.import_module(".".join(name.split(".")[:i]))
            thing = inspect.getattr_static(thing, part) if inspect.isclass(thing) else getattr(thing, part)
    for path in re.findall(r"`((?:minillm|chapters|notebooks|exercises|tests|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


@every_page
def test_commands_in_prose_are_understood(chapter):
    for command in re.findall(r"(?:^|`)minillm (\w[^`\n]*)", prose(chapter), flags=re.MULTILINE):
        make_parser().parse_args(shlex.split(command))


@every_chapter
def test_exercises_in_prose_exist(chapter):
    section = prose(chapter).split("\n## Exercises\n")[1]
    names = set(re.findall(r"`([a-z_]\w*)`", section))
    if names:
        code = (ROOT / "exercises" / f"ch{chapter.name[:2]}" / "exercise.py").read_text()
        assert names <= set(re.findall(r"^(?:def|class) (\w+)", code, flags=re.MULTILINE))


@every_page
def test_bold_figures_are_what_a_cell_gives(chapter):
    """A figure in bold is a result: it stands in the output of an exact cell, letter for letter."""
    exact = [
        c
        for c in read_notebook(chapter).cells
        if c.cell_type == "code" and build.TIMED not in c.metadata.get("tags", [])
    ]
    shown = "\n".join(text for cell in exact for text in texts(cell))
    for figure in re.findall(r"\*\*(\d[^*\n]*)\*\*", prose(chapter)):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", shown), f"{figure} is in no output"


# --- what the chapters show with --------------------------------------------------------------------------------------


def test_show_gives_source_under_the_name_of_its_file():
    assert repr(show(naive.causal_attention)).startswith("# minillm/stages/naive.py\ndef causal_attention(")
    assert show(naive).path == "minillm/stages/naive.py"
    assert show(naive).code == (ROOT / "minillm/stages/naive.py").read_text().rstrip()
    assert show(static_batching.generate).code.startswith("@torch.inference_mode()\ndef generate(")
    assert show(minillm.config.ModelConfig.matmul_params).code.startswith("@property\ndef matmul_params(self)")


def test_show_picks_methods_of_a_class():
    source = show(kv_cache.KVCache, "attend")
    assert source.code.startswith("class KVCache:\n    ...\n\n    def attend(self,")
    assert "def positions" not in source.code
    assert show(Ceilings, "ridge").code.startswith(
        "@dataclass(frozen=True)\nclass Ceilings:\n    ...\n\n    @property\n"
    )
    assert source._repr_markdown_() == f"```python\n{source!r}\n```"


@pytest.mark.parametrize("thing", [3, len, json.dumps, "naive"])
def test_show_refuses_what_is_not_in_the_package(thing):
    with pytest.raises(UsageError, match="has no source in this package"):
        show(thing)


def test_show_refuses_an_unknown_method():
    with pytest.raises(UsageError, match="has no source"):
        show(kv_cache.KVCache, "evict")


def test_table_reads_as_text_and_as_markdown():
    shown = table(["model", "GB"], [["a|b", 1.5], ["long name", "$10"]])
    assert repr(shown) == "model       GB\n---------  ---\na|b        1.5\nlong name  $10"
    assert (
        shown._repr_markdown_() == "| model | GB |\n| :-- | --: |\n| a\\|b | 1.5 |\n| long name | <span>\\$</span>10 |"
    )


def test_table_refuses_a_ragged_row():
    with pytest.raises(UsageError, match="2 cells"):
        table(["a", "b"], [["1"]])


def test_building_an_unknown_chapter_says_so(capsys):
    assert build.main(["99"]) == 2
    assert capsys.readouterr().err == "No chapter starts with 99.\n"
