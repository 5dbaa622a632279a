"""Mutation testing: put one small fault after the other into a module (`mutations.py`) and see whether its tests notice.

    python tests/mutate.py                                            all modules of TESTS
    python tests/mutate.py --module sampling --module stages/gqa      some of them
    python tests/mutate.py --report tests/mutation_report.json        and write the counts down
    python tests/mutate.py --report tests/mutation_report.json --again       only what survived there, after a new test

A fault that no test notices has survived: a test is missing, or the fault changes nothing that can be seen, which
`mutation_equivalents.toml` then says and gives the reason for. Survivors without such a reason are printed as they are found.
`mutation_trials.py` says how a mutant is tried, and what is not.
"""

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from mutation_trials import Outcome, in_children, prepare, try_modules
from mutations import Mutant, does_nothing, mutants

ROOT = Path(__file__).parents[1]
EQUIVALENTS = ROOT / "tests" / "mutation_equivalents.toml"
LOOPS, KERNELS = "stages gqa model", "triton_kernels"
TESTS: dict[str, str] = {  # module of minillm: the files of its tests; modules of the same files are tried together
    "sampling": "sampling",
    "metrics": "metrics",
    "stages/__init__": LOOPS,
    "stages/naive": LOOPS,
    "stages/kv_cache": LOOPS,
    "stages/gqa": LOOPS,
    "stages/static_batching": "batching",
    "stages/slotted_cache": "batching",
    "stages/batching": "batching",
    "stages/quantizers": "quantization",
    "stages/quantized_linear": "quantization",
    "stages/quantization": "quantization",
    "stages/rollback": "speculative",
    "stages/drafters": "speculative",
    "stages/speculative": "speculative",
    "stages/speculative_gain": "speculative",
    "stages/mla": "mla",
    "stages/quantized_cache": "quantized_cache",
    "stages/static_cache": "static_cache kernels",
    "stages/kernels": "static_cache kernels",
    "stages/triton_kernels": KERNELS,
    "stages/triton_attention": KERNELS,
    "stages/triton_linear": KERNELS,
    "batch": "batching",
    "generation": LOOPS,
    "model": LOOPS,
    "trace": "trace",
    "workload": "workload",
    "roofline/counting": "counting formulas",
    "roofline/formulas": "counting formulas",
    "roofline/position": "position",
}
# Their kernels run in Triton's interpreter.
INTERPRETED = [module for module, tests in TESTS.items() if tests == KERNELS]


@dataclass(frozen=True)
class Excuse:
    """Why a mutant may survive: it changes nothing that can be seen, or only a GPU reaches it."""

    reason: str
    needs_gpu: bool


def equivalents(module: str) -> dict[tuple[str, str], Excuse]:
    """What `mutation_equivalents.toml` says of a module, by the line and the change of a mutant."""
    listed = tomllib.loads(EQUIVALENTS.read_text()).get(module, [])
    return {
        (entry["line"], change): Excuse(entry["reason"], entry.get("needs") == "gpu")
        for entry in listed
        for change in entry["changes"]
    }


def files_of(module: str) -> tuple[str, Path, list[Path]]:
    """The import name of a module of TESTS, its file, and the files of its tests."""
    name = f"minillm.{module.replace('/', '.')}".removesuffix(".__init__")
    tests = [ROOT / "tests" / f"test_{test}.py" for test in TESTS[module].split()]
    return name, ROOT / "minillm" / f"{module}.py", tests


def counts(outcome: Outcome, known: Mapping[tuple[str, str], Excuse]) -> dict[str, Any]:
    """A module's part of the report. The score leaves out what is equivalent, and what this machine cannot run."""
    surviving = [mutant for mutant in outcome.survivors if (mutant.line, mutant.change) not in known]
    needs_gpu = sum(known[name].needs_gpu for m in outcome.survivors if (name := (m.line, m.change)) in known)
    killed = len(outcome.killed)
    return {
        "mutants": len(outcome.found),
        "killed": killed,
        "killed_by_time": outcome.timeouts,
        "equivalent": len(outcome.survivors) - len(surviving) - needs_gpu,
        "needs_gpu": needs_gpu,
        "survived": len(surviving),
        "score": round(killed / max(killed + len(surviving), 1), 4),
        "survivors": [{"line": mutant.line, "change": mutant.change} for mutant in surviving],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--module", action="append", choices=list(TESTS), metavar="M", help="one of TESTS; several allowed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="children at once (2)")
    parser.add_argument("--seconds", type=float, default=20, help="of tests for each mutant, the shortest first (20)")
    parser.add_argument("--report", type=Path, help="a JSON file whose entries of these modules are replaced")
    parser.add_argument(
        "--again", action="store_true", help="try only what survived in the report, and what is excused"
    )
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    asked = options.module or list(TESTS)
    kinds = [[module for module in asked if (module in INTERPRETED) is kind] for kind in (False, True)]
    ends = in_children(lambda modules: try_kind(modules, options), filter(None, kinds), 1)
    return max(abs(status) for _, status in ends)


def try_kind(asked: Sequence[str], options: argparse.Namespace) -> int:
    """Try these modules, of which all are INTERPRETED or none is, and report. Returns the exit status of a process.

    Triton decides while it is imported whether it interprets, and PyTorch imports it: each kind has a process of its own.
    """
    os.environ["TRITON_INTERPRET"] = "1" if asked[0] in INTERPRETED else "0"
    prepare()
    out = os.dup(1)  # which children write to where pytest has closed theirs
    for files in dict.fromkeys(TESTS[module] for module in asked):
        together = [module for module in asked if TESTS[module] == files]
        start = time.perf_counter()
        try:
            rows = try_together(together, options, out)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return 1
        os.write(out, f"{', '.join(together)}: {time.perf_counter() - start:.0f} s\n".encode())
        for module, row in rows.items():
            kinds = ("mutants", "killed", "equivalent", "needs_gpu", "survived")
            print(f"{module}: {', '.join(f'{row[kind]} {kind}' for kind in kinds)}", flush=True)
            if options.report:
                write(options.report, module, row | {"seconds": options.seconds})
    return 0


def try_together(together: Sequence[str], options: argparse.Namespace, out: int) -> dict[str, dict[str, Any]]:
    """Rows of the report for modules of the same tests. Survivors without an excuse are written to the file `out`."""
    names = {files_of(module)[0]: module for module in together}
    known = {module: equivalents(module) for module in together}
    survived = survivors_of(options.report) if options.again else {}

    def announce(name: str, mutant: Mutant, note: str) -> None:
        if (mutant.line, mutant.change) not in known[names[name]]:
            told = f"{names[name]}:{mutant.number}: {mutant.line}\n    {mutant.change}{note and f'  ({note})'}\n"
            os.write(out, told.encode())

    def is_tried(name: str, mutant: Mutant) -> bool:
        module, change = names[name], (mutant.line, mutant.change)
        return module not in survived or change in known[module] or change in survived[module]

    paths = {name: files_of(module)[1] for name, module in names.items()}
    outcomes = try_modules(paths, files_of(together[0])[2], options.jobs, options.seconds, announce, is_tried)
    rows = {module: counts(outcomes[name], known[module]) for name, module in names.items()}
    for name, module in names.items():
        if module in survived:
            rows[module]["killed_by_time"] += json.loads(options.report.read_text())[module]["killed_by_time"]
        for mutant in outcomes[name].killed:
            if (mutant.line, mutant.change) in known[module]:
                note = f"listed as equivalent, but a test kills it: {mutant.change}"
                print(f"{module}:{mutant.number}: {note}", flush=True)
    return rows


def digest(source: str) -> str:
    """Of a module's code. Comments and texts that stand alone make no mutants: a report holds where only they change."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [child for child in body if not does_nothing(child)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def survivors_of(report: Path) -> dict[str, set[tuple[str, str]]]:
    """For each module whose mutants are those of the report, the line and the change of every survivor."""
    known = {}
    for module, row in json.loads(report.read_text()).items():
        source = files_of(module)[1].read_text()
        survivors = {(m["line"], m["change"]) for m in row["survivors"]}
        # A line has its comment in its name: after another comment a survivor would go for one that was killed.
        if row["source"] == digest(source) and survivors <= {(m.line, m.change) for m in mutants(source)}:
            known[module] = survivors
    return known


def write(report: Path, module: str, row: Mapping[str, Any]) -> None:
    """Put a module's counts into the report, with the commit and the day."""
    written = json.loads(report.read_text()) if report.exists() else {}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    written[module] = {
        "commit": commit,
        "date": date.today().isoformat(),
        "source": digest(files_of(module)[1].read_text()),
        **row,
    }
    report.write_text(json.dumps({key: written[key] for key in TESTS if key in written}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
