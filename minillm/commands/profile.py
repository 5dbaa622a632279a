"""`minillm profile`: where the time of a prefill and of a decode step goes, and what makes up the gap to the roofline."""

import argparse
import platform

import torch
from rich.markup import escape
from rich.table import Table

from minillm.checkpoint import load
from minillm.errors import UsageError
from minillm.files import check_writable, write_json
from minillm.model import Transformer
from minillm.report import duration, make_console, make_table
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.plot import si
from minillm.roofline.position import MAX_BATCH, MAX_CONTEXT, bound
from minillm.roofline.profile import Kind, PhaseProfile, describe, profile_step
from minillm.stages import known_stage
from minillm.stages.quantization import streamed_bytes
from minillm.values import check_whole

ROUNDS = 7


def profile(args: argparse.Namespace) -> None:
    """Print a table a phase. Raises `UsageError` for a wrong command, before anything runs where that can be told."""
    check_writable(args.json)
    stage = known_stage(args.stage)
    check_whole("context", args.context, 2, MAX_CONTEXT)
    check_whole("batch", args.batch, 1, MAX_BATCH)
    if stage.run is None:
        raise UsageError(
            f"What {args.stage} does depends on the tokens it finds, so it has no step to profile: see minillm tour."
        )
    model, _ = load(args.model, args.device, args.dtype)
    check_whole("context", args.context, 2, model.config.max_positions)
    model = stage.prepared(model)
    meter = CeilingMeter(model.device, model.dtype, streamed_bytes(model))
    profiles = profile_step(stage, model, meter, args.context, args.batch, ROUNDS)
    ceilings = meter.ceilings()

    console = make_console()
    for phase in profiles:
        title = _title(args.stage, model, phase.phase, args.context, args.batch)
        console.print(_table(escape(title), phase, ceilings))
        for sentence in findings(phase, ceilings):
            console.print(sentence, markup=False)
        console.print()
    console.print(
        f"[dim]{escape(ceilings.device)}, {ceilings.dtype}. Medians of {ROUNDS} runs; ceilings sampled between them: "
        f"{si(ceilings.bandwidth)}B/s, {si(ceilings.peak)}FLOP/s, {duration(ceilings.overhead)} overhead an operator.[/dim]"
    )
    if args.json:
        write_json(args.json, _as_json(args, model, profiles, ceilings))
        console.print(f"Written: {args.json}", markup=False)


def findings(phase: PhaseProfile, ceilings: Ceilings) -> list[str]:
    """What lies between operators, and one sentence for each kind of operator that makes up most of the gap to the roofline."""
    time, operators = duration(phase.undisturbed_s), duration(phase.operators_s)
    if phase.left_out_s > 0:
        rest = f"the other {duration(phase.left_out_s)} pass between them, in Python and in waiting"
    else:
        rest = f"{duration(-phase.left_out_s)} more than the whole without a clock on each"
    return [
        f"The {phase.phase} takes {time} undisturbed. Its operators, one by one, take {operators}: {rest}.",
        *(
            f"{describe(kind, phase.operators_s, ceilings)[:-1]}, {duration(kind.gap_s)} of the gap."
            for kind in phase.makers_of_the_gap()
        ),
    ]


def _title(stage: str, model: Transformer, phase: str, context: int, batch: int) -> str:
    what = f"prefill of {context} tokens" if phase == "prefill" else f"one decode step at context {context}"
    return f"{stage} on {model.config.name}: {what}, batch {batch}"


def _table(title: str, phase: PhaseProfile, ceilings: Ceilings) -> Table:
    table = make_table(title, "operator", "calls", "time", "share", "predicted", "ratio", "limit")
    for kind in phase.kinds:
        table.add_row(
            kind.name, str(kind.cost.n_operators), duration(kind.measured_s),
            f"{kind.measured_s / phase.operators_s:.1%}", duration(kind.predicted_s),
            f"{kind.measured_s / kind.predicted_s:.2f}", bound(kind.cost, ceilings),
        )  # fmt: skip
    table.add_section()
    calls, limit = str(phase.cost.n_operators), bound(phase.cost, ceilings)
    for name, seconds in (("all operators", phase.operators_s), ("undisturbed", phase.undisturbed_s)):
        share, ratio = f"{seconds / phase.operators_s:.1%}", f"{seconds / phase.predicted_s:.2f}"
        table.add_row(name, calls, duration(seconds), share, duration(phase.predicted_s), ratio, limit)
    return table


def _as_json(
    args: argparse.Namespace, model: Transformer, profiles: list[PhaseProfile], ceilings: Ceilings
) -> dict[str, object]:
    return {
        "model": model.config.name,
        "stage": args.stage,
        "batch": args.batch,
        "context": args.context,
        "device": str(model.device),
        "hardware": ceilings.device,
        "dtype": ceilings.dtype,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "ceilings": ceilings.as_json(),
        "phases": [
            {
                "phase": phase.phase,
                "predicted_s": phase.predicted_s,
                "operators_s": phase.operators_s,
                "undisturbed_s": phase.undisturbed_s,
                "bound": bound(phase.cost, ceilings),
                "operators": [_kind_as_json(kind, ceilings) for kind in phase.kinds],
                "findings": findings(phase, ceilings),
            }
            for phase in profiles
        ],
    }


def _kind_as_json(kind: Kind, ceilings: Ceilings) -> dict[str, object]:
    return {
        "operator": kind.name,
        "calls": kind.cost.n_operators,
        "flops": kind.cost.flops,
        "bytes": kind.cost.bytes,
        "measured_s": kind.measured_s,
        "predicted_s": kind.predicted_s,
        "bound": bound(kind.cost, ceilings),
    }
