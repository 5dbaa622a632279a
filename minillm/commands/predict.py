"""`minillm predict`: what a stage will take on any hardware, from its counts and the ceilings, without weights."""

import argparse

from minillm.commands.roofline import measured_ceilings
from minillm.config import known_model
from minillm.device import DTYPES, pick_device, pick_dtype
from minillm.errors import UsageError
from minillm.files import check_writable, write_json
from minillm.report import duration, make_console, predictions_table
from minillm.roofline.hardware import known_hardware
from minillm.roofline.plot import si
from minillm.roofline.position import meta_twin, predict_stage
from minillm.stages import known_stage
from minillm.stages.quantization import streamed_bytes


def predict(args: argparse.Namespace) -> None:
    """Print the prediction. `--hardware this` measures this machine; of others the datasheet is taken. Raises `UsageError`."""
    check_writable(args.json)
    config, stage = known_model(args.model), known_stage(args.stage)
    if args.hardware == "this":
        if args.overhead:
            raise UsageError("The overhead of this machine is measured: leave --overhead out.")
        device = pick_device()
        ceilings = measured_ceilings(device, pick_dtype(args.dtype, device))
    else:
        hardware = known_hardware(args.hardware)
        ceilings = hardware.ceilings(args.dtype or next(iter(hardware.tflops)), args.overhead * 1e-6)
    positions = predict_stage(stage, config, ceilings, args.context, args.batch)
    console = make_console()
    console.print(predictions_table(f"{args.model} on {ceilings.device}, {ceilings.dtype}", {args.stage: positions}))
    weights = streamed_bytes(stage.prepared(meta_twin(config, DTYPES[ceilings.dtype])))
    console.print(
        f"[dim]Batch {args.batch}; prefill of {args.context} tokens; decode is one step that attends over {args.context}, "
        f"and reads {si(weights)}B of weights. Ceilings ({ceilings.source}): {si(ceilings.bandwidth)}B/s, "
        f"{si(ceilings.peak)}FLOP/s, {duration(ceilings.overhead)} overhead an operator.[/dim]"
    )
    if args.json:
        names = {key: getattr(args, key) for key in ("model", "hardware", "stage", "batch", "context")}
        write_json(args.json, names | {"phases": [p.as_json() for p in positions]})
