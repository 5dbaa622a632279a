"""Grader of chapter 4. Schedules are judged step by step, whatever they are made of; predictions against exact arithmetic."""

import math
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.grading import Answer, Wrong, ask, continued, example_model, exercise, judge_guesses, refuses
from minillm.grading.channel import Refused
from minillm.grading.counted import batch_gain
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.hardware import known_hardware
from minillm.stages import gqa
from minillm.workload import ideal_steps

# --- padding

# What comes in one pass, (pads of each row, columns before it, columns in it): prefills, chunks that end among the pads of a
# row, decode steps, and rows without any pad.
PASSES = [
    ([2, 0, 3], 0, 7),
    ([0], 0, 4),
    ([5, 0, 1, 4], 0, 6),
    ([0, 0], 0, 3),
    ([2, 0, 3], 7, 1),
    ([2, 0, 3], 8, 1),
    ([5, 0, 1, 4], 9, 1),
    ([0], 4, 1),
    ([2, 0, 3, 6], 0, 3),
    ([2, 0, 3, 6], 3, 4),
    ([2, 0, 3, 6], 5, 2),
    ([2, 0, 3, 6], 7, 5),
    ([6, 1], 0, 1),
    ([6, 1], 1, 1),
    ([1, 2, 3], 4, 4),
    ([3], 0, 5),
    ([3], 5, 2),
    ([40, 0, 7], 0, 47),
    ([40, 0, 7], 60, 1),
    ([300, 0], 5000, 2),  # a long text
]


def whole_numbers(answer, value: object, what: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of whole numbers of this shape."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        raise answer.wrong(f"must return a tensor of whole numbers for the {what}.")
    if value.dtype not in (torch.int64, torch.int32):  # enough bits for a vocabulary and for any length
        raise answer.wrong(f"gives {what} in {value.dtype} where int64 is due.".replace("torch.", ""))
    if tuple(value.shape) != shape:
        raise answer.wrong(f"gives {what} of shape {tuple(value.shape)} where {shape} is due.")
    return value


@exercise(points=1)
def test_pad_prompts(pad_prompts):
    cases = [
        [[5, 3, 9], [7]],
        [[4], [8, 6, 2, 9, 1], [3, 7]],
        [[0, 0, 5], [0], [6, 0, 0, 0]],  # a prompt may begin with the token that others take for a pad
        [[3, 3], [4, 5]],
        [[12, 40, 7]],
        [[9], [8], [7, 6], [0, 1]],
        [list(range(1, 30)), [2] * 11, [5], list(range(40, 10, -1))],
    ]
    for prompts in cases:
        answer = ask(pad_prompts, prompts)
        if not isinstance(answer.value, (tuple, list)) or len(answer.value) != 2:
            raise answer.wrong("must return two tensors: the tokens and the pads of each row.")
        B, T = len(prompts), max(map(len, prompts))
        tokens = whole_numbers(answer, answer.value[0], "tokens", (B, T)).tolist()
        pads = whole_numbers(answer, answer.value[1], "pads", (B,)).tolist()
        due = [T - len(prompt) for prompt in prompts]
        for row, prompt in zip(tokens, prompts, strict=True):
            if row[T - len(prompt) :] == prompt:
                continue
            hint = ""
            if row[: len(prompt)] == prompt:
                hint = " The pads stand on the wrong side: all last tokens belong into one column."
            elif row[T - len(prompt) :] == prompt[::-1]:
                hint = " Its tokens are in the opposite order."
            raise answer.wrong(f"has the row {row[:12]}, which does not end in its prompt {prompt[:8]}.{hint}")
        if pads != due:
            hint = " These are the lengths." if pads == [len(prompt) for prompt in prompts] else ""
            if pads == [row.count(0) for row in tokens] or pads == [leading_zeros(row) for row in tokens]:
                hint = " A token 0 may belong to the prompt: count columns, not zeros."
            raise answer.wrong(f"should give the pads {due}, not {pads}.{hint}")
        used = [token for row, pad in zip(tokens, due, strict=True) for token in row[:pad]]
        known = {0, *(token for prompt in prompts for token in prompt)}
        if not known.issuperset(used):
            raise answer.wrong(f"fills with {min(set(used) - known)}: a pad goes through the model too, take 0.")


def leading_zeros(row: list[int]) -> int:
    return next((i for i, token in enumerate(row) if token != 0), len(row))


@exercise(points=1)
def test_padded_positions(padded_positions):
    for pads, start, n in PASSES:
        answer = ask(padded_positions, torch.tensor(pads), start, n)
        got = whole_numbers(answer, answer.value, "positions", (len(pads), n))
        columns = torch.arange(start, start + n)
        right = columns - torch.tensor(pads)[:, None]  # (B, T), negative at pads
        real = right >= 0
        if int(got.min()) < 0:
            raise answer.wrong("has negative positions: those of pads may be anything from 0 on.")
        if bool((got == right)[real].all()):
            continue
        likely = {
            "That counts columns: a row counts from its own first token, without its pads.": columns.expand_as(right),
            "It counts from 0 again: a later pass goes on from the columns before it.": right - start,
            "It counts the columns of this pass alone.": (columns - start).expand_as(right),
            "It is one too large: the first token of a row has position 0.": right + 1,
            "It is one too small: a token's position is the number of tokens before it.": right - 1,
            "Pads stand in front of the tokens: take them off, do not add them.": right + 2 * torch.tensor(pads)[:, None],
        }  # fmt: skip
        hint = next((f" {text}" for text, wrong in likely.items() if bool((got == wrong)[real].all())), "")
        row = int((real & (got != right)).any(1).nonzero()[0])
        first = int(real[row].nonzero()[0])
        due, given = right[row, first:].tolist()[:8], got[row, first:].tolist()[:8]
        raise answer.wrong(f"gives the tokens of row {row} the positions {given} where {due} are right.{hint}")


@exercise(points=3)
def test_padding_mask(padding_mask):
    for pads, start, n in PASSES:
        B, S = len(pads), start + n
        answer = ask(padding_mask, torch.tensor(pads), start, n)
        got = answer.value
        if not isinstance(got, Tensor) or tuple(got.shape) != (B, n, S):
            shape = f" of shape {tuple(got.shape)}" if isinstance(got, Tensor) else ""
            raise answer.wrong(f"must return a tensor of shape {(B, n, S)}, not one{shape}.".replace(", not one.", "."))
        if got.dtype != torch.bool:
            raise answer.wrong(f"returns {got.dtype} where bools are due, True to see.".replace("torch.", ""))
        b = torch.tensor(pads)[:, None, None]
        q, k = torch.arange(start, S)[:, None], torch.arange(S)  # (T, 1), (S,)
        right, token = (k <= q) & (k >= b), (q >= b).expand(B, n, S)  # pads see what they like
        if bool((got == right)[token].all()):
            if not bool(got.any(-1).all()):
                raise answer.wrong("lets a pad see nothing: softmax of nothing is NaN, so let it see itself.")
            continue
        everything = torch.ones(B, n, S, dtype=torch.bool)
        likely = {
            "Pads are seen: a key in a column before the row's first token is a pad.": k <= q,
            "A token sees tokens after itself.": (k >= b) & everything,
            "Everything is seen, pads and tokens to come.": everything,
            "A token sees itself too.": (k < q) & (k >= b),
            "A token sees the one after itself.": (k <= q + 1) & (k >= b),
            "The pass comes after `start` columns: its triangle does not begin at the first key.": (k <= q - start) & (k >= b),
            "The last pad of each row is seen.": (k <= q) & (k >= b - 1),
            "The first token of each row is hidden.": (k <= q) & (k > b),
            "Pads are on the left.": (k <= q) & (k < S - b),
            "It is upside down: True is what a query sees.": ~right,
            "Queries and keys are exchanged.": (k >= q) & (k >= b),
        }  # fmt: skip
        hints = (
            f" {text}"
            for text, wrong in likely.items()
            if bool((got == wrong)[token].all()) or bool((got == wrong | (k == q))[token].all())
        )
        hint = next(hints, "")
        row, query, _ = (token & (got != right)).nonzero()[0].tolist()
        column, saw = start + query, got[row, query].nonzero().flatten().tolist()
        raise answer.wrong(
            f"lets column {column} of row {row}, which has {pads[row]} pads, see the columns {saw[:12]} where "
            f"{pads[row]} to {column} are right.{hint}"
        )
    return real_text(padding_mask)


class _Masked(gqa.GroupedKVCache):
    """The package's cache, with the learner's mask in it."""

    def __init__(self, model: Transformer, capacity: int, pads: Tensor, padding_mask) -> None:
        super().__init__(model, capacity, batch=len(pads))
        self.pads, self.padding_mask = pads, padding_mask

    def positions(self, n_tokens: int) -> Tensor:
        self.mask = self.padding_mask(self.pads, self.length, n_tokens)[:, None]  # (B, 1, T, S)
        return (super().positions(n_tokens) - self.pads[:, None]).clamp_min(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *self.store(layer, k, v), attn_mask=self.mask, enable_gqa=True)


TEXTS = ("The capital of France is", "Once upon a time there was a little girl who lived at the edge of", "Water")


def real_text(padding_mask) -> str:
    model, tokenizer, which = example_model()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    T, n = max(map(len, prompts)), 6
    pads = torch.tensor([T - len(prompt) for prompt in prompts])
    tokens = torch.tensor([[0] * (T - len(prompt)) + prompt for prompt in prompts])
    cache, columns = _Masked(model, T + n, pads, padding_mask), []
    with torch.inference_mode():
        for _ in range(n):
            tokens = model.head(model.hidden(tokens, cache)[:, -1:]).argmax(-1)  # (B, 1)
            columns.append(tokens)
    new = torch.cat(columns, 1).tolist()
    for row, (prompt, answer) in enumerate(zip(prompts, new, strict=True)):
        if answer != gqa.generate(model, prompt, n).tokens:
            raise Wrong(f"With padding_mask, {which} answers prompt {row} of a batch otherwise than the prompt alone.")
    return f"Your mask just ran {which} on three prompts at once: {continued(TEXTS[0], new[0])}"


# --- rows that have ended


class Model:
    """Tokens of a batch, drawn beforehand, given out step by step; checks what it is given."""

    def __init__(self, streams: Tensor, prompts: Tensor, lengths: list[int]) -> None:
        self.streams, self.prompts = streams, prompts  # (B, N), (B, T)
        self.lengths = lengths  # steps that each row needs
        self.steps = 0

    def step(self, tokens: object) -> Tensor:
        n, B = self.steps, len(self.lengths)
        if n == max(self.lengths):
            raise Wrong(f"static_loop calls step once more after all rows have ended, in step {n}.")
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise Wrong("static_loop must give step a tensor of token ids.")
        due = self.prompts if n == 0 else self.streams[:, n - 1 : n]
        if tokens.shape != due.shape:
            hint = " Rows that have ended stay in the batch." if n and tuple(tokens.shape[1:]) == (1,) else ""
            raise Wrong(
                f"static_loop gives step {n + 1} tokens of shape {tuple(tokens.shape)} where {tuple(due.shape)} is due.{hint}"
            )
        for row in range(B):
            if (n == 0 or self.lengths[row] > n) and tokens[row].tolist() != due[row].tolist():
                what = "the prompts" if n == 0 else "the last token of every row"
                raise Wrong(f"static_loop gives step {n + 1} something else than {what}: row {row} is wrong.")
        if int(tokens.min()) < 0:
            raise Wrong("static_loop gives step a negative number, which is no token id: of a row that has ended, too.")
        self.steps += 1
        return self.streams[:, n]


def kept(stream: list[int], limit: int, stops: set[int]) -> list[int]:
    """What a row keeps of its stream."""
    answer: list[int] = []
    for token in stream[:limit]:
        answer.append(token)
        if token in stops:
            break
    return answer


def check_row(row: int, got: list[int], stream: list[int], limit: int, stops: set[int]) -> None:
    due = kept(stream, limit, stops)
    if got == due:
        return
    hint = ""
    if got == due[:-1] and due[-1] in stops:
        hint = " A stop token is kept as the last."
    elif got == due[: len(got)]:
        hint = " It ends too early: each row has stop tokens and a limit of its own."
    elif got == stream[:limit]:
        hint = " It goes on after its stop token."
    elif got[: len(due)] == due:
        hint = " A row that has ended takes nothing more."
    raise Wrong(
        f"static_loop should keep {due[:10]} of row {row} with limit {limit} and stop tokens {sorted(stops)}, and keeps "
        f"{got[:10]} of {stream[:10]}.{hint}"
    )


@exercise(points=2)
def test_static_loop(static_loop):
    cases: list[tuple[list[list[int]], list[int], list[set[int]]]] = [
        ([[4, 5, 6, 7], [8, 9, 2, 3]], [3, 4], [set(), set()]),
        ([[4, 5, 6, 7, 1], [8, 2, 5, 3, 8]], [5, 5], [{6}, {2}]),
        ([[2, 5, 2, 2], [5, 2, 5, 6], [2, 2, 2, 2]], [4, 4, 4], [{5}, {5}, set()]),  # tokens that stop others only
        ([[3, 9, 9, 4]], [1], [set()]),
        ([[7, 7, 7], [1, 2, 7]], [3, 3], [{7}, {7}]),  # the first token is a stop token; and the last one at the limit
        ([[0, 4, 4, 0], [4, 0, 4, 4]], [4, 4], [{0}, set()]),  # token 0 is a token, and may stop a row
        ([[5, 1, 5, 1, 5], [1, 5, 1, 5, 1], [6, 6, 6, 6, 5]], [5, 2, 5], [{5, 9}, set(), {5}]),
    ]
    generator = np.random.default_rng(4)
    for _ in range(25):
        B, N = int(generator.integers(1, 6)), 14
        streams = generator.integers(0, 8, (B, N)).tolist()
        stops = [set(generator.integers(0, 12, int(generator.integers(0, 3))).tolist()) for _ in range(B)]
        cases.append((streams, generator.integers(1, N, B).tolist(), stops))
    for _ in range(8):  # many steps, ids of a large vocabulary, several tokens that stop a row
        streams = generator.integers(0, 120_000, (3, 90))
        stops = [{*generator.choice(row[row > 0], 4).tolist(), 120_001 + i} for i, row in enumerate(streams)]
        stops[0] -= set(streams[0].tolist())  # goes on to its limit
        cases.append((streams.tolist(), generator.integers(60, 90, 3).tolist(), stops))
    for i, (streams, limits, stops) in enumerate(cases):
        B = len(streams)
        prompts = torch.from_numpy(generator.integers(0, 60, (B, (3, 1, 5)[i % 3])))
        rows = [kept(*row) for row in zip(streams, limits, stops, strict=True)]
        model = Model(torch.tensor(streams), prompts, [len(row) for row in rows])
        answer = ask(static_loop, model.step, prompts, limits, stops)
        value = answer.value
        if isinstance(value, Tensor) or not isinstance(value, (list, tuple)) or len(value) != B:
            raise answer.wrong(f"must return a list of {B} lists, the new tokens of each row.")
        value = [row.tolist() if isinstance(row, Tensor) else row for row in value]
        if not all(isinstance(row, (list, tuple)) and all(type(token) is int for token in row) for row in value):
            raise answer.wrong("must return a list of token ids for each row, whole numbers.")
        for row, got in enumerate(value):
            check_row(row, list(got), streams[row], limits[row], stops[row])


# --- the scheduler


@dataclass
class Job:
    """A request as the grader knows it: when it comes, what it may keep, and how many steps it takes."""

    name: str
    prompt: int
    limit: int
    left: int
    arrival: int = 0

    @property
    def size(self) -> int:
        return self.prompt + self.limit - 1


@dataclass
class Observed:
    """Drives a learner's scheduler step by step, and holds every step against the rules."""

    scheduler: object
    max_batch: int
    max_tokens: int
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.scheduler, "submit"):  # a plain value
            raise Wrong("Scheduler(max_batch, max_tokens) must make an object with the methods submit and step.")

    def submit(self, job: Job) -> None:
        try:
            self.scheduler.submit(job.name, job.prompt, job.limit)  # type: ignore[attr-defined]
        except Refused:
            raise Wrong(
                f"Scheduler.submit refuses a request that may keep {job.size} tokens, with room for {self.max_tokens} in all: "
                "only what never fits is refused."
            ) from None
        self.waiting.append(job)

    def wrong(self, what: str) -> Wrong:
        where = f"with max_batch {self.max_batch} and max_tokens {self.max_tokens}"
        return Wrong(f"Scheduler.step {where}, step {self.steps + 1}: {what}")

    def step(self) -> None:
        """One step: who runs, is that right, and a token for each of them."""
        names = self._names()
        going, known = {job.name for job in self.running}, {job.name for job in self.waiting}
        for name in names:
            if name in self.finished:
                raise self.wrong(f"{name} ended in the last step and still runs.")
            if name not in going | known:
                raise self.wrong(f"{name} runs, which is not waiting and not running.")
        if gone := going - set(names):
            raise self.wrong(f"{min(gone)} was running, is not done, and does not run any more.")
        free = self.max_tokens - sum(job.size for job in self.running)
        new = [job for job in self.waiting if job.name in names]
        if len(self.running) + len(new) > self.max_batch:
            raise self.wrong(f"{len(self.running) + len(new)} requests run at a time.")
        if sum(job.size for job in new) > free:
            raise self.wrong(
                f"{', '.join(job.name for job in new[:5])} may come to keep {sum(job.size for job in new)} tokens, and what "
                f"runs already leaves {free}."
            )
        head = list(self.waiting)[: len(new)]
        if overtaken := [job.name for job in head if job not in new]:
            late = next(job.name for job in reversed(self.waiting) if job in new)
            raise self.wrong(f"{late} overtakes {overtaken[0]}, which came before it.")
        for _ in new:
            self.running.append(self.waiting.popleft())
        free -= sum(job.size for job in new)
        if self.waiting and len(self.running) < self.max_batch and self.waiting[0].size <= free:
            job = self.waiting[0]
            hint = " What ends in a step leaves its room to the very next one." if self.finished else ""
            raise self.wrong(
                f"{job.name} waits, the first in the queue, while there is room for its {job.size} tokens.{hint}"
            )
        for job in self.running:
            job.left -= 1
        self.finished = [job.name for job in self.running if job.left == 0][:: 1 if self.steps % 2 else -1]  # no order
        self.running = [job for job in self.running if job.left]
        self.steps += 1

    def _names(self) -> list[str]:
        value = self.scheduler.step(list(self.finished))  # type: ignore[attr-defined]
        if not isinstance(value, (list, tuple, set)) or not all(type(name) is str for name in value):
            raise self.wrong("it must return the names of the requests that run, as a list.")
        if len(set(value)) < len(value):
            raise self.wrong("a name is there twice.")
        return list(value)

    def serve(self, jobs: list[Job]) -> int:
        """All of these until they are done; how many steps it took."""
        coming = deque(sorted(jobs, key=lambda job: job.arrival))
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= self.steps:
                self.submit(coming.popleft())
            self.step()
        self.step()  # once more, for the last that finished
        return self.steps - 1


def drawn_jobs(seed: int) -> tuple[int, int, list[Job]]:
    """A random workload, and two bounds for it: sizes that often fill the room exactly, some requests that stop early."""
    generator = np.random.default_rng([40, seed])
    max_batch, max_tokens = int(generator.integers(1, 6)), int(generator.integers(8, 25))
    spread, names = int(generator.choice([0, 12, 40])), generator.permutation(100)
    jobs = []
    for i in range(int(generator.integers(1, 14))):
        prompt = int(generator.integers(1, max_tokens + 1 if generator.random() < 0.3 else max_tokens // 2))
        limit = int(generator.integers(1, min(8, max_tokens - prompt + 1) + 1))
        left = limit if generator.random() < 0.6 else int(generator.integers(1, limit + 1))
        jobs.append(Job(f"r{names[i]}", prompt, limit, left, int(generator.integers(0, spread + 1))))
    return max_batch, max_tokens, jobs


@exercise(points=3)
def test_scheduler_step(Scheduler):
    # Two long ones, a large one that waits for room, a small one that may not pass it, and one that fills the rest exactly.
    by_hand = [
        Job("A", 20, 31, 12),
        Job("B", 20, 11, 11),
        Job("C", 60, 20, 20, 1),
        Job("D", 5, 5, 5, 2),
        Job("E", 12, 1, 1, 3),
    ]
    Observed(Scheduler(4, 100), 4, 100).serve(by_hand)
    Observed(Scheduler(2, 50), 2, 50).serve([Job("x", 40, 11, 3), Job("y", 50, 1, 1), Job("z", 1, 50, 2)])
    Observed(Scheduler(1, 9), 1, 9).serve([Job("p", 2, 3, 3), Job("q", 2, 3, 1), Job("s", 5, 5, 5)])
    Observed(Scheduler(3, 10), 3, 10).step()  # nothing has come yet
    first, second = (Observed(Scheduler(2, 30), 2, 30) for _ in range(2))  # two at a time, of one class
    for observed, name in ((first, "one"), (second, "two")):
        observed.submit(Job(name, 4, 4, 4))
    try:
        for _ in range(6):
            first.step()
            second.step()
    except Wrong as error:
        raise Wrong(f"Two Scheduler objects disturb each other, perhaps: {error}") from None
    for seed in range(60):
        max_batch, max_tokens, jobs = drawn_jobs(seed)
        Observed(Scheduler(max_batch, max_tokens), max_batch, max_tokens).serve(jobs)
    many = [Job(f"m{i}", 3, 6, 2 + i % 5) for i in range(90)]
    Observed(Scheduler(40, 10_000), 40, 10_000).serve(many)
    lengths = sorted(np.random.default_rng(7).integers(10, 101, 200).tolist(), reverse=True)  # answers spread 10 to 1
    jobs = [Job(f"request {i}", 16 + 7 * i % 40, n, n) for i, n in enumerate(lengths)]
    steps, ideal = Observed(Scheduler(16, 100_000), 16, 100_000).serve(jobs), ideal_steps(lengths, 16)
    return f"200 requests in 16 slots took your scheduler {steps} steps; fewer than {ideal} are not possible."


@exercise(points=1)
def test_scheduler_refuses(Scheduler):
    for max_batch, max_tokens, prompt, limit in [(4, 100, 90, 12), (1, 10, 11, 1), (3, 64, 1, 65), (2, 50, 500, 500)]:
        because = f"as it may keep {prompt + limit - 1} tokens and there is room for {max_tokens}"
        observed = Observed(Scheduler(max_batch, max_tokens), max_batch, max_tokens)
        refuses(observed.scheduler.submit, "big", prompt, limit, because=because)
        observed.submit(Job("a", max_tokens - 2, 3, 2))  # all the room
        for name in ("big", "huge", "big"):
            refuses(observed.scheduler.submit, name, prompt, limit, because=because)
        observed.submit(Job("b", 1, max_tokens, 2))  # does not fit now, and will
        try:
            observed.submit(Job("big", 1, 3, 3))  # its name is free: it never came
            observed.serve([Job("c", 1, 2, 2), Job("d", max_tokens, 1, 1)])
        except Wrong as error:
            raise Wrong(f"After a refusal things go on as if the request had never come. {error}") from None


# --- predictions

MODELS = [KNOWN_MODELS[name] for name in ("llama-3-8b", "smollm2-135m", "llama-2-13b", "qwen3-0.6b", "smollm2-1.7b")]
H100, A100, CPU = (989.4e12, 3.35e12), (312e12, 2.039e12), (100e9, 20e9)
EXACT = (2.0**42, 2.0**40)  # floats divide by these without rounding: the ridge is 4


def kv_numbers(config: ModelConfig, heads: int | None = None) -> int:
    """Numbers in the keys and values of one token."""
    return 2 * config.n_layers * (config.n_kv_heads if heads is None else heads) * config.head_dim


@exercise(points=2)
def test_step_seconds(step_seconds):
    llama, smol, llama_2, qwen, large = MODELS
    cases = [
        (llama, [1] * 32, [1024] * 32, H100, 2.0),
        (llama, [1], [4096], H100, 2.0),
        (llama, [1] * 3, [100, 4000, 900], H100, 2.0),  # each its own length
        (llama, [1] * 7 + [1100], [2048] * 7 + [1100], H100, 2.0),  # a prompt joins
        (smol, [1] * 16, [2048] * 16, CPU, 4.0),  # computes for longer than it reads the weights
        (smol, [1, 1, 60], [70, 500, 60], CPU, 4.0),
        (smol, [1, 1], [2000, 8000], CPU, 2.0),
        (llama_2, [1] * 4, [4096, 4096, 100, 100], H100, 1.0),
        (qwen, [1] * 256, [300] * 256, A100, 2.0),
        (qwen, [1, 1, 1], [20_000, 10, 10_000], A100, 2.0),
        (large, [500, 400], [500, 400], A100, 2.0),
        (smol, [900, 100], [900, 100], (1979e12, 3.35e12), 2.0),  # prompts alone, whose keys and values count
        (smol, [300, 1], [300, 900], CPU, 0.5),  # computes for longer, whatever the weights take
        (large, [1, 20], [2000, 120], A100, 0.5),  # a chunk, of a prompt of which 100 tokens are cached
    ]
    for config, new, seen, (peak, bandwidth), size in cases:
        P, B = float(config.matmul_params), len(new)
        compute, weights = 2 * P * sum(new) / peak, P * size / bandwidth
        a_token = kv_numbers(config) * size / bandwidth
        kv, longest, group = a_token * sum(seen), a_token * max(seen), config.group_size
        likely = {
            "Keys and values are read as well, each request its own.": max(compute, weights),
            "Keys and values are read after the products: add them to the longer of the two.": max(compute, weights + kv),
            "While the products run the weights are read: the longer of the two counts, not their sum.": compute + weights + kv,
            "It leaves out the FLOPs: many tokens compute for longer than the weights are read.": weights + kv,
            "It leaves out the weights, which are read however few tokens there are.": compute + kv,
            "A prompt brings all its tokens into the products: N is the sum of `new`.": max(2 * P * B / peak, weights) + kv,
            "Weights are read once for all requests: that is what they share.": max(compute, B * weights) + kv,
            "Each request reads its own keys and values, not as many as the longest.": max(compute, weights) + longest * B,
            "Every request brings keys and values: add them up.": max(compute, weights) + longest,
            "There is a key and a value for each KV head, not for each query head.": max(compute, weights) + kv * group,
            "A key and a value: 2 of them.": max(compute, weights) + kv / 2,
        }  # fmt: skip
        answer = ask(step_seconds, config, new, seen, peak, bandwidth, size)
        answer.number(max(compute, weights) + kv, likely, rtol=0.01)


@exercise(points=2)
def test_batch_at_ridge(batch_at_ridge):
    llama, smol, llama_2, qwen, large = MODELS
    cases = [
        (llama, 128, H100, 2.0, 2.0),
        (llama, 512, H100, 2.0, 2.0),  # its limit lies below the ridge: never
        (llama, 380, H100, 2.0, 2.0),  # just below the 393 tokens at which that begins, and just above
        (llama, 400, H100, 2.0, 2.0),
        (llama, 128, H100, 1.0, 2.0),  # weights of 8 bits alone: a nearer ridge, and the same limit
        (llama, 512, H100, 0.5, 1.0),
        (llama_2, 100, H100, 2.0, 2.0),
        (llama_2, 128, H100, 2.0, 2.0),
        (smol, 64, CPU, 4.0, 4.0),
        (smol, 2048, CPU, 4.0, 4.0),
        (smol, 2048, CPU, 4.0, 1.0),
        (smol, 100, (1e12, 1e12), 0.5, 2.0),  # a ridge so low that one user is enough
        (qwen, 60, A100, 2.0, 2.0),
        (qwen, 1000, A100, 2.0, 2.0),
        (large, 8192, A100, 0.5, 0.5),
        (large, 120, A100, 1.0, 1.0),
        (large, 17_408, EXACT, 2.0, 1.0),  # each user's FLOPs take exactly as long as its keys and values: never
        (large, 300, EXACT, 2.0, 0.5),  # exactly 4 users, at which both take as long
        (llama_2, 1000, EXACT, 4.0, 0.5),  # and 8
        (large, 5000, (1e13, 3e12), 2.0, 0.5),  # a long context, in which attention computes more than the products
    ]
    for config, context, (peak, bandwidth), w, size in cases:
        ridge = Fraction(peak) / Fraction(bandwidth)
        P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
        flops = Fraction(2 * P + 4 * A * L * context)
        cache = kv_numbers(config) * context * Fraction(size)

        def least(flops=flops, cache=cache, weights=P * Fraction(w), ridge=ridge) -> int | None:
            """The smallest B with B flops >= ridge (weights + B cache)."""
            gain = flops - ridge * cache
            return math.ceil(ridge * weights / gain) if gain > 0 else None

        expected = least()
        exactly = ridge * P * Fraction(w) / (flops - ridge * cache or Fraction(-1))
        likely = {
            "Each user brings keys and values, which nobody shares: weights are not all.": least(cache=Fraction(0)),
            "Users are whole: round up, so that compute binds.": float(exactly),
            "Round up: with one user fewer the step still waits for memory.": math.floor(exactly),
            "With more users it comes nearer and never gets there: None.": math.ceil(exactly) if exactly < 0 else -1,
            "Attention computes, too: 4 A L FLOPs for each token that it sees.": least(flops=Fraction(2 * P)),
            "The ridge counts FLOPs for each byte, not for each weight.": math.ceil(ridge),
            "There is a key and a value for each KV head, not for each query head.": least(cache=cache * config.group_size),
            "A key and a value: 2 of them.": least(cache=cache / 2),
            "Weights, keys and values each have bytes of their own.": least(cache=cache / Fraction(size) * Fraction(w)),
            "Weights take `weight_bytes` each.": least(weights=P * Fraction(size)),
            "A multiplication and an addition are 2 FLOPs.": least(flops=flops / 2),
        }  # fmt: skip
        answer = ask(batch_at_ridge, config, context, peak, bandwidth, w, size)
        answer.number(expected, {text: wrong for text, wrong in likely.items() if wrong != expected}, rtol=1e-9)


@exercise(points=2)
def test_users_that_fit(users_that_fit):
    llama, smol, llama_2, qwen, large = MODELS
    generator = np.random.default_rng(11)

    def drawn(n: int, prompt: int, answer: int) -> list[tuple[int, int]]:
        pairs = zip(generator.integers(1, prompt, n).tolist(), generator.integers(1, answer, n).tolist(), strict=True)
        return list(pairs)

    exact = float(large.parameter_count * 2 + 4 * 512 * kv_numbers(large) * 2)  # room for 4 x 512 tokens, to the byte
    cases = [
        (llama, 80e9, [(4000, 97)] * 500, 2.0, 2.0),
        (llama, 24e9, drawn(300, 2000, 400), 2.0, 2.0),
        (llama_2, 40e9, drawn(60, 3000, 1000), 2.0, 2.0),
        (llama_2, 24e9, drawn(20, 100, 100), 2.0, 2.0),  # the weights do not fit
        (llama_2, 26.2e9, [(4000, 97), (10, 5), (20, 5)], 2.0, 2.0),  # beside them not even the first does
        (large, exact, [(512, 1)] * 6, 2.0, 2.0),
        (large, exact, [(1, 512), (512, 1), (200, 313), (500, 13), (3, 2)], 2.0, 2.0),
        (large, exact, [(1500, 200), (300, 49), (1, 1), (1, 1)], 2.0, 2.0),
        # the second does not fit, so nor the others
        (large, exact, [(1000, 800), (300, 200), (10, 10), (5, 5)], 2.0, 2.0),
        (large, exact, [(10, 10)] * 3, 2.0, 2.0),  # room for more than there are
        (large, exact, [(2000, 10), (10, 2000), (40, 2)], 2.0, 2.0),  # the longest prompt has a short answer
        (smol, 3e9, drawn(200, 500, 2000), 4.0, 4.0),
        (smol, 3e9, [(20, 13)] * 1500, 2.0, 2.0),  # more than a thousand
        (qwen, 8e9, drawn(200, 1000, 500), 1.0, 2.0),
        (llama, 16e9, drawn(400, 1000, 1000), 0.5, 1.0),
        (llama, 16e9, drawn(400, 1000, 1000), 1.0, 0.5),
    ]
    for config, memory, requests, w, size in cases:
        due = fit(config, memory, requests, w, size)
        answer = ask(users_that_fit, config, memory, requests, w, size)
        value = answer.value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise answer.wrong(
                "must return two numbers: those that fit in slots, and those that fit by their own tokens."
            )
        mistakes = {
            "The last new token is never fed back, so it is not kept.": {"last": 1},
            "Leave room for the longest answer too.": {"answers": 0},
            "The weights need room too.": {"weights": 0},
            "There is a key and a value for each KV head, not for each query head.": {"heads": config.n_heads},
            "A key and a value: 2 of them.": {"kv": Fraction(1, 2)},
            "There are not more users than requests.": {"capped": False},
            "The slot is that of the request which keeps most, prompt and answer together.": {"together": False},
            "Nobody overtakes: the first that does not fit ends the row.": {"overtake": True},
            "In slots, all take as much as the largest.": {"mean": True},
        }
        wrong = {text: fit(config, memory, requests, w, size, **mistake) for text, mistake in mistakes.items()}
        for way, name in enumerate(("in slots", "by their own tokens")):
            likely = {text: pair[way] for text, pair in wrong.items()}
            Answer(f"{answer.label}, {name},", value[way]).number(due[way], likely, rtol=1e-9)


def fit(
    config: ModelConfig, memory: float, requests: list[tuple[int, int]], w: float, size: float,
    last=0, answers=1, weights=1, heads=None, kv=1, capped=True, together=True, overtake=False, mean=False,
) -> tuple[int, int]:  # fmt: skip
    """How many fit, in slots and by their own tokens; with one of the mistakes in it, if any is asked for."""
    room = (Fraction(memory) - weights * config.parameter_count * Fraction(w)) / (
        kv_numbers(config, heads) * Fraction(size) * kv
    )
    sizes = [prompt + answers * (answer - 1) + last for prompt, answer in requests]
    largest = max(sizes) if together else max(p for p, _ in requests) + max(a for _, a in requests) - 1
    if mean:
        largest = -(-sum(sizes) // len(sizes))
    slots = max(0, math.floor(room / largest))
    users = 0
    for tokens in sizes:
        if tokens <= room:
            users, room = users + 1, room - tokens
        elif not overtake:
            break
    return min(slots, len(requests)) if capped else slots, users


LAPTOP = Ceilings("a laptop's CPU", "fp32", bandwidth=CPU[1], peak=CPU[0], overhead=0.0)


@exercise(points=1)
def test_batch_guesses(batch_guesses):
    laptop = batch_gain(KNOWN_MODELS["smollm2-135m"], LAPTOP, 64, 16)
    h100 = batch_gain(KNOWN_MODELS["llama-3-8b"], known_hardware("h100-sxm").ceilings("bf16"), 4096, 64)
    reasons = [
        (
            "On the CPU",
            "one user waits for the weights, and these are read once for all",
            "the ridge is at 5 FLOP per byte, so that from 10 users on a step computes for longer than it reads",
        ),
        (
            "On the H100",
            "the weights are read once for all, so 64 users wait less than 64 times as long",
            "64 users read 34 GB of keys and values, twice the weights",
        ),
    ]
    what = "two numbers: the factor on the CPU and the factor on the H100"
    value = judge_guesses(ask(batch_guesses), (laptop, h100), 0.15, what, reasons)
    return f"You said {value[0]:.3g} and {value[1]:.3g}; counted by operators it is {laptop:.3g} and {h100:.3g}."
