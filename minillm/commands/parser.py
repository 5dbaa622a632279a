"""The command line: every command with its options. A mistake in one is a sentence and exit status 2."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from minillm.config import DEFAULT_MODEL
from minillm.errors import printable

PLOT_TYPES = (".png", ".svg", ".pdf")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = printable(message)
        self.exit(2, f"minillm: {message[:1].upper()}{message[1:]}: see {self.prog} --help.\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # the help text: an error must come now, not when Python has left `main`
        super().exit(status, message)


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Of what it parses, `command` is the name of the one that was asked for."""
    parser = _Parser(
        prog="minillm", description="Learn LLM inference engineering: run a stage, measure it, predict it."
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for add in (_tour, _generate, _batch, _roofline, _predict, _profile, _evaluate, _grade, _doctor):
        add(commands)
    return parser


def _tour(commands: _Commands) -> None:
    tour = _command(commands, "tour", "every stage on one prompt: prediction, text, five numbers, roofline")
    _model_options(tour)
    tour.add_argument("--stages", metavar="A,B", help="stages to run, in this order (default: all)")
    tour.add_argument("--prompt", metavar="TEXT", help="what to ask the model")
    tour.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="tokens to generate (default: 48)")
    _price_option(tour)
    tour.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    tour.add_argument("--plot", type=_plot_file, metavar="FILE", help="write the roofline diagram (.png, .svg or .pdf)")


def _generate(commands: _Commands) -> None:
    generate = _command(commands, "generate", "stream an answer, then the five numbers")
    generate.add_argument("prompt")
    _model_options(generate)
    generate.add_argument("--stage", default="kv_cache", metavar="S", help="stage to generate with (default: kv_cache)")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: 128)")
    _sampling_options(generate)
    _price_option(generate)


def _batch(commands: _Commands) -> None:
    batch = _command(commands, "batch", "answer a file of prompts; stopped, it goes on where it was")
    batch.add_argument("file", metavar="FILE", help='JSON lines: {"prompt": TEXT, "id": ..., "max_new_tokens": N, ...}')
    batch.add_argument(
        "--out", metavar="ANSWERS", help="grows by a line an answer (default: FILE's name.answers.jsonl)"
    )
    _model_options(batch)
    batch.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    batch.add_argument("--max-batch", type=int, default=16, metavar="N", help="answered at a time (default: 16)")
    batch.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="an answer at most (default: 128)")
    _sampling_options(batch)
    _price_option(batch)


def _roofline(commands: _Commands) -> None:
    roofline = _command(commands, "roofline", "measure this machine's ceilings, beside the datasheet")
    _device_options(roofline)
    roofline.add_argument("--json", metavar="FILE", help="write the ceilings as JSON")


def _predict(commands: _Commands) -> None:
    predict = _command(commands, "predict", "what a stage will take on any hardware, without weights")
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


def _profile(commands: _Commands) -> None:
    profile = _command(commands, "profile", "where a prefill and a decode step spend their time, operator by operator")
    profile.add_argument("stage", metavar="STAGE", help="such as kv_cache")
    _model_options(profile)
    profile.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    profile.add_argument("--context", type=int, default=256, metavar="C", help="tokens attended over (default: 256)")
    profile.add_argument("--json", metavar="FILE", help="write the profile as JSON")


def _evaluate(commands: _Commands) -> None:
    evaluate = _command(
        commands, "evaluate", "what quantization does to a model: bytes, perplexity, KL, agreement, speed"
    )
    _model_options(evaluate)
    evaluate.add_argument(
        "--schemes", metavar="A,B", help="of fp32, bf16, fp16, int8, int4, w8a8, fp8, int8_kv (default: most of them)"
    )
    evaluate.add_argument("--group-size", metavar="G,G", help="groups of int4, of 32, 64, 128 (default: 32,64)")
    evaluate.add_argument("--text", metavar="FILE", help="what to score on (default: prose that the package ships)")
    evaluate.add_argument("--tokens", type=int, default=512, metavar="N", help="of the text, at most (default: 512)")
    evaluate.add_argument("--json", metavar="FILE", help="write the table as JSON")


def _grade(commands: _Commands) -> None:
    grade = _command(commands, "grade", "the scorecard of the exercises: passed, failed, not attempted, not graded")
    grade.add_argument("chapter", nargs="?", metavar="CHAPTER", help="such as ch01, or ch01/rope (default: all)")
    grade.add_argument(
        "--exercises", metavar="DIR", help="the exercises folder (default: here, above, or the package's)"
    )
    grade.add_argument("--solutions", action="store_true", help="grade the solutions in place of your files")
    grade.add_argument("--submissions", metavar="DIR", help="grade a folder of students' folders")
    grade.add_argument(
        "--time-limit", type=_positive("time limit", "seconds"), metavar="S",
        help="seconds an exercise may take (default: 30)",
    )  # fmt: skip
    grade.add_argument("--json", metavar="FILE", help="write the scorecard as JSON; of submissions, one a student")
    grade.add_argument("--csv", metavar="FILE", help="write the points of submissions as CSV, a line a student")


def _doctor(commands: _Commands) -> None:
    _command(commands, "doctor", "what this machine can run, and what is missing")


def _command(commands: _Commands, name: str, help: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")


# --- Options that several commands have


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


def _sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    command.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    command.add_argument("--top-p", type=float, metavar="P", help="draw from the smallest set of that probability")
    command.add_argument("--min-p", type=float, metavar="P", help="drop tokens less probable than P times the best")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text again")


def _price_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--price-per-hour", type=_positive("price", "dollars"), default=1.0, metavar="USD",
        help="of the machine (default: 1)",
    )  # fmt: skip


# --- Values


def _device(text: str) -> str:
    if text.split(":")[0] == "meta":
        raise argparse.ArgumentTypeError("the meta device has shapes but no numbers, so choose cpu, cuda or mps")
    return text


def _plot_file(text: str) -> str:
    if Path(text).suffix.lower() not in PLOT_TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(PLOT_TYPES)}")
    return text


def _positive(name: str, unit: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = _number(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"the {name} must be a positive number of {unit}")
        return value

    return read


def _microseconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("the overhead must be 0 or a positive number of microseconds")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # neither small nor large
