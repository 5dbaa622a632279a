"""The page side by side: all that it shows is read from results, and its sentences and pictures say what the numbers say."""

import copy
import json
import re

import pytest
from helpers import is_one_sentence
from picture_checks import assert_a_page_wide_and_the_same_each_time, lines, markers

from minillm import side_by_side
from minillm.errors import UsageError
from minillm.figures.picture import BLUE, DARK, ORANGE
from minillm.figures.side_by_side import times_as_fast

RESULTS = ("peers-epyc-2", "peers-batch16-epyc-2", "decode-epyc-2")


def spread(median, low, high):
    return {"median": median, "min": low, "max": high, "rounds": [low, median, high]}


def ratio(times, target, phase="decode", precision="int4", peer="llama.cpp", peer_precision="Q4_1"):
    return {
        "phase": phase, "precision": precision, "peer": peer, "peer_precision": peer_precision,
        "times_as_fast": spread(times, times / 2, times * 2), "target": target,
    }  # fmt: skip


def engine(precision, tokens_per_s, first_calls_s, name="minillm"):
    return {
        "engine": name, "precision": precision, "decode_tokens_per_s": spread(tokens_per_s, 1.0, 2e4),
        "prefill_s": spread(0.1234, 0.1, 1.5), "first_calls_s": first_calls_s,
    }  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_the_page_name_machine_versions_and_commit(name):
    result = side_by_side.read(name)
    said = side_by_side.origin(result)
    for part in (result["commit"][:8], result["date"][:10], result["machine"]["device"], result["versions"]["torch"]):
        assert part in said
    assert re.search(rf"\b{result['settings']['rounds']} rounds", said)
    assert ("with changes" in said) == result["dirty"]


def test_a_result_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    with pytest.raises(UsageError, match=r"There is no .*peers-abacus\.json") as error:
        side_by_side.read("peers-abacus")
    assert is_one_sentence(str(error.value))
    (tmp_path / "peers-abacus.json").write_text(json.dumps({"ratios": []}))
    assert side_by_side.read("peers-abacus") == {"ratios": []}


def test_tables_show_every_row_with_its_own_numbers():
    result = {
        "engines": [engine("int4", 118.6, 1.23), {**engine("Q4_1", 131, 0.5, "llama.cpp")}],
        "ratios": [
            ratio(1.5, 1.2), ratio(2.0, None, phase="prefill"), ratio(0.75, None, peer="transformers", peer_precision="bf16"),
        ],
    }  # fmt: skip
    assert side_by_side.speeds(result).rows == [
        ("minillm, int4", "119 (1 to 20,000)", "123 (100 to 1,500)", "1.2"),
        ("llama.cpp, Q4_1", "131 (1 to 20,000)", "123 (100 to 1,500)", "0.5"),
    ]
    assert side_by_side.ratios(result).rows == [  # decode before prefill, and llama.cpp last
        ("decode, int4", "transformers, bf16", "0.75 (0.375 to 1.5)", "-"),
        ("decode, int4", "llama.cpp, Q4_1", "1.5 (0.75 to 3)", "1.2"),
        ("prefill, int4", "llama.cpp, Q4_1", "2 (1 to 4)", "-"),
    ]
    assert len(side_by_side.ratios(result).shown().rows) == 1 + 3


def test_gains_are_those_with_a_target_and_losses_all_that_is_slower_or_below():
    row = {"phase": "decode", "what": "int8", "beside": "fp32", "times_as_fast": spread(2.1, 2.0, 2.2), "target": 1.7}
    missed = ["Slower: a.", "Below the target of 2: b.", "Not within 15 % of the prediction: c."]
    result = {"ratios": [row, row | {"what": "int4", "target": None}], "missed": missed}
    assert side_by_side.gains(result).rows == [("decode, int8", "fp32", "2.1 (2 to 2.2)", "1.7")]
    assert side_by_side.losses(result) == missed[:2]
    assert side_by_side.losses({"missed": missed[2:]}) == ["Nowhere slower."]


def test_steps_stand_beside_their_predictions_in_milliseconds():
    row = engine("int4 g32", 120, 0.0) | {"step": {"measured_s": spread(8.4e-3, 8e-3, 9e-3), "predicted_s": 5.31e-3}}
    assert side_by_side.steps({"precisions": [row]}).rows == [
        ("int4 g32", "120 (1 to 20,000)", "8.4", "5.31", "123 (100 to 1,500)")
    ]


def test_compiling_is_earned_back_by_what_each_token_saves():
    def said(compiled_tokens_per_s):
        engines = [engine("int4", 100, 2.0), engine("compiled int4", compiled_tokens_per_s, 17.0)]
        return side_by_side.price_of_compiling({"engines": engines})

    # 15 s more before, and 10 ms - 5 ms less a token: 3,000 tokens.
    assert "takes 15 s" in said(200) and said(200).endswith("earned back after 3,000 tokens.")
    assert "never earned back" in said(100) and "never earned back" in said(90)
    eager_only = side_by_side.price_of_compiling({"engines": [engine("int4", 100, 2.0)]})
    assert eager_only == "Nothing was compiled in this run."
    assert is_one_sentence(said(200))


def test_published_rates_are_tokens_times_the_bytes_that_a_token_reads():
    """gpt-fast's GB/s are tokens/s times the weights that it reads: 13.3 GB in bf16 for Llama-2-7B without its embedding."""
    for (model, precision, tokens, rate), row in zip(side_by_side.GPT_FAST, side_by_side.published().rows, strict=True):
        assert row[:2] == (f"{model}, {precision}", f"{tokens:.1f}")
        if rate:
            assert row[3] == f"{100 * rate / 2039:.1f}%"
    llama_2_7b = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert side_by_side.GPT_FAST[0][3] == pytest.approx(104.9 * 2 * llama_2_7b / 1e9, rel=0.01)


def test_picture_shows_median_rounds_and_target_of_each_comparison():
    rows = [ratio(1.5, 1.2, precision="compiled int4"), ratio(0.75, None)]
    shown = times_as_fast(rows, "Decode")
    (axes,) = shown.axes
    found = lines(axes)
    assert found["compiled int4  beside  llama.cpp, Q4_1"].tolist() == [[0.75, 0], [3, 0]]
    assert found["int4  beside  llama.cpp, Q4_1"].tolist() == [[0.375, 1], [1.5, 1]]
    marks = [(line.get_marker(), *line.get_xydata()[0], line.get_color()) for line in markers(axes)]
    assert marks == [("o", 1.5, 0, BLUE), ("|", 1.2, 0, DARK), ("s", 0.75, 1, ORANGE)]
    assert "1 of 2 comparisons below 1" in shown.alt
    assert_a_page_wide_and_the_same_each_time(lambda: times_as_fast(copy.deepcopy(rows), "Decode"))
