"""The end of gpu.sh: `gpu_summary.py FOLDER PART=OUTCOME=SECONDS...` records the parts and prints what the tours found."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from minillm.files import write_json
from minillm.report import duration, make_console, make_table


def main(folder: Path, outcomes: list[str]) -> None:
    console = make_console()
    machine = json.loads((folder / "machine.json").read_text())
    parts = [outcome.split("=") for outcome in outcomes]
    machine["parts"] = [{"part": part, "outcome": how, "seconds": int(took)} for part, how, took in parts]
    write_json(str(folder / "machine.json"), machine)

    commit = machine["commit"][:12] if machine["commit"] else "unknown"
    changed = " with changes" if machine["dirty"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    console.print(f"{machine['machine']['device']}; {versions}; commit {commit}{changed}")
    show_tours(console, folder)
    for part, how, took in parts:
        console.print(f"{part}: {how} in {took} s")


def show_tours(console: Console, folder: Path) -> None:
    """One row for each stage and phase of every tour in the folder; a file that cannot be read is named."""
    table = make_table(
        "Tours", "model", "prompt", "stage", "phase", "predicted", "measured", "ratio", "of the roof", "limit"
    )
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            console.print(f"{path} cannot be read.")
            continue
        if "stages" in data:
            add_tour(table, data)
    if table.row_count:
        console.print(table)


def add_tour(table: Any, tour: dict[str, Any]) -> None:
    for stage in tour["stages"]:
        for phase in stage["phases"]:
            ratio = phase["measured_s"] / phase["predicted_s"]
            table.add_row(
                f"{tour['model']}, {tour['dtype']}", str(tour["prompt_tokens"]), stage["stage"], phase["phase"],
                duration(phase["predicted_s"]), duration(phase["measured_s"]), f"{ratio:.2f}",
                f"{phase['fraction_of_roofline']:.0%}", phase["bound"],
            )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
