"""Execute the chapters into notebooks/: `python chapters/build.py [00 01 ... faq side]`, or `make notebooks`.

A chapter is Markdown whose ```python blocks are the notebook's code cells. What could differ from one run to the next without
telling anything (times of execution, versions, random cell ids) is left out of the notebook, so its diffs are about content.
"""

import hashlib
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

CHAPTERS = Path(__file__).resolve().parent
NOTEBOOKS = CHAPTERS.parent / "notebooks"
CELL_TIMEOUT_S = 120
TIMED = "nbval-ignore-output"  # tag of a cell whose output holds times, or anything else that depends on the machine
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def chapter_paths() -> list[Path]:
    return sorted(CHAPTERS.glob("[0-9][0-9]-*.md"))


def page_paths() -> list[Path]:
    """All that become notebooks: the chapters, and the pages that have no number."""
    return [*chapter_paths(), CHAPTERS / "faq.md", CHAPTERS / "side-by-side.md"]


def notebook_path(chapter: Path) -> Path:
    return NOTEBOOKS / f"{chapter.stem}.ipynb"


def read_chapter(path: Path) -> NotebookNode:
    """The chapter as a notebook without outputs."""
    notebook = jupytext.read(path)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    seen: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell.source, seen)
        cell.metadata = {key: cell.metadata[key] for key in cell.metadata if key == "tags"}
    return notebook


def _cell_id(source: str, seen: set[str]) -> str:
    """A name that stays when other cells change: from the cell's source, counted up where two are alike."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    name, n = digest, 1
    while name in seen:
        n += 1
        name = f"{digest}-{n}"
    seen.add(name)
    return name


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells in a fresh kernel. Raises `CellExecutionError` at the first that fails or writes to stderr."""
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name=KERNEL["name"],
        record_timing=False,
        resources={"metadata": {"path": folder}},
    ).execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            if any(output.get("name") == "stderr" for output in cell.outputs):
                raise CellExecutionError(f"{cell.source}\nwrote to stderr", "Warning", cell.outputs[0].text)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream as one output: where a print was cut depends on timing."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main(names: list[str]) -> int:
    chapters = [path for path in page_paths() if not names or any(path.stem.startswith(name) for name in names)]
    if not chapters:
        print(f"No chapter starts with {' or '.join(names) or 'a number'}.", file=sys.stderr)
        return 2
    NOTEBOOKS.mkdir(exist_ok=True)
    for chapter in chapters:
        start = time.perf_counter()
        try:
            notebook = execute(read_chapter(chapter), NOTEBOOKS)
        except CellExecutionError as error:
            print(f"{chapter.name} fails in this cell:\n{error}", file=sys.stderr)
            return 1
        nbformat.write(notebook, notebook_path(chapter))
        print(f"{notebook_path(chapter).relative_to(CHAPTERS.parent)}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
