"""`minillm batch`: a file of prompts becomes a file of answers, by continuous batching. It can be stopped and run again.

An answer is the same whatever runs beside it, in whichever order, and however often the command was stopped: with `--seed N`
each prompt draws from a seed of its own, made of N and its id.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from minillm.answer_file import AnswerFile, answered
from minillm.batch import Request, Row, check_max_batch
from minillm.checkpoint import load
from minillm.errors import MinillmError, UsageError
from minillm.json_lines import numbered_lines, parse_line
from minillm.metrics import RequestTimes, e2e, ttft
from minillm.model import Transformer
from minillm.report import duration, figure, make_console, one_line
from minillm.sampling import Sampler, SamplerLike, greedy
from minillm.stages.batching import Engine
from minillm.tokenizer import Tokenizer
from minillm.trace import MOST_TOKENS
from minillm.values import Id, check_id, check_number, check_whole, shown
from minillm.workload import Served, serve_rows

LARGEST_SEED = 2**63 - 1
HOTTEST = 1e6  # here any token is as probable as any other


@dataclass(frozen=True)
class Question:
    """One line of the file. What it leaves out, the options of the command have said."""

    line: int
    id: Id
    prompt: str
    max_new_tokens: int
    sampler: SamplerLike


def batch(args: argparse.Namespace) -> None:
    """Answer the prompts of `args.file` that have no answer yet.

    Raises `UsageError` for a wrong command, `MinillmError` also where all was done but for some lines that cannot be served.
    Ctrl-C raises KeyboardInterrupt with a sentence that says how far the work is.
    """
    check_max_batch(args.max_batch)
    check_whole("max_new_tokens", args.max_new_tokens, 1, MOST_TOKENS)
    check_number("temperature", args.temperature, HOTTEST)
    Sampler(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)  # raises for a setting out of its range
    source = Path(args.file)
    questions, problems = read_questions(source, args)
    total = len(questions) + len(problems)
    if total == 0:
        raise UsageError(f'{source} holds no prompts: write one a line, such as {{"prompt": "Once upon a time"}}.')
    out = source.with_suffix(".answers.jsonl") if args.out is None else Path(args.out)
    if out.exists() and out.samefile(source):
        raise UsageError(f"{out} holds the prompts: name another file with --out.")
    prompts = {question.id: question.prompt for question in questions}
    done = answered(out, prompts)
    _tell(source, problems)
    try:
        if len(done) < len(questions):
            model, tokenizer = load(args.model, args.device, args.dtype)
            with AnswerFile(out, prompts) as answers:
                done = answers.done  # grows
                problems += _serve(model, tokenizer, [q for q in questions if q.id not in done], answers, args)
    except KeyboardInterrupt:
        # The last answer may be written and not counted yet. What went into a pipe was counted only.
        done = answered(out, prompts) or done
        state = f"{len(done)} of {total} prompts are answered in {out}"
        raise KeyboardInterrupt(f"Interrupted: {state}, and the same command goes on from there.") from None
    make_console().print(f"{len(done)} of {total} prompts are answered in {out}", markup=False, soft_wrap=True)
    if problems:
        raise MinillmError(
            f"{len(problems)} of {total} prompts were not served: mend the lines named above, and the same command serves them."
        )


def read_questions(path: Path, args: argparse.Namespace) -> tuple[list[Question], list[tuple[int, str]]]:
    """The good lines, and of each other one its number and what is wrong. Raises `MinillmError` for no file."""
    questions: dict[Id, Question] = {}
    problems = []
    for number, line in numbered_lines(path):
        try:
            question = _question(number, parse_line(line), args)
            if question.id in questions:
                raise UsageError(f"Line {questions[question.id].line} has the id {shown(question.id)} too.")
            questions[question.id] = question
        except UsageError as error:
            problems.append((number, str(error)))
    return list(questions.values()), problems


def _question(number: int, value: object, args: argparse.Namespace) -> Question:
    """A line's question: an object with a prompt, or the prompt alone. Raises `UsageError` for what is wrong with it."""
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UsageError('It has no prompt: write an object such as {"prompt": "Once upon a time"}.')
    if not fields["prompt"]:
        raise UsageError("The prompt is empty.")
    try:
        fields["prompt"].encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise UsageError("The prompt is not valid Unicode.") from None

    def setting(name: str) -> object:
        return getattr(args, name) if fields.get(name) is None else fields[name]

    id = f"line-{number}" if fields.get("id") is None else check_id(fields["id"])
    max_new_tokens = check_whole("max_new_tokens", setting("max_new_tokens"), 1, MOST_TOKENS)
    temperature = check_number("temperature", setting("temperature"), HOTTEST)
    seed = None if args.seed is None else derived_seed(args.seed, id)
    if fields.get("seed") is not None:
        seed = check_whole("seed", fields["seed"], 0, LARGEST_SEED)
    sampler = Sampler(temperature, args.top_k, args.top_p, args.min_p, seed) if temperature else greedy
    return Question(number, id, fields["prompt"], max_new_tokens, sampler)


def derived_seed(seed: int, id: Id) -> int:
    """A seed for one prompt: with the same one for all, prompts that are alike would draw alike."""
    digest = hashlib.sha256(json.dumps([seed, id]).encode()).digest()
    return int.from_bytes(digest[:8], "big") % (LARGEST_SEED + 1)


def _serve(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    answers: AnswerFile,
    args: argparse.Namespace,
) -> list[tuple[int, str]]:
    """Answer these questions, write each answer as it ends, print the five numbers. Returns the lines that cannot be served."""
    with _progress() as bar:
        rows, problems = _rows(model, tokenizer, questions, args.chat, bar)
        _tell(Path(args.file), problems)
        if not rows:
            return problems
        kept = len(answers.done)
        task = bar.add_task("answers", total=kept + len(rows), completed=kept)

        def finished(row: Row, times: RequestTimes) -> None:
            answers.append(cast(Id, row.request.id), _answer(tokenizer, row, times))
            bar.advance(task)

        engine = Engine(model, min(args.max_batch, len(rows)), max(row.size for row in rows))
        # All are there from the start. The longest first, or the last steps could run for one straggler.
        served = serve_rows(engine, [(0.0, row) for row in sorted(rows, key=lambda row: -row.remaining)], finished)
    _print_numbers(served, args.price_per_hour)
    return problems


def _rows(
    model: Transformer, tokenizer: Tokenizer, questions: Sequence[Question], chat: bool, bar: Progress
) -> tuple[list[Row], list[tuple[int, str]]]:
    """The questions as tokens, and the lines of those that the model cannot take."""
    rows, problems = [], []
    prompts, stops = [question.prompt for question in questions], tokenizer.stop_tokens
    tokens = tokenizer.chats(prompts) if chat else map(tokenizer.encode, prompts)
    for question, ids in zip(bar.track(questions, description="prompts"), tokens, strict=True):
        try:
            rows.append(Row(model, Request(ids, question.max_new_tokens, question.sampler, stops, id=question.id)))
        except UsageError as error:
            problems.append((question.line, str(error)))
    return rows, problems


def _answer(tokenizer: Tokenizer, row: Row, times: RequestTimes) -> dict[str, object]:
    """What is written of an answer. Its times count from the start of this run, when all prompts were there."""
    tokens = row.generation().tokens
    return {
        "text": tokenizer.decode(tokens),
        "tokens": len(tokens),
        "finish": "stop" if row.stopped else "length",
        "ttft_s": round(ttft(times), 6),
        "e2e_s": round(e2e(times), 6),
    }


def _progress() -> Progress:
    """A bar on standard error, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _tell(source: Path, problems: Sequence[tuple[int, str]]) -> None:
    for line, problem in problems:
        print(f"minillm: {source}, line {line}: {problem}", file=sys.stderr)


def _print_numbers(served: Served, price_per_hour: float) -> None:
    """The five numbers of this run, queue included."""
    numbers = served.numbers(price_per_hour)
    tokens = sum(len(request.tokens) for request in served.requests.values())
    more = f"TTFT P99 {duration(numbers['ttft_p99_s'])}, {figure(numbers['user_tokens_per_s'])} tokens/s for one user"
    text = f"{len(served.requests)} answers, {one_line(numbers, tokens, price_per_hour)}; {more}"
    make_console().print(text, style="dim")
