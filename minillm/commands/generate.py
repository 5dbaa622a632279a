"""`minillm generate`: stream an answer, then the five numbers."""

import argparse

from minillm.checkpoint import load
from minillm.errors import UsageError
from minillm.metrics import summarize
from minillm.report import make_console, one_line
from minillm.sampling import Sampler
from minillm.stages import known_stage


def generate(args: argparse.Namespace) -> None:
    """Print the answer as it comes. Raises `UsageError` for a wrong command."""
    stage = known_stage(args.stage)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    if not args.prompt:
        raise UsageError("The prompt is empty: give the model something to continue.")
    model, tokenizer = load(args.model, args.device, args.dtype)
    prompt = tokenizer.chat(args.prompt) if args.chat else tokenizer.encode(args.prompt)
    stream = tokenizer.stream()
    model = stage.prepared(model)
    generation = stage.generate(
        model, prompt, args.max_new_tokens, sampler=sampler, stop_tokens=tokenizer.stop_tokens,
        on_token=lambda token: print(stream.push(token), end="", flush=True),
    )  # fmt: skip
    print(stream.flush(), flush=True)
    numbers = summarize(generation.times, args.price_per_hour)
    make_console().print(one_line(numbers, len(generation), args.price_per_hour), style="dim")
