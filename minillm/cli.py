"""The `minillm` command. An error is one sentence.

Exit status: 0 done, 1 the work failed, 2 the command was wrong, 130 stopped by Ctrl-C. The last is what shells say (128 + the
number of the signal), and it lets a script tell a user who stopped the command from work that failed.
"""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minillm.config import DEFAULT_MODEL
from minillm.errors import MinillmError, UsageError, printable

if TYPE_CHECKING:
    import torch

    from minillm.roofline.ceilings import Ceilings

PLOT_TYPES = (".png", ".svg", ".pdf")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = printable(message)
        self.exit(2, f"minillm: {message[:1].upper()}{message[1:]}: see {self.prog} --help.\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # the help text: an error must come now, not when Python has left `main`
        super().exit(status, message)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows another one
    try:
        args = _parser().parse_args(argv)
        with _own_warnings_as_sentences():
            args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(2, str(error))
    except MinillmError as error:
        return _fail(1, str(error))
    except KeyboardInterrupt as stop:
        return _fail(130, str(stop) or "Interrupted.")
    except BrokenPipeError:
        _discard_output()  # the reader left: nobody to tell
        return 1
    except OSError as error:
        _discard_output()
        return _fail(1, f"{error.filename or 'The output'} cannot be read or written: {error.strerror or error}.")
    except Exception as error:
        if os.environ.get("MINILLM_DEBUG"):
            raise
        if _is_out_of_memory(error):
            return _fail(1, "The device ran out of memory: use a smaller model or dtype, or fewer tokens.")
        summary = (str(error).splitlines() or ["it says no more"])[0].rstrip(".")
        return _fail(
            1, f"Unexpected {type(error).__name__}: {summary}; set MINILLM_DEBUG=1 to see where, and please report it."
        )
    return 0


@contextmanager
def _own_warnings_as_sentences() -> Iterator[None]:
    """Shows what this package warns of as it shows an error, without a line of source."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("minillm"):
                print(f"minillm: {message}", file=sys.stderr)
            else:
                show(message, category, *where, **more)

        warnings.showwarning = tell
        yield


def _is_out_of_memory(error: Exception) -> bool:
    """Told by name and words: PyTorch, whose errors these are, need not be loaded to ask. On a CPU it has no class for them."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _discard_output() -> None:
    """Send what is still buffered to nowhere, so that Python does not fail at it again on leaving."""
    with suppress(OSError):  # io.UnsupportedOperation, where the output is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(status: int, message: str) -> int:
    print(f"minillm: {printable(message)}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="minillm", description="Learn LLM inference engineering: run a stage, measure it, predict it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    tour = _command(commands, "tour", _tour, "every stage on one prompt: prediction, text, five numbers, roofline")
    _model_options(tour)
    tour.add_argument("--stages", metavar="A,B", help="stages to run, in this order (default: all)")
    tour.add_argument("--prompt", metavar="TEXT", help="what to ask the model")
    tour.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="tokens to generate (default: 48)")
    tour.add_argument("--price-per-hour", type=_price, default=1.0, metavar="USD", help="of the machine (default: 1)")
    tour.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    tour.add_argument("--plot", type=_plot_file, metavar="FILE", help="write the roofline diagram (.png, .svg or .pdf)")

    generate = _command(commands, "generate", _generate, "stream an answer, then the five numbers")
    generate.add_argument("prompt")
    _model_options(generate)
    generate.add_argument("--stage", default="kv_cache", metavar="S", help="stage to generate with (default: kv_cache)")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: 128)")
    _answer_options(generate)

    batch = _command(commands, "batch", _batch, "answer a file of prompts; stopped, it goes on where it was")
    batch.add_argument("file", metavar="FILE", help='JSON lines: {"prompt": TEXT, "id": ..., "max_new_tokens": N, ...}')
    batch.add_argument(
        "--out", metavar="ANSWERS", help="grows by a line an answer (default: FILE's name.answers.jsonl)"
    )
    _model_options(batch)
    batch.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    batch.add_argument("--max-batch", type=int, default=16, metavar="N", help="answered at a time (default: 16)")
    batch.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="an answer at most (default: 128)")
    _answer_options(batch)

    roofline = _command(commands, "roofline", _roofline, "measure this machine's ceilings, beside the datasheet")
    _device_options(roofline)
    roofline.add_argument("--json", metavar="FILE", help="write the ceilings as JSON")

    predict = _command(commands, "predict", _predict, "what a stage will take on any hardware, without weights")
    predict.add_argument("--model", required=True, metavar="M", help="a known model, such as llama-3-8b")
    predict.add_argument(
        "--hardware", required=True, metavar="H", help="such as h100-sxm, or `this` to measure this machine"
    )
    predict.add_argument("--stage", required=True, metavar="S", help="such as kv_cache")
    predict.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    predict.add_argument("--context", type=int, default=1024, metavar="C", help="tokens attended over (default: 1024)")
    predict.add_argument("--dtype", metavar="T", help="fp32, bf16 or fp16 (default: bf16 where the hardware has it)")
    predict.add_argument(
        "--overhead", type=_microseconds, default=0.0, metavar="US", help="microseconds an operator (default: 0)"
    )
    predict.add_argument("--json", metavar="FILE", help="write the prediction as JSON")

    profile = _command(
        commands, "profile", _profile, "where a prefill and a decode step spend their time, operator by operator"
    )
    profile.add_argument("stage", metavar="STAGE", help="such as kv_cache")
    _model_options(profile)
    profile.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    profile.add_argument("--context", type=int, default=256, metavar="C", help="tokens attended over (default: 256)")
    profile.add_argument("--json", metavar="FILE", help="write the profile as JSON")

    evaluate = _command(
        commands, "evaluate", _evaluate, "what quantization does to a model: bytes, perplexity, KL, agreement, speed"
    )
    _model_options(evaluate)
    evaluate.add_argument(
        "--schemes", metavar="A,B", help="of fp32, bf16, fp16, int8, int4, w8a8, fp8, int8_kv (default: most of them)"
    )
    evaluate.add_argument("--group-size", metavar="G,G", help="groups of int4, of 32, 64, 128 (default: 32,64)")
    evaluate.add_argument("--text", metavar="FILE", help="what to score on (default: prose that the package ships)")
    evaluate.add_argument("--tokens", type=int, default=512, metavar="N", help="of the text, at most (default: 512)")
    evaluate.add_argument("--json", metavar="FILE", help="write the table as JSON")

    grade = _command(
        commands, "grade", _grade, "the scorecard of the exercises: passed, failed, not attempted, not graded"
    )
    grade.add_argument("chapter", nargs="?", metavar="CHAPTER", help="such as ch01, or ch01/rope (default: all)")
    grade.add_argument(
        "--exercises", metavar="DIR", help="the exercises folder (default: here, above, or the package's)"
    )
    grade.add_argument("--solutions", action="store_true", help="grade the solutions in place of your files")
    grade.add_argument("--submissions", metavar="DIR", help="grade a folder of students' folders")
    grade.add_argument("--time-limit", type=_seconds, metavar="S", help="seconds an exercise may take (default: 30)")
    grade.add_argument("--json", metavar="FILE", help="write the scorecard as JSON; of submissions, one a student")
    grade.add_argument("--csv", metavar="FILE", help="write the points of submissions as CSV, a line a student")

    _command(commands, "doctor", _doctor, "what this machine can run, and what is missing")
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
    help: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
    command.set_defaults(run=run)
    return command


def _device_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", type=_device, metavar="D", help="cpu, cuda or, untested, mps (default: cuda where there is one)"
    )
    command.add_argument("--dtype", metavar="T", help="fp32, bf16 or fp16 (default: 16 bits on CUDA, else fp32)")


def _model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="M",
        help=f"a known name, a folder, a .gguf file, or random:NAME for random weights (default: {DEFAULT_MODEL})",
    )  # fmt: skip
    _device_options(command)


def _answer_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    command.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    command.add_argument("--top-p", type=float, metavar="P", help="draw from the smallest set of that probability")
    command.add_argument("--min-p", type=float, metavar="P", help="drop tokens less probable than P times the best")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text again")
    command.add_argument(
        "--price-per-hour", type=_price, default=1.0, metavar="USD", help="of the machine (default: 1)"
    )


def _device(text: str) -> str:
    if text.split(":")[0] == "meta":
        raise argparse.ArgumentTypeError("the meta device has shapes but no numbers, so choose cpu, cuda or mps")
    return text


def _plot_file(text: str) -> str:
    if Path(text).suffix.lower() not in PLOT_TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(PLOT_TYPES)}")
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # compares as neither small nor large


def _microseconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("the overhead must be 0 or a positive number of microseconds")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("the time limit must be a positive number of seconds")
    return value


def _price(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("the price must be a positive number of dollars")
    return value


# --- commands: heavy imports stand inside, so that --help answers at once --------------------------------------------------


def _tour(args: argparse.Namespace) -> None:
    from minillm import load
    from minillm.files import check_writable, write_json
    from minillm.report import make_console
    from minillm.roofline.hardware import datasheet_ceilings
    from minillm.roofline.plot import save_roofline
    from minillm.stages import STAGES, known_stage
    from minillm.tour import PROMPT, run_tour

    check_writable(args.json, args.plot)
    stages = list(STAGES) if args.stages is None else [name.strip() for name in args.stages.split(",")]
    for name in stages:
        known_stage(name)
    prompt = PROMPT if args.prompt is None else args.prompt
    if not prompt.strip():
        raise UsageError("The prompt is empty: give the model something to answer.")
    console = make_console()
    model, tokenizer = load(args.model, args.device, args.dtype)
    tour = run_tour(
        model, tokenizer, console, stages=stages, prompt=prompt,
        max_new_tokens=args.max_new_tokens, price_per_hour=args.price_per_hour,
    )  # fmt: skip
    if args.json:
        write_json(args.json, tour.as_json())
    if args.plot:
        title = f"{tour.model}, {tour.ceilings.dtype}, {tour.prompt_tokens} prompt tokens"
        save_roofline(args.plot, tour.positions(), tour.ceilings, datasheet_ceilings(tour.ceilings), title)
    for path in filter(None, (args.json, args.plot)):
        console.print(f"Written: {path}", markup=False)


def _generate(args: argparse.Namespace) -> None:
    from minillm import load
    from minillm.metrics import summarize
    from minillm.report import make_console, one_line
    from minillm.sampling import Sampler
    from minillm.stages import known_stage

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


def _batch(args: argparse.Namespace) -> None:
    from minillm.batch_command import batch

    batch(args)


def _roofline(args: argparse.Namespace) -> None:
    from minillm.device import pick_device, pick_dtype
    from minillm.files import check_writable, write_json
    from minillm.report import ceilings_table, make_console
    from minillm.roofline.hardware import datasheet_ceilings

    check_writable(args.json)
    device = pick_device(args.device)
    measured = _measure(device, pick_dtype(args.dtype, device))
    datasheet = datasheet_ceilings(measured)
    make_console().print(ceilings_table(measured, datasheet))
    if args.json:
        sheet = datasheet.as_json() if datasheet else None
        data = {"device": measured.device, "dtype": measured.dtype, "ceilings": measured.as_json(), "datasheet": sheet}
        write_json(args.json, data)


def _measure(device: "torch.device", dtype: "torch.dtype") -> "Ceilings":
    """The ceilings of this machine, for a working set of the default model's size."""
    from minillm.config import known_model
    from minillm.roofline.ceilings import CeilingMeter

    meter = CeilingMeter(device, dtype, known_model(DEFAULT_MODEL).parameter_count * dtype.itemsize)
    for _ in range(7):
        meter.sample()
    return meter.ceilings()


def _predict(args: argparse.Namespace) -> None:
    from minillm.config import known_model
    from minillm.device import DTYPES, pick_device, pick_dtype
    from minillm.files import check_writable, write_json
    from minillm.report import duration, make_console, predictions_table
    from minillm.roofline.hardware import known_hardware
    from minillm.roofline.plot import si
    from minillm.roofline.position import meta_twin, predict_stage
    from minillm.stages import known_stage
    from minillm.stages.quantization import streamed_bytes

    check_writable(args.json)
    config, stage = known_model(args.model), known_stage(args.stage)
    if args.hardware == "this":
        if args.overhead:
            raise UsageError("The overhead of this machine is measured: leave --overhead out.")
        device = pick_device()
        ceilings = _measure(device, pick_dtype(args.dtype, device))
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


def _profile(args: argparse.Namespace) -> None:
    from minillm.profile_command import profile

    profile(args)


def _evaluate(args: argparse.Namespace) -> None:
    from minillm.evaluate_command import evaluate

    evaluate(args)


def _grade(args: argparse.Namespace) -> None:
    from minillm.grading.command import grade

    grade(args)


def _doctor(args: argparse.Namespace) -> None:
    from minillm.doctor import examine
    from minillm.report import make_console

    examine(make_console())


if __name__ == "__main__":
    sys.exit(main())
