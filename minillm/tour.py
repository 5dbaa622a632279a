"""The tour: every stage on one prompt. Prediction first, then the text, the five numbers, and the place on the roofline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, check_prompt
from minillm.metrics import FiveNumbers, RequestTimes, summarize_requests
from minillm.model import Transformer
from minillm.report import ceilings_table, metrics_table, positions_table, predictions_table
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.counting import Cost, CountingMode
from minillm.roofline.hardware import datasheet_ceilings
from minillm.roofline.position import Position, ceilings_of, meta_twin, phase_costs, phase_costs_of_run, phase_seconds
from minillm.roofline.profile import explain, profile_phases
from minillm.stages import STAGES, Stage, known_stage
from minillm.stages.quantization import streamed_bytes
from minillm.tokenizer import Tokenizer

PROMPT = "Why is the sky blue? Answer in three sentences."
USERS = 8  # who ask the same at once where a stage serves several
ROUNDS = 3  # timed runs of each stage, with a sample of the ceilings before each
PROFILED_TOKENS = 6
CLOSE = 1.15  # a prediction is close when measured / predicted lies between 1/CLOSE and CLOSE


@dataclass
class StageResult:
    """What the tour found out about one stage. Times come from the run whose total is the median: they belong together."""

    stage: str
    users: int
    costs: dict[str, Cost]  # empty until its first run, where only a run tells
    model: Transformer  # as the stage prepared it
    text: str = ""
    runs: list[list[Generation]] = field(default_factory=list)  # of each run, one generation a user

    @property
    def entry(self) -> Stage:
        return known_stage(self.stage)

    @property
    def label(self) -> str:
        return self.stage if self.users == 1 else f"{self.stage} ({self.users} users)"

    @property
    def median_run(self) -> list[Generation]:
        return sorted(self.runs, key=lambda run: run[0].times[-1])[len(self.runs) // 2]

    def predictions(self, ceilings: Ceilings) -> list[Position]:
        return [Position(phase, cost, self._binds(phase, ceilings)) for phase, cost in self.costs.items()]

    def positions(self, ceilings: Ceilings) -> list[Position]:
        measured = phase_seconds(self.median_run[0].times)
        return [
            Position(phase, cost, self._binds(phase, ceilings), measured[phase]) for phase, cost in self.costs.items()
        ]

    def _binds(self, phase: str, ceilings: Ceilings) -> Ceilings:
        return ceilings_of(self.entry, phase, ceilings)


@dataclass
class Tour:
    """All that `minillm tour` shows and writes. `ceilings` are medians of samples taken between the runs."""

    model: str
    device: str
    prompt_tokens: int
    price_per_hour: float
    ceilings: Ceilings
    stages: list[StageResult]

    def metrics(self, result: StageResult) -> FiveNumbers:
        return summarize_requests([RequestTimes(0.0, run.times) for run in result.median_run], self.price_per_hour)

    def positions(self) -> dict[str, list[Position]]:
        return {result.label: result.positions(self.ceilings) for result in self.stages}

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.ceilings.dtype,
            "prompt_tokens": self.prompt_tokens,
            "ceilings": self.ceilings.as_json(),
            "stages": [
                {
                    "stage": result.stage,
                    "tokens": result.median_run[0].tokens,
                    "text": result.text,
                    "metrics": self.metrics(result),
                    "phases": [position.as_json() for position in result.positions(self.ceilings)],
                }
                for result in self.stages
            ],
        }


def run_tour(
    model: Transformer,
    tokenizer: Tokenizer,
    console: Console,
    *,
    stages: Sequence[str] = tuple(STAGES),
    prompt: str = PROMPT,
    max_new_tokens: int = 48,
    price_per_hour: float = 1.0,
) -> Tour:
    """Predict, run and place every stage on one prompt, telling `console` about it on the way.

    The prompt becomes a chat message where the checkpoint has a template; a base model goes on from it as it is.
    Raises `UsageError` for an unknown stage or a request that the model cannot run, `MinillmError` where no stage can run it.
    """
    if not stages:
        raise UsageError(f"No stage was named: choose from {', '.join(STAGES)}.")
    entries = {name: known_stage(name) for name in stages}
    tokens = tokenizer.encode(prompt) if tokenizer.template is None else tokenizer.chat(prompt)
    check_prompt(model.config, tokens, max_new_tokens)

    console.rule(f"{escape(model.config.name)}, {len(tokens)} prompt tokens, {max_new_tokens} new ones")
    meter = CeilingMeter(model.device, model.dtype, streamed_bytes(model))
    for _ in range(ROUNDS):
        meter.sample()
    console.print(ceilings_table(meter.ceilings(), datasheet_ceilings(meter.ceilings())))
    results = _predict_stages(console, model, entries, len(tokens), max_new_tokens)
    predictions = {result.label: result.predictions(meter.ceilings()) for result in results}
    console.print(predictions_table("Predicted, before anything has run", predictions))

    console.print(
        "[bold]The runs[/bold] [dim](greedy: every stage must say the same, quantized ones nearly so)[/dim]\n"
        f"[dim]{escape(prompt)}[/dim]"
    )
    for result in results:
        result.text = _stream(console, result, tokenizer, tokens, max_new_tokens)
        if not result.costs:
            result.costs = phase_costs_of_run(CountingMode(), result.entry, result.model, tokens, max_new_tokens)
    for _ in range(ROUNDS):
        for result in results:
            meter.sample()
            result.runs.append(_run(result, tokens, max_new_tokens))

    tour = Tour(model.config.name, str(model.device), len(tokens), price_per_hour, meter.ceilings(), results)
    _show_results(console, tour)
    _explain_misses(console, tour, tokens)
    return tour


def _predict_stages(
    console: Console, model: Transformer, entries: Mapping[str, Stage], prompt_tokens: int, new_tokens: int
) -> list[StageResult]:
    """Every stage that this device and dtype can run, with what it costs; a sentence for each that they cannot.

    Raises the first of these sentences where no stage is left.
    """
    twin = meta_twin(model.config, model.dtype)
    results, left_out = [], {}
    for name, stage in entries.items():
        users = USERS if stage.generate_batch else 1
        try:
            prepared, costs = stage.prepared(model), {}
            if stage.run is not None:
                costs = phase_costs(stage, stage.prepared(twin), prompt_tokens, new_tokens, users)
        except MinillmError as error:
            left_out[name] = error
        else:
            results.append(StageResult(name, users, costs, prepared))
    if not results:
        raise next(iter(left_out.values()))
    for name, reason in left_out.items():
        console.print(f"[bold]{name}[/bold] is left out: {escape(str(reason))}")
    for result in results:
        if not result.costs:
            console.print(
                f"[dim]What {result.stage} does depends on the tokens it finds: its costs are counted in its run.[/dim]"
            )
    return results


def _run(result: StageResult, tokens: list[int], n: int) -> list[Generation]:
    """One timed run: the prompt once, or from several users at once where the stage serves them together."""
    if result.entry.generate_batch is None:
        return [result.entry.generate(result.model, tokens, n)]
    return result.entry.generate_batch(result.model, [tokens] * result.users, n, max_batch=result.users)


def _stream(console: Console, result: StageResult, tokenizer: Tokenizer, tokens: list[int], n: int) -> str:
    """Run a stage once for its text, shown as it comes. This run also warms up: it is not timed."""
    console.print(f"[bold]{result.stage}:[/bold] ", end="")
    stream, pieces = tokenizer.stream(), []

    def show(piece: str) -> None:
        pieces.append(piece)
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    result.entry.generate(result.model, tokens, n, on_token=lambda token: show(stream.push(token)))
    show(stream.flush())
    console.print()
    return "".join(pieces)


def _show_results(console: Console, tour: Tour) -> None:
    console.print(metrics_table({result.label: tour.metrics(result) for result in tour.stages}))
    console.print(
        f"[dim]Tokens/s of the whole system, all its users together; dollars at ${tour.price_per_hour:g} an hour for a machine "
        "that is never idle.[/dim]"
    )
    console.print(positions_table(tour.positions()))
    console.print("[dim]Predicted with the ceilings sampled between the runs; ratio = measured / predicted.[/dim]")


def _explain_misses(console: Console, tour: Tour, tokens: list[int]) -> None:
    """Where a measured time is far from its prediction, run the stage with every operator timed and say which one it is."""
    for result in tour.stages:
        far = [p for p in result.positions(tour.ceilings) if p.ratio and not 1 / CLOSE < p.ratio < CLOSE]
        if not far:
            continue
        kinds = profile_phases(result.entry, result.model, tokens, PROFILED_TOKENS, tour.ceilings, batch=result.users)
        for p in far:
            console.print(f"[bold]{result.label} {p.phase}[/bold]: {explain(kinds[p.phase], tour.ceilings)}")
