"""`minillm doctor`: what this machine can run, what is missing, and the command that mends it.

machine.py gathers facts; each check (checks.py, gpu_checks.py) is a function of these, and gives one line:

    ok        as it should be
    note      runs, and could do more: a GPU that is not used, no notebooks, a model not fetched yet
    missing   commands fail until it is mended; the exit status is 1
"""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from minillm.doctor import checks, gpu_checks
from minillm.doctor.finding import Finding
from minillm.doctor.machine import Machine, look
from minillm.errors import MinillmError

COLOURS = {"ok": "green", "note": "yellow", "missing": "red"}


def examine(console: Console) -> None:
    """Print a line for each check. Raises `MinillmError` where something is missing, so that the command exits with 1."""
    missing = []
    for finding in findings(look()):
        colour = COLOURS[finding.status]
        mark = f"[{colour}]{finding.status:<7}[/{colour}]"
        console.print(f"{mark}  [bold]{finding.part:<9}[/bold]  {escape(finding.words)}", soft_wrap=True)
        if finding.status == "missing":
            missing.append(finding.part)
    if missing:
        raise MinillmError(f"Commands will fail here: mend the lines that say missing ({', '.join(missing)}).")


def findings(machine: Machine) -> Iterator[Finding]:
    """All checks, from what everything needs to what few things do."""
    yield checks.python(machine)
    yield checks.pytorch(machine)
    yield checks.cores(machine)
    yield checks.fitting_models(machine.cpu, ("fp32", "bf16"))
    if not machine.gpus:
        yield gpu_checks.no_gpu(machine)
    for gpu in machine.gpus:
        yield gpu_checks.gpu_stages(machine, gpu)
        yield checks.fitting_models(gpu, (gpu.dtype,))
    yield checks.model_file(machine)
    yield checks.disk(machine)
    yield checks.notebooks(machine)
    yield checks.compiler(machine)
    yield checks.triton(machine)
