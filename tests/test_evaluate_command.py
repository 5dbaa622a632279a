"""`minillm evaluate`: the table of what quantization does, for any checkpoint, text and choice of schemes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import Run, assert_one_sentence
from helpers import SHAPES, lively_model, one_thread  # noqa: F401

from minillm.evaluation import compare, prose
from minillm.model import Transformer
from minillm.schemes import is_own_grid
from minillm.stages.quantization import quantize
from minillm.stages.quantized_cache import QuantizedKVCache
from minillm.stages.quantizers import dequantize_int4, group_int4
from minillm.tokenizer_sources import byte_tokenizer

# 4 query heads on 1 KV head of 16: qkv (96, 64), o (64, 64), gate and up (256, 64), down (64, 128); head (256, 64).
CONFIG = replace(SHAPES["multi-query"], d_model=64, d_ff=128, head_dim=16, vocab_size=256, max_positions=300)
HEAD = 256 * 64
LINEARS = 2 * (96 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + HEAD  # weights of the linear layers
OUTPUTS = 2 * (96 + 64 + 256 + 64) + 256  # and their rows
REST = 256 * 64 + 5 * 64  # weights of the embedding and the norms
ROPE = 8 * 16 // 2  # bytes: the frequencies of half a head, in float64
INT8 = LINEARS + 2 * OUTPUTS  # bytes: a scale of 16 bits a row
ROWS = [
    ("fp32", None, "fp32"),
    ("bf16", None, "bf16"),
    ("int8", None, "int8"),
    ("int4", 32, "int8"),
    ("int4", 32, "int4"),
    ("int4", 64, "int8"),
    ("int4", 64, "int4"),
    ("w8a8", None, "w8a8"),
    ("int8_kv", None, "fp32"),
]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """A model in which every parameter matters, in place of the one that the command would load."""
    model, tokenizer = lively_model(CONFIG), byte_tokenizer(CONFIG.vocab_size)

    def load(name: str, device: torch.device, dtype: str) -> Any:
        assert (device.type, dtype) == ("cpu", "fp32")
        return model, tokenizer

    monkeypatch.setattr("minillm.commands.evaluate.load", load)
    return model


def evaluated(run: Run, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the command writes and prints."""
    path = folder / "table.json"
    status, output, error = run("evaluate", "--device", "cpu", "--json", str(path), *options)
    assert (status, error) == (0, "")  # redirected, there is no progress bar
    assert f"Written: {path}" in output.replace("\n", "")
    return json.loads(path.read_text()), " ".join(output.split())


def test_every_row_is_the_comparison_of_its_own_model_with_the_fp32_one(
    run: Run, tmp_path: Path, model: Transformer
) -> None:
    data, output = evaluated(run, tmp_path, "--tokens", "300")
    rows = data.pop("rows")
    assert data == {"model": "mqa-tiny", "device": "cpu", "dtype": "fp32", "text": "prose", "tokens": 300}
    assert [(row["scheme"], row["group_size"], row["head"]) for row in rows] == ROWS
    tokens = list(prose().encode()[:300])
    for row in rows:
        other = model
        if row["scheme"] in ("int8", "int4", "w8a8"):
            other = quantize(model, row["scheme"], group_size=row["group_size"] or 32, head=row["head"])
        elif row["scheme"] == "bf16":
            other = lively_model(CONFIG).to(torch.bfloat16)
        cache = {"cache": QuantizedKVCache} if row["scheme"] == "int8_kv" else {}
        loss = compare(model, other, tokens, **cache)
        assert row["perplexity"] == pytest.approx(loss.perplexity, rel=1e-5)
        assert row["kl"] == pytest.approx(loss.kl, rel=1e-3, abs=1e-7)
        assert row["agreement"] == pytest.approx(loss.agreement)
        assert (row["kl"] == 0) == (row["scheme"] == "fp32")
        assert row["tokens_per_s"] > 0
        assert f"{row['perplexity']:.4g} │ {row['kl']:.4f} │ {row['agreement']:.1%} │" in output
    assert "over 298 tokens" in output  # two windows, each of which gives its first token away


def test_bytes_and_bits_are_those_of_codes_scales_and_zeros(run: Run, tmp_path: Path, model: Transformer) -> None:
    data, _ = evaluated(run, tmp_path, "--tokens", "20")

    def int4(g: int, head_in_int8: bool) -> float:
        stored = LINEARS * (1 / 2 + 4 / g)  # a scale and a zero of 16 bits a group
        return stored - HEAD * (1 / 2 + 4 / g) + HEAD + 2 * 256 if head_in_int8 else stored

    int4s = [int4(g, head_in_int8) for g in (32, 64) for head_in_int8 in (True, False)]
    stored = [4 * LINEARS, 2 * LINEARS, INT8, *int4s, INT8, 4 * LINEARS]
    for row, linears in zip(data["rows"], stored, strict=True):
        assert row["bits_per_weight"] == pytest.approx(8 * linears / LINEARS)
        assert row["bytes"] == linears + REST * (2 if row["scheme"] == "bf16" else 4) + ROPE


def test_quantized_layers_take_the_activations_that_dtype_says(run: Run, tmp_path: Path, model: Transformer) -> None:
    data, output = evaluated(run, tmp_path, "--dtype", "bf16", "--schemes", "int8,int8_kv", "--tokens", "40")
    fp32, int8, cache = data["rows"]
    assert data["dtype"] == "bf16" and "activations in bf16" in output
    assert fp32["kl"] == 0 and fp32["bits_per_weight"] == 32  # the reference stays
    assert int8["bytes"] == INT8 + 2 * REST + ROPE
    assert (cache["head"], cache["bits_per_weight"]) == ("bf16", 16)


def test_schemes_and_groups_are_chosen_and_each_comes_once(run: Run, tmp_path: Path, model: Transformer) -> None:
    options = ["--schemes", "int4, fp8,fp32,fp8", "--group-size", "64", "--tokens", "20"]
    rows, output = evaluated(run, tmp_path, *options)
    assert [(row["scheme"], row["group_size"], row["head"]) for row in rows["rows"]] == [
        ("fp32", None, "fp32"), ("int4", 64, "int8"), ("int4", 64, "int4"), ("fp8", None, "fp8"),
    ]  # fmt: skip
    assert rows["rows"][3]["tokens_per_s"] is None  # a CPU has no fp8
    assert output.count("no speed to show") == 1


def test_a_text_of_ones_own(run: Run, tmp_path: Path, model: Transformer) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Für Elise, " * 10, encoding="utf-8")
    data, _ = evaluated(run, tmp_path, "--text", str(path), "--schemes", "int8")
    tokens = list(("Für Elise, " * 10).encode())
    assert (data["text"], data["tokens"]) == (str(path), len(tokens))
    expected = compare(model, quantize(model, "int8"), tokens)
    assert data["rows"][1]["kl"] == pytest.approx(expected.kl, rel=1e-3)


def test_an_endless_text_is_read_as_far_as_it_is_needed(run: Run, tmp_path: Path, model: Transformer) -> None:
    zeros = Path("/dev/zero")
    if not zeros.exists():
        pytest.skip("there is no /dev/zero here")
    assert evaluated(run, tmp_path, "--text", str(zeros), "--schemes", "int8", "--tokens", "9")[0]["tokens"] == 9


def test_what_does_not_fit_is_left_out_with_its_sentence(run: Run, tmp_path: Path) -> None:
    data, output = evaluated(run, tmp_path, "--model", "tiny", "--tokens", "20")
    left_out = "Left out: int4 g64, head int8; int4 g64. Groups of 64 do not divide the 32 columns of "
    assert left_out in output
    assert [(row["scheme"], row["group_size"], row["head"]) for row in data["rows"]] == ROWS[:5] + ROWS[7:]
    data, output = evaluated(run, tmp_path, "--model", "tiny", "--tokens", "20", "--dtype", "fp16")
    assert "the kernels take fp32 and bf16" in output
    assert [row["scheme"] for row in data["rows"]] == ["fp32", "bf16", "int8_kv"]


def test_a_checkpoint_that_was_stored_in_4_bits_is_found_out(run: Run, tmp_path: Path, model: Transformer) -> None:
    options = ["--schemes", "int4", "--tokens", "20"]
    assert "was stored in 4 bits" not in evaluated(run, tmp_path, *options)[1]
    for block in model.blocks:
        block.mlp.down.weight.copy_(dequantize_int4(*group_int4(block.mlp.down.weight, 32)))  # type: ignore[union-attr, operator]
    output = evaluated(run, tmp_path, *options)[1]
    assert "mqa-tiny was stored in 4 bits with groups of 32: " in output
    assert "groups of 64:" not in output
    assert not is_own_grid(model, 64)
    assert not is_own_grid(lively_model(SHAPES["llama3"]), 64)  # 48 columns
    assert "was stored" not in evaluated(run, tmp_path, *options, "--group-size", "64")[1]


TINY = ["--model", "tiny", "--device", "cpu"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--schemes", "int8,int3"], "Unknown scheme 'int3'"),
        (["--schemes", ""], "Unknown scheme ''"),
        (["--group-size", "48"], "The group size is '48'"),
        (["--group-size", "32,"], "The group size is ''"),
        (["--group-size", "32", "--schemes", "int8"], "Only int4 has groups"),
        (["--group-size", "64", "--schemes", "int4"], "Groups of 64 do not divide"),
        (["--dtype", "fp16", "--schemes", "int8"], "the kernels take fp32 and bf16"),
        (["--tokens", "1"], "tokens is 1"),
        (["--tokens", "-5"], "tokens is -5"),
        (["--tokens", "many"], "'many'"),
        (["--text", "/nowhere/at/all.txt"], "/nowhere/at/all.txt cannot be read"),
        (["--text", "/"], "cannot be read"),
        (["--text", "EMPTY"], "is empty"),
        (["--text", "BINARY"], "is not text in UTF-8"),
        (["--text", "LETTER"], "The text has 1 tokens"),
        (["--json", "/"], "cannot be written"),
        (["--model", "gpt-9"], "Unknown model 'gpt-9'"),
        (["--device", "meta"], "meta device"),
        (["--dtype", "fp7"], "Unknown dtype"),
    ],
)
def test_what_cannot_be_evaluated_is_told_in_one_sentence(
    options: list[str], says: str, run: Run, tmp_path: Path
) -> None:
    for name, content in (("EMPTY", b" \n"), ("BINARY", b"\xff\xfe\x00"), ("LETTER", b"x")):
        (tmp_path / name).write_bytes(content)
        options = [str(tmp_path / name) if option == name else option for option in options]
    status, output, error = run("evaluate", *TINY, *options)
    assert status in (1, 2) and output == ""
    assert says in error
    assert_one_sentence(error)
