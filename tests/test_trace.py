"""Traces: requests that are drawn at random, written and read."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
from helpers import is_one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError, UsageError
from minillm.trace import Arrival, poisson_trace, read_trace, write_trace


def test_poisson_gaps_are_exponential_and_lengths_uniform() -> None:
    n, rate = 20_000, 4.0
    trace = poisson_trace(n, rate, prompt_tokens=(3, 6), output_tokens=(1, 10), seed=1)
    times = [arrival.arrival_s for arrival in trace]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    # Of an exponential with mean m, the mean of n gaps is off by m / sqrt(n), which is 0.7 %: 5 of those are 3.5 %.
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.035)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert sum(gap > 1 / rate for gap in gaps) / n == pytest.approx(math.exp(-1), rel=0.05)
    counts = Counter(arrival.output_tokens for arrival in trace)
    assert sorted(counts) == list(range(1, 11))
    # A count is binomial: n / 10 give or take sqrt(n 0.1 0.9) = 42, which is 2 %.
    assert all(count == pytest.approx(n / 10, rel=0.1) for count in counts.values())
    assert {arrival.prompt_tokens for arrival in trace} == {3, 4, 5, 6}


def test_poisson_trace_depends_on_its_seed_alone() -> None:
    def trace(rate: float, seed: int) -> list[Arrival]:
        return poisson_trace(50, rate, prompt_tokens=(1, 99), output_tokens=(1, 99), seed=seed)

    assert trace(2.0, 7) == trace(2.0, 7) != trace(2.0, 8)
    for slow, fast, at_once in zip(trace(2.0, 7), trace(8.0, 7), trace(math.inf, 7), strict=True):
        assert (slow.id, slow.prompt, slow.output_tokens) == (fast.id, fast.prompt, fast.output_tokens)
        assert slow.arrival_s == pytest.approx(4 * fast.arrival_s)
        assert at_once.arrival_s == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, "n is 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": math.nan}, "rate is nan"),
        ({"prompt_tokens": (0, 4)}, "prompt_tokens is (0, 4)"),
        ({"output_tokens": (5, 4)}, "output_tokens is (5, 4)"),
        ({"output_tokens": (1, 10**9)}, "output_tokens is"),
        ({"n": 1_000_001}, "n is 1000001"),
    ],
)
def test_impossible_traces_are_refused(changes: dict[str, object], says: str) -> None:
    good = {"n": 3, "rate": 1.0, "prompt_tokens": (1, 4), "output_tokens": (1, 4)}
    with pytest.raises(UsageError) as error:
        poisson_trace(**good | changes)  # type: ignore[arg-type]
    assert says in str(error.value)
    assert is_one_sentence(str(error.value))


def test_made_up_prompts_are_the_same_for_the_same_id() -> None:
    ids = Arrival("a", 0.0, 50, 1).ids(320)
    assert ids == Arrival("a", 9.0, 50, 7).ids(320) != Arrival("b", 0.0, 50, 1).ids(320)
    assert len(ids) == 50
    assert all(0 <= token < 320 for token in ids)
    assert set(Arrival("a", 0.0, 99, 1).ids(2)) == {0, 1}  # every id of a vocabulary, and none beyond
    assert Arrival("a", 0.0, [3, 1], 1).ids(320) == [3, 1]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_trace_has_as_many_requests_as_asked_for_and_may_have_one_length_only(n: int) -> None:
    trace = poisson_trace(n, 1.0, prompt_tokens=(3, 3), output_tokens=(1, 1))
    assert [(arrival.id, arrival.prompt, arrival.output_tokens) for arrival in trace] == [(i, 3, 1) for i in range(n)]
    assert trace == poisson_trace(n, 1.0, prompt_tokens=(3, 3), output_tokens=(1, 1), seed=0)


def test_the_least_and_the_most_of_a_request_are_taken_and_nothing_beyond() -> None:
    for moment, tokens in ((0.0, 1), (1e9, 1_000_000)):
        assert Arrival("a", moment, tokens, tokens).prompt_tokens == tokens
    for moment, prompt, output in (
        (-1e-9, 1, 1), (1.1e9, 1, 1), (0, 0, 1), (0, [], 1), (0, 1_000_001, 1), (0, 1, 0), (0, 1, 1_000_001),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"arrival_s is|_tokens is"):
            Arrival("a", moment, prompt, output)


arrivals = st.builds(
    Arrival,
    id=st.text(st.characters(codec="utf-8"), max_size=8) | st.integers(),
    arrival_s=st.floats(0, 1e9),
    prompt=st.integers(1, 10**6),
    output_tokens=st.integers(1, 10**6),
)


@given(trace=st.lists(arrivals, max_size=8, unique_by=lambda arrival: arrival.id))
@settings(deadline=None)
def test_a_written_trace_reads_back(trace: list[Arrival], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == (trace, [])


def test_of_token_ids_a_trace_keeps_the_number(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [Arrival("a", 0.5, [7, 8, 9], 4)])
    assert read_trace(tmp_path / "t")[0] == [Arrival("a", 0.5, 3, 4)]


GOOD = '{"id": "good", "arrival_s": 1.5, "prompt_tokens": 12, "output_tokens": 40}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": "a", "arrival_s": 0.0, "prompt_tok', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"id": "a", "arrival_s": ' + b"9" * 5000 + b', "prompt_tokens": 1, "output_tokens": 1}', "not valid JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"{}", "no id and no arrival_s and no prompt_tokens and no output_tokens"),
        (b'{"id": "a", "prompt_tokens": 1, "output_tokens": 1}', "no arrival_s"),
        (b'{"id": "a", "arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is nan"),
        (b'{"id": "a", "arrival_s": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is inf"),
        (b'{"id": "a", "arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is -1"),
        (b'{"id": "a", "arrival_s": 1e30, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is 1e+30"),
        (b'{"id": "a", "arrival_s": "1", "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is '1'"),
        (b'{"id": "a", "arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is True"),
        (b'{"id": "a", "arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0"),
        (b'{"id": "a", "arrival_s": 0, "prompt_tokens": [1], "output_tokens": 1}', "prompt_tokens is [1]"),
        (b'{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 0}', "output_tokens is 0"),
        (b'{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1.5}', "output_tokens is 1.5"),
        (b'{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": null}', "output_tokens is None"),
        (
            b'{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1' + b"0" * 90 + b"}",
            "output_tokens is 100",
        ),
        (b'{"id": [], "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}', "id is []"),
        (b'{"id": true, "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}', "id is True"),
        (GOOD.encode(), "'good' was there before"),
    ],
)
def test_a_broken_line_is_named_by_its_number_and_the_rest_is_read(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    after = GOOD.replace("good", "after")
    # A blank line, and no newline at the end.
    path.write_bytes(GOOD.encode() + b"\n\n" + line + b"\r\n" + after.encode())
    trace, [problem] = read_trace(path)
    assert trace == [Arrival("good", 1.5, 12, 40), Arrival("after", 1.5, 12, 40)]
    assert problem.startswith("Line 3: ")
    assert says in problem
    assert is_one_sentence(problem)
    assert len(problem) < 250


@given(lines=st.lists(st.binary(max_size=30) | arrivals.map(lambda a: json.dumps({"id": a.id}).encode()), max_size=5))
@settings(deadline=None)
def test_no_file_at_all_makes_reading_fail(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(b"\n".join(lines))
    trace, problems = read_trace(path)
    assert trace == []
    assert len(problems) == sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(MinillmError) as error:
        read_trace(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert is_one_sentence(str(error.value))
