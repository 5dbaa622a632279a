"""`minillm tour`: every stage on one prompt, shown, and written as JSON and as a diagram."""

import argparse

from minillm.checkpoint import load
from minillm.errors import UsageError
from minillm.files import check_writable, write_json
from minillm.report import make_console
from minillm.roofline.hardware import datasheet_ceilings
from minillm.roofline.plot import save_roofline
from minillm.stages import STAGES, known_stage
from minillm.tour import PROMPT, run_tour


def tour(args: argparse.Namespace) -> None:
    """Run the tour and write its files. Raises `UsageError` for a wrong command, before a model is loaded where it can."""
    check_writable(args.json, args.plot)
    stages = list(STAGES) if args.stages is None else [name.strip() for name in args.stages.split(",")]
    for name in stages:
        known_stage(name)
    prompt = PROMPT if args.prompt is None else args.prompt
    if not prompt.strip():
        raise UsageError("The prompt is empty: give the model something to answer.")
    console = make_console()
    model, tokenizer = load(args.model, args.device, args.dtype)
    found = run_tour(
        model, tokenizer, console, stages=stages, prompt=prompt,
        max_new_tokens=args.max_new_tokens, price_per_hour=args.price_per_hour,
    )  # fmt: skip
    if args.json:
        write_json(args.json, found.as_json())
    if args.plot:
        title = f"{found.model}, {found.ceilings.dtype}, {found.prompt_tokens} prompt tokens"
        save_roofline(args.plot, found.positions(), found.ceilings, datasheet_ceilings(found.ceilings), title)
    for path in filter(None, (args.json, args.plot)):
        console.print(f"Written: {path}", markup=False)
