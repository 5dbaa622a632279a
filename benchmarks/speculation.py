"""A part of decode.py: speculation. A model with its quantized twins as drafters, and with n-grams.

The clock of turns.py is outside: what a drafter does with the prompt, once an answer, is in the decode time of speculation.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench import Bench
from common import TEXT, spread
from comparison import check_answers
from engines import Engine, Plain
from turns import Request, Sample

from minillm.device import DTYPE_NAMES
from minillm.model import Transformer
from minillm.roofline.ceilings import seconds
from minillm.stages import gqa, speculative
from minillm.stages.drafters import Drafter, ModelDrafter, NGramDrafter
from minillm.stages.speculative_gain import Speculation, best_lookahead, pass_over, predicted_speedup
from minillm.tokenizer import Tokenizer

TWIN_TARGET, NGRAM_TARGET = 1.3, 2.0  # the best twin and lookahead; n-grams on a text that repeats its prompt
LOOKAHEADS, NGRAM_LOOKAHEADS = (2, 3, 4), (4, 8)  # of twins, besides the one that F6 picks
WARM_UP_LOOKAHEAD, LONGEST_LOOKAHEAD = 4, 8  # that alpha is measured at; that F6 may pick
PASSES = 5  # of each length, to measure what verification costs
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "What should I pack for a week in the mountains?",
    "Explain to a child how a bicycle stays upright.",
)


def guesses(k: int) -> str:
    return f"{k} guess{'es' if k > 1 else ''}"


class Speculative:
    """A model with a drafter, one prompt after another. `speculation` tells what came of the latest call, all prompts added."""

    def __init__(self, model: Transformer, name: str, drafter: Drafter, lookahead: int) -> None:
        self.model, self.name, self.drafter, self.lookahead = model, name, drafter, lookahead
        self.precision = DTYPE_NAMES[model.dtype]
        self.speculation = Speculation()

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        answers = [
            speculative.generate(self.model, prompt, n, drafter=self.drafter, lookahead=self.lookahead)
            for prompt in prompts
        ]
        self.speculation = sum((answer.speculation for answer in answers), Speculation())
        return [answer.tokens for answer in answers]


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """A message as the checkpoint was taught to read it; a base model, which knows no messages, goes on from the text."""
    return tokenizer.encode(text) if tokenizer.template is None else tokenizer.chat(text)


def answering(prompts: list[list[int]], n: int) -> Request:
    """n tokens after each prompt. Nobody asks here how long a prefill takes, so the prompt of that phase is one token."""
    return Request(prompts, [prompts[0][:1]], n)


class PassCosts(NamedTuple):
    """In decode steps of the target: a pass of it over 1, 2, ... tokens, and a draft step of each twin."""

    verification: list[float]
    draft: dict[str, float]

    def v(self, n_tokens: int) -> float:
        return self.verification[n_tokens - 1]


def measure_passes(model: Transformer, twins: dict[str, Transformer], context: int) -> PassCosts:
    """Passes take turns; each is set beside the plain step of its turn, and the median over the turns counts."""
    lengths = range(1, LONGEST_LOOKAHEAD + 2)
    passes = [pass_over(model, n, context) for n in lengths] + [pass_over(t, 1, context) for t in twins.values()]
    turns = [[seconds(run, model.device) for run in passes] for _ in range(PASSES + 1)]
    steps = [statistics.median(turn[i] / turn[0] for turn in turns[1:]) for i in range(len(passes))]  # [0]: a warm-up
    return PassCosts(steps[: len(lengths)], dict(zip(twins, steps[len(lengths) :], strict=True)))


def measure_twins(
    bench: Bench, model: Transformer, twins: dict[str, Transformer], tokenizer: Tokenizer, n: int
) -> dict[str, Any]:
    """The model alone, and with each twin at fixed lookaheads and at the one that F6 picks from a warm-up."""
    precision = DTYPE_NAMES[model.dtype]
    plain, request = Plain(model, precision), answering([chat(tokenizer, text) for text in QUESTIONS], n)

    def with_twin(name: str, lookahead: int) -> Speculative:
        return Speculative(model, f"{name} twin, {guesses(lookahead)}", ModelDrafter(twins[name]), lookahead)

    trials = {name: with_twin(name, WARM_UP_LOOKAHEAD) for name in twins}
    bench.agreement += check_answers([plain, *trials.values()], request)
    alpha = {name: trial.speculation.alpha or 0.0 for name, trial in trials.items()}
    context = round(statistics.mean(map(len, request.decode_prompts))) + n // 2
    costs = measure_passes(model, twins, context)
    best = {name: best_lookahead(alpha[name], costs.draft[name], LONGEST_LOOKAHEAD, costs.v) for name in twins}
    plan = [(name, k) for name in twins for k in sorted({*LOOKAHEADS, best[name]} - {0})]  # 0: plain decoding
    engines = [with_twin(name, k) for name, k in plan]
    plainly, *samples = bench.turns("twins", [plain, *engines], request)
    rows = []
    for (name, _), engine, taken in zip(plan, engines, samples, strict=True):
        predicted = predicted_speedup(alpha[name], engine.lookahead, costs.draft[name], costs.v)
        row = _speculation_row(bench, "chat", engine, name, taken, plainly, None)
        row |= {"chosen_by_f6": engine.lookahead == best[name], "predicted_times_as_fast": predicted}
        row["ratio"] = row["times_as_fast"]["median"] / predicted  # measured over predicted
        rows.append(row)
    if rows:  # the target is that of the best
        i = max(range(len(rows)), key=lambda i: rows[i]["times_as_fast"]["median"])
        bench.ratios[i - len(rows)]["target"] = TWIN_TARGET
    found = [
        {"twin": name, "alpha": alpha[name], "c": costs.draft[name], "best_lookahead": best[name]} for name in twins
    ]
    return {"context": context, "verification_steps": costs.verification, "twins": found, "rows": rows}


def measure_ngrams(
    bench: Bench, text: str, models: Sequence[Transformer], prompt: list[int], n: int, target: float | None
) -> list[dict[str, Any]]:
    """n-gram drafting beside plain decoding, in each dtype, n tokens after one prompt."""
    request = answering([prompt], n)
    engines: list[tuple[Plain, list[Speculative]]] = []
    for model in models:
        drafting = [
            Speculative(model, f"n-grams, {guesses(k)}, on a text that {text}", NGramDrafter(), k)
            for k in NGRAM_LOOKAHEADS
        ]
        engines.append((Plain(model, DTYPE_NAMES[model.dtype]), drafting))
    everyone: list[Engine] = [engine for plain, drafting in engines for engine in (plain, *drafting)]
    bench.agreement += check_answers(everyone, request)  # in fp32 they must be equal
    taken = iter(bench.turns(f"n-grams, {text}", everyone, request))
    rows = []
    for _, drafting in engines:
        plainly = next(taken)
        rows += [_speculation_row(bench, text, e, "n-grams", next(taken), plainly, target) for e in drafting]
    return rows


def _speculation_row(
    bench: Bench, text: str, engine: Speculative, drafter: str, taken: Sequence[Sample], plainly: Sequence[Sample],
    target: float | None,
) -> dict[str, Any]:  # fmt: skip
    precision, s = engine.precision, engine.speculation
    times = bench.compare("decode", (f"{precision} with {engine.name}", taken), (precision, plainly), target)
    return {
        "text": text,
        "precision": precision,
        "drafter": drafter,
        "lookahead": engine.lookahead,
        "alpha": s.alpha,
        "tokens_per_round": s.tokens_per_round,
        "rounds": s.rounds,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "plain_tokens_per_s": spread([sample.decode_tokens_per_s for sample in plainly]),
        "tokens_per_s": spread([sample.decode_tokens_per_s for sample in taken]),
        "times_as_fast": times,
    }


def repeating(models: Sequence[Transformer], tokenizer: Tokenizer, sentences: int) -> tuple[list[int], int]:
    """A prompt that asks for its own text again, and how many tokens every model takes for it until it stops by itself."""
    paragraph = "".join(re.findall(r"[^.?]+[.?] ", TEXT)[:sentences]).strip()
    prompt = chat(tokenizer, f"Repeat this text exactly:\n\n{paragraph}")
    room = models[0].config.max_positions - len(prompt) + 1
    most = min(len(tokenizer.encode(paragraph)) + 16, max(room, 1))  # a model that does not stop is stopped
    answers = [gqa.generate(model, prompt, most, stop_tokens=tokenizer.stop_tokens) for model in models]
    return prompt, max(2, min(map(len, answers)))
