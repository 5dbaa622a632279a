"""Workloads: requests that come over time, drawn at random or read from a file.

A workload is *open*: when a request comes does not depend on how fast others are answered. So a server that is too slow gets
a queue, and the queue counts: the time of a request starts when it arrives, not when it is first looked at. (A closed
loop, where each user waits for an answer before asking again, hides that: "coordinated omission", Gil Tene.)

`minillm/workload.py` serves them.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import UsageError
from minillm.files import write_file
from minillm.json_lines import numbered_lines, parse_line
from minillm.values import Id, check_id, check_number, check_whole

MOST_TOKENS = 1_000_000  # of a prompt or an answer: more than any model here has positions
MOST_SECONDS = 1e9  # 30 years
TRACE_KEYS = ("id", "arrival_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Arrival:
    """A request of a workload. `prompt` holds token ids, or only says how many there are, as a trace does.

    Its answer has `output_tokens` tokens, whatever they are. Raises `UsageError` for times and lengths that cannot be.
    """

    id: Id
    arrival_s: float  # seconds after the beginning
    prompt: Sequence[int] | int
    output_tokens: int

    def __post_init__(self) -> None:
        check_id(self.id)
        check_number("arrival_s", self.arrival_s, MOST_SECONDS)
        check_whole("prompt_tokens", self.prompt_tokens, 1, MOST_TOKENS)
        check_whole("output_tokens", self.output_tokens, 1, MOST_TOKENS)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)

    def ids(self, vocab_size: int) -> Sequence[int]:
        """The prompt as token ids. Where only its length is known they are drawn, for the same id always the same."""
        if not isinstance(self.prompt, int):
            return self.prompt
        return random.Random(str(self.id)).choices(range(vocab_size), k=self.prompt)


def poisson_trace(
    n: int, rate: float, *, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], seed: int = 0
) -> list[Arrival]:
    """`n` requests, `rate` a second on average, independent of each other: gaps are exponential with mean 1 / rate.

    Lengths are drawn uniformly from (least, most), both included. An infinite rate lets all come at once. The same seed gives
    the same requests again, and at another rate the same ones with all times scaled. Raises `UsageError` for what cannot be.
    """
    check_whole("n", n, 1, MOST_TOKENS)
    if not rate > 0:
        raise UsageError(f"rate is {rate}; it must be a positive number of requests a second.")
    for name, (least, most) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= least <= most:
            raise UsageError(f"{name} is ({least}, {most}); give the least, at least 1, and the most.")
    draw, now, arrivals = random.Random(seed), 0.0, []
    for i in range(n):
        now += draw.expovariate(rate)
        arrivals.append(Arrival(i, now, draw.randint(*prompt_tokens), draw.randint(*output_tokens)))
    return arrivals


def read_trace(path: str | Path) -> tuple[list[Arrival], list[str]]:
    """The requests of a file of JSON lines `{"id": "a", "arrival_s": 0.0, "prompt_tokens": 12, "output_tokens": 40}`.

    Returns the good ones, in the order of the file, and one sentence for each broken line, which names it by its number.
    Raises `MinillmError` only for a file that cannot be read.
    """
    arrivals: dict[Id, Arrival] = {}
    problems = []
    for number, line in numbered_lines(path):
        try:
            arrival = _arrival(parse_line(line))
            if arrival.id in arrivals:
                raise UsageError(f"The id {arrival.id!r} was there before.")
            arrivals[arrival.id] = arrival
        except UsageError as error:
            problems.append(f"Line {number}: {error}")
    return list(arrivals.values()), problems


def _arrival(value: object) -> Arrival:
    if not isinstance(value, dict):
        raise UsageError("It is not a JSON object.")
    missing = [key for key in TRACE_KEYS if key not in value]
    if missing:
        raise UsageError(f"It has no {' and no '.join(missing)}.")
    length = check_whole("prompt_tokens", value["prompt_tokens"], 1, MOST_TOKENS)  # a list would be taken for token ids
    return Arrival(value["id"], value["arrival_s"], length, value["output_tokens"])


def write_trace(path: str | Path, arrivals: Iterable[Arrival]) -> None:
    """Write what `read_trace` reads: of prompts, the lengths. Raises `MinillmError` when the disk refuses."""
    lines = [json.dumps({key: getattr(arrival, key) for key in TRACE_KEYS}) + "\n" for arrival in arrivals]
    write_file(path, "".join(lines).encode())
