"""Files made to break the reader: each ends in one sentence, soon and without taking memory."""

import argparse
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import is_one_sentence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import minillm
from minillm import (
    answer_file,
    chat_template,
    checkpoint,
    checkpoint_config,
    gguf_file,
    json_lines,
    trace,
    workload,
)
from minillm.checkpoint import load_gguf, load_safetensors
from minillm.commands.batch import read_questions
from minillm.errors import MinillmError
from minillm.gguf_file import GGUFFile
from minillm.tokenizer_sources import tokenizer_from_folder, tokenizer_from_gguf

SECONDS = 8.0  # far more than any of these takes on an idle machine


def refusal(call: Callable[[], object]) -> str:
    """The sentence that `call` ends in."""
    start = time.monotonic()
    with pytest.raises(MinillmError) as caught:
        call()
    message = str(caught.value)
    assert is_one_sentence(message), message
    assert len(message) < 600
    assert time.monotonic() - start < SECONDS
    return message


# --- GGUF, written byte by byte


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def f32(key: str, value: float) -> bytes:
    return text(key) + struct.pack("<If", 6, value)


def words(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    metadata: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_metadata: int | None = None,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(metadata) if n_metadata is None else n_metadata)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(metadata) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


METADATA = [
    words("general.architecture", "llama"),
    u32("llama.block_count", 1),
    u32("llama.context_length", 64),
    u32("llama.embedding_length", 8),
    u32("llama.feed_forward_length", 8),
    u32("llama.attention.head_count", 2),
    u32("llama.attention.head_count_kv", 1),
    f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
]
SHAPES = {
    "token_embd": [8, 16],
    "output_norm": [8],
    "blk.0.attn_norm": [8],
    "blk.0.attn_q": [8, 8],
    "blk.0.attn_k": [8, 4],
    "blk.0.attn_v": [8, 4],
    "blk.0.attn_output": [8, 8],
    "blk.0.ffn_norm": [8],
    "blk.0.ffn_gate": [8, 8],
    "blk.0.ffn_up": [8, 8],
    "blk.0.ffn_down": [8, 8],
}
TENSORS = [tensor(f"{name}.weight", dims, offset=1024 * i) for i, (name, dims) in enumerate(SHAPES.items())]
DATA = bytes(1024 * len(SHAPES))


def changed(index: int, **changes: Any) -> list[bytes]:
    """The tensors with one of them described otherwise."""
    name, dims = list(SHAPES.items())[index]
    described = {"name": f"{name}.weight", "dims": dims, "offset": 1024 * index} | changes
    return [*TENSORS[:index], tensor(**described), *TENSORS[index + 1 :]]


def array(key: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + content


HUGE = 2**63 + 5
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "Cannot read"),
    "a million numbers": (gguf_bytes([array("k", 12, 1_000_000)], []), "middle of its header"),
    "three bytes": (b"GGU", "begin with GGUF"),
    "magic alone": (b"GGUF", "in the middle of its header"),
    "wrong magic": (gguf_bytes(METADATA, TENSORS, DATA, magic=b"GGML"), "begin with GGUF"),
    "pickle": (b"\x80\x04\x95" + bytes(200), "begin with GGUF"),
    "version 1": (gguf_bytes(METADATA, TENSORS, DATA, version=1), "version is 1"),
    "big-endian": (gguf_bytes(METADATA, TENSORS, DATA, version=3 << 24), "version is 50331648"),
    "huge tensor count": (gguf_bytes(METADATA, TENSORS, DATA, n_tensors=HUGE), "tensors"),
    "tensor count past the end": (gguf_bytes(METADATA, TENSORS, DATA, n_tensors=50_000), "is not a GGUF file"),
    "huge metadata count": (gguf_bytes(METADATA, TENSORS, DATA, n_metadata=HUGE), "metadata entries"),
    "huge key": (gguf_bytes([struct.pack("<Q", HUGE) + b"abc"], [], n_metadata=1), "middle of its header"),
    "huge text": (gguf_bytes([text("k") + struct.pack("<IQ", 8, HUGE)], []), "middle of its header"),
    "huge string array": (gguf_bytes([array("k", 8, HUGE)], []), "items"),
    "a million strings": (gguf_bytes([array("k", 8, 1_000_000)], []), "middle of its header"),
    "huge number array": (gguf_bytes([array("k", 12, HUGE)], []), "items"),
    "overflowing number array": (gguf_bytes([array("k", 12, 2**61)], []), "items"),
    "nested array": (gguf_bytes([array("k", 9, 1, array("", 9, 1)[8:])], []), "holds arrays"),
    "deeply nested arrays": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 9, 1) * 50_000], []), "holds arrays"),
    "unknown metadata type": (gguf_bytes([text("k") + struct.pack("<II", 77, 1)], []), "type 77"),
    "unknown array type": (gguf_bytes([array("k", 13, 1)], []), "type 13"),
    "key that is not UTF-8": (gguf_bytes([text(b"\xff\xfe") + struct.pack("<II", 4, 1)], []), "not UTF-8"),
    "key twice": (gguf_bytes([*METADATA, METADATA[1]], TENSORS, DATA), "twice"),
    "tensor twice": (gguf_bytes(METADATA, [*TENSORS, TENSORS[0]], DATA), "twice"),
    "no dimensions": (gguf_bytes(METADATA, changed(0, dims=[]), DATA), "0 dimensions"),
    "five dimensions": (gguf_bytes(METADATA, changed(0, dims=[1] * 5), DATA), "5 dimensions"),
    "dimension count": (gguf_bytes(METADATA, [text("t") + struct.pack("<I", 2**32 - 1)]), "4294967295 dimensions"),
    "dimension of zero": (gguf_bytes(METADATA, changed(0, dims=[8, 0]), DATA), "has shape"),
    "overflowing dimensions": (gguf_bytes(METADATA, changed(0, dims=[2**32, 2**32]), DATA), "past its end"),
    "dimensions that overflow to 128": (gguf_bytes(METADATA, changed(0, dims=[2**62 + 32, 4]), DATA), "past its end"),
    "huge offset": (gguf_bytes(METADATA, changed(0, offset=HUGE), DATA), "past its end"),
    "offset that wraps": (gguf_bytes(METADATA, changed(0, offset=2**64 - 64), DATA), "past its end"),
    "unknown tensor type": (gguf_bytes(METADATA, changed(0, kind=200), DATA), "unknown type 200"),
    "row that is no whole block": (gguf_bytes(METADATA, changed(0, kind=8), DATA), "rows of 32"),
    "alignment of zero": (gguf_bytes([*METADATA, u32("general.alignment", 0)], TENSORS, DATA), "alignment"),
    "alignment of three": (gguf_bytes([*METADATA, u32("general.alignment", 3)], TENSORS, DATA), "alignment"),
    "huge alignment": (gguf_bytes([*METADATA, u32("general.alignment", 2**31)], TENSORS, DATA), "alignment"),
    "alignment in words": (gguf_bytes([*METADATA, words("general.alignment", "32")], TENSORS, DATA), "alignment"),
    "data cut short": (gguf_bytes(METADATA, TENSORS, DATA[:-800]), "cut short"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_gguf(case: str, tmp_path: Path) -> None:
    content, words_in_message = DAMAGED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert words_in_message in refusal(lambda: minillm.load(str(path), "cpu"))


def replaced(key: str, entry: bytes | None) -> list[bytes]:
    rest = [old for old in METADATA if not old.startswith(text(key))]
    return rest if entry is None else [*rest, entry]


UNSUPPORTED: dict[str, tuple[list[bytes], list[bytes], str]] = {
    "no architecture": (replaced("general.architecture", None), TENSORS, "None model"),
    "gemma": (replaced("general.architecture", words("general.architecture", "gemma3")), TENSORS, "gemma3 model"),
    "architecture as a number": (replaced("general.architecture", u32("general.architecture", 1)), TENSORS, "1 model"),
    "no layers": (replaced("llama.block_count", u32("llama.block_count", 0)), TENSORS, "n_layers is 0"),
    "layers in words": (replaced("llama.block_count", words("llama.block_count", "1")), TENSORS, "block_count"),
    "layers missing": (replaced("llama.block_count", None), TENSORS, "block_count must be a whole number"),
    "heads beyond 64 bits": (
        [
            *replaced("llama.attention.head_count", u32("llama.attention.head_count", 10_000_000)),
            u32("llama.attention.key_length", 10_000_000),
            u32("llama.attention.value_length", 10_000_000),
        ],
        TENSORS,
        "has shape",
    ),
    "too many layers": (replaced("llama.block_count", u32("llama.block_count", 2**32 - 1)), TENSORS, "n_layers"),
    "no heads": (
        replaced("llama.attention.head_count", u32("llama.attention.head_count", 0)),
        TENSORS,
        "n_heads is 0",
    ),
    "heads as a list": (
        replaced("llama.attention.head_count_kv", array("llama.attention.head_count_kv", 4, 1, bytes(4))),
        TENSORS,
        "head_count_kv must be a whole number",
    ),
    "not a number": (
        replaced("llama.attention.layer_norm_rms_epsilon", f32("llama.attention.layer_norm_rms_epsilon", float("nan"))),
        TENSORS,
        "epsilon must be a positive number",
    ),
    "RoPE scaling": ([*METADATA, words("llama.rope.scaling.type", "yarn")], TENSORS, "yarn"),
    "part of each head turned": ([*METADATA, u32("llama.rope.dimension_count", 2)], TENSORS, "rope.dimension_count"),
    "RoPE factors of another length": (METADATA, [*TENSORS, tensor("rope_freqs.weight", [8])], "RoPE factors"),
    "layer missing": (METADATA, TENSORS[:-1], "lacks 1 tensors"),
    "embedding missing": (METADATA, TENSORS[1:], "token_embd.weight"),
    "another shape": (METADATA, changed(3, dims=[8, 4]), "has shape [4, 8]"),
    "transposed": (METADATA, changed(4, dims=[4, 8]), "has shape [8, 4]"),
    "experts": (METADATA, [*TENSORS, tensor("blk.0.ffn_gate_inp.weight", [8, 2])], "ffn_gate_inp"),
    "type IQ4_NL": (METADATA, changed(0, dims=[32, 16], kind=20), "IQ4_NL"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_gguf_of_another_model(case: str, tmp_path: Path) -> None:
    metadata, tensors, words_in_message = UNSUPPORTED[case]
    if case == "type IQ4_NL":
        metadata = [u32("llama.embedding_length", 32) if b"embedding_length" in entry else entry for entry in metadata]
        tensors = [
            tensor(f"{name}.weight", [32 if d == 8 else d for d in dims], offset=4096 * i)
            for i, (name, dims) in enumerate(SHAPES.items())
        ]
        tensors[0] = tensor("token_embd.weight", [32, 16], 20)
        metadata = [u32("llama.feed_forward_length", 32) if b"feed_forward" in entry else entry for entry in metadata]
        tensors[4:6] = [
            tensor(f"blk.0.attn_{name}.weight", [32, 16], offset=4096 * i) for i, name in ((4, "k"), (5, "v"))
        ]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors, DATA * 4))
    assert words_in_message in refusal(lambda: load_gguf(path, "cpu"))


@pytest.mark.parametrize("value", [["a", "b"], [1, 2], [], "words", 2**63, -1, 1.5, True, float("inf")], ids=repr)
def test_metadata_of_any_kind_in_any_place(value: Any, tmp_path: Path) -> None:
    """Where a number stands there can be a list, where a text stands a number: never another error than ours."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(METADATA, TENSORS, DATA))
    more = ["rope.scaling.type", "attention.key_length", "rope.dimension_count", "rope.freq_base"]
    more += ["attention.sliding_window", "attention.value_length"]
    vocabulary = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": [], "token_type": [1], "bos_token_id": 0}
    vocabulary |= {"eos_token_id": 0, "add_bos_token": True}
    for key in [*GGUFFile(path).metadata, *(f"llama.{name}" for name in more)]:
        file = GGUFFile(path)
        file.metadata[key] = value
        with contextlib.suppress(MinillmError):
            checkpoint._model_from_gguf(file, torch.device("cpu"), torch.float32, "m")
    for key in vocabulary:
        file = GGUFFile(path)
        file.metadata |= {f"tokenizer.ggml.{name}": entry for name, entry in vocabulary.items()}
        file.metadata[f"tokenizer.ggml.{key}"] = value
        with contextlib.suppress(MinillmError):
            tokenizer_from_gguf(file)


@pytest.mark.parametrize(
    "value", [["a"], {}, "words", 10**400, -1, 0, 1.5, True, None, 1e308], ids=lambda v: repr(v)[:9]
)
def test_config_json_of_any_kind_in_any_place(value: Any) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    whole = CONFIG | {"rope_parameters": rope | {"original_max_position_embeddings": 64}, "head_dim": 4}
    checkpoint.config_from_hf(whole, "m")
    for key in [*whole, "rope_theta", "rope_scaling", "quantization_config", "sliding_window", "hidden_act"]:
        for model_type in ("llama", "mistral"):
            with contextlib.suppress(MinillmError):
                checkpoint.config_from_hf(whole | {"model_type": model_type} | {key: value}, "m")
    for key in whole["rope_parameters"]:
        with contextlib.suppress(MinillmError):
            checkpoint.config_from_hf(whole | {"rope_parameters": whole["rope_parameters"] | {key: value}}, "m")


def test_the_undamaged_file_loads_and_lacks_only_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(METADATA, TENSORS, DATA))
    assert load_gguf(path, "cpu").config.vocab_size == 16
    assert "vocabulary" in refusal(lambda: tokenizer_from_gguf(GGUFFile(path)))


def test_gguf_cut_at_every_byte(tmp_path: Path) -> None:
    whole = gguf_bytes(METADATA, TENSORS, DATA)
    path = tmp_path / "m.gguf"
    for size in [*range(0, len(whole) - len(DATA), 7), len(whole) - 1000]:
        path.write_bytes(whole[:size])
        refusal(lambda: load_gguf(path, "cpu"))


def test_random_damage_to_a_gguf_never_ends_in_another_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = gguf_bytes([*METADATA, array("k", 8, 2, text("a") + text("b"))], TENSORS, DATA)
    header = len(whole) - len(DATA)
    path = tmp_path / "m.gguf"
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            load_gguf(path, "cpu")
        except MinillmError as error:
            assert is_one_sentence(str(error))


def test_string_limit_holds_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 3)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([array("k", 8, 4, text("") * 4)], []))
    assert "4 items" in refusal(lambda: GGUFFile(path))


def test_missing_gguf_and_folder_named_so(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: minillm.load(str(tmp_path / "none.gguf"), "cpu"))
    (tmp_path / "folder.gguf").mkdir()
    refusal(lambda: minillm.load(str(tmp_path / "folder.gguf"), "cpu"))
    refusal(lambda: minillm.load("a\0b.gguf", "cpu"))


# --- safetensors


CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny checkpoint without its tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names |= {f"blk.0.{old}": f"model.layers.0.{new}" for old, new in layer.items()}
    tensors = {f"{names[name]}.weight": torch.zeros(dims[::-1]) for name, dims in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_safetensors(tmp_path, "cpu")
    return tmp_path


def header_bytes(header: object, size: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if size is None else size) + content


def safetensors_files() -> Iterator[tuple[str, bytes]]:
    entry = {"dtype": "F32", "shape": [16, 8], "data_offsets": [0, 512]}
    name = "model.embed_tokens.weight"
    yield "empty", b""
    yield "seven bytes", bytes(7)
    yield "huge header", header_bytes(b"{}", 2**63)
    yield "header past the end", header_bytes(b"{}", 1000)
    yield "not JSON", header_bytes(b"{{{{")
    yield "nested JSON", header_bytes(b'{"a":' * 50_000)
    yield "pickle", b"\x80\x04\x95" + bytes(200)
    yield "no data", header_bytes({name: entry})
    yield "huge offsets", header_bytes({name: entry | {"data_offsets": [2**62, 2**62 + 512]}}) + bytes(512)
    yield "negative offsets", header_bytes({name: entry | {"data_offsets": [-512, 0]}}) + bytes(512)
    yield "overlap", header_bytes({name: entry, "b": entry}) + bytes(512)
    yield "shape beyond its data", header_bytes({name: entry | {"shape": [16, 9]}}) + bytes(512)
    yield "overflowing shape", header_bytes({name: entry | {"shape": [2**40, 2**40]}}) + bytes(512)
    yield "unknown dtype", header_bytes({name: entry | {"dtype": "F7"}}) + bytes(512)


@pytest.mark.parametrize(
    ("case", "content"), list(safetensors_files()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_damaged_safetensors(case: str, content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refusal(lambda: load_safetensors(folder, "cpu"))


def test_safetensors_cut_short(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(0, len(whole), 211):
        (folder / "model.safetensors").write_bytes(whole[:size])
        refusal(lambda: load_safetensors(folder, "cpu"))


def test_huge_configuration_is_refused_before_memory_is_taken(folder: Path) -> None:
    """By its numbers this model has 10^14 weights: the file's header says that they are not there."""
    huge = CONFIG | {"hidden_size": 9_999_998, "vocab_size": 10_000_000, "num_hidden_layers": 1000}
    beyond_64_bits = huge | {"num_attention_heads": 10_000_000, "head_dim": 10_000_000}
    for config in (huge, beyond_64_bits):
        (folder / "config.json").write_text(json.dumps(config))
        refusal(lambda: load_safetensors(folder, "cpu"))


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\m.safetensors",
        "model.bin",
        "",
        "a\nb.safetensors",
        3,
        None,
        ["model.safetensors"],
        {"a": 1},
    ],
)
def test_shard_names_are_plain_file_names(name: object, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "plain file name" in refusal(lambda: load_safetensors(folder, "cpu"))


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "gone.safetensors"}}'])
def test_damaged_index(index: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    refusal(lambda: load_safetensors(folder, "cpu"))


def test_shards_that_hold_a_tensor_twice(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = {"a": "copy.safetensors", "b": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "twice" in refusal(lambda: load_safetensors(folder, "cpu"))


def test_pickled_weights_are_never_read(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("unpickled",))

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb()}, folder / "pytorch_model.bin")
    assert "pickled" in refusal(lambda: minillm.load(str(folder), "cpu"))
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    refusal(lambda: load_safetensors(folder, "cpu"))


def test_two_safetensors_without_an_index(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "no index" in refusal(lambda: load_safetensors(folder, "cpu"))


# --- JSON files of a folder


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "[" * 200_000, '{"model": {"type": "BPE"}}', "\udcff"])
def test_damaged_tokenizer_json(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "tokenizer.json" in refusal(lambda: tokenizer_from_folder(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"continuing_subword_prefix": "##"}},  # ends the process in the library
        {"model": {"merges": [["a", "zz"]]}},
        {"model": {"vocab": {}}},
        {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": 3}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
    ids=str,
)
def test_tokenizer_json_that_contradicts_itself(changes: dict[str, Any], folder: Path) -> None:
    content = json.loads(minillm.load("tiny", "cpu")[1].backend.to_str())
    for key, value in changes.items():
        content[key] = content[key] | value if key == "model" else value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with contextlib.suppress(MinillmError):  # an empty vocabulary may load: it encodes nothing
        tokenizer_from_folder(folder)


def test_panic_in_the_library_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panics(path: str) -> None:
        raise PanicException("no entry found\nfor key")

    monkeypatch.setattr("tokenizers.Tokenizer.from_file", panics)
    (folder / "tokenizer.json").write_text("{}")
    assert "no entry found for key" in refusal(lambda: tokenizer_from_folder(folder))


def test_folder_without_tokenizer(folder: Path) -> None:
    assert "no tokenizer.json" in refusal(lambda: minillm.load(str(folder), "cpu"))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "[]", "[" * 200_000, "\udcff"])
def test_damaged_settings(name: str, content: str, folder: Path) -> None:
    minillm.load("tiny", "cpu")[1].backend.save(str(folder / "tokenizer.json"))
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert name in refusal(lambda: tokenizer_from_folder(folder))


def test_settings_of_the_wrong_kind_are_ignored(folder: Path) -> None:
    minillm.load("tiny", "cpu")[1].backend.save(str(folder / "tokenizer.json"))
    odd = {
        "eos_token_id": ["x", None],
        "bos_token": 3,
        "eos_token": {"content": []},
        "chat_template": [1, {"name": ["default"], "template": "x"}, {"name": "default"}],
        "add_bos_token": 1,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(odd))
    (folder / "generation_config.json").write_text(json.dumps(odd))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.stop_tokens == frozenset()
    assert tokenizer.template is None


# --- Chat templates


LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "doubling text": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "repetition": "{{ 'x' * 100000000000 }}",
    "padding": "{{ '%1000000000000d' % 1 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "large output": LOOP + "{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "nested blocks": "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
    "nested parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "long template": "x" * 1_000_000,
    "syntax": "{% for %}",
    "way out of the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changing its input": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
    "its own refusal": "{{ raise_exception('roles must alternate\n\nplease') }}",
    "missing message": "{{ messages[7].content }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_hostile_template(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    message = refusal(lambda: chat_template.render(TEMPLATES[case], [{"role": "user", "content": "hi"}], {}))
    assert "chat template" in message


words = st.sampled_from(
    [
        "messages", "m", "m.content", "m['role']", "messages[0]", "messages[-1:]", "loop.index", "tools", "none", "1", "'x'",
        "é", "+", "~", "*", "**", "%", "/", "is defined", "not", "in", "if", "else", "| tojson", "| length", "| trim", "| int",
        ".x", "(", ")", "[", "]", "range(10**9)", "10**9", "namespace(x=1)", "raise_exception('no')", "strftime_now('%d')",
        "'%9999d'",
    ]
)  # fmt: skip
expressions = st.lists(words, min_size=1, max_size=5).map(" ".join)
pieces = st.one_of(
    expressions.map(lambda x: f"{{{{ {x} }}}}"),
    expressions.map(lambda x: f"{{% set m = {x} %}}"),
    expressions.map(lambda x: f"{{% if {x} %}}a{{% endif %}}"),
    expressions.map(lambda x: f"{{% for m in {x} %}}{{{{ m }}}}{{% endfor %}}"),
    st.sampled_from(
        ["{%", "%}", "{{", "}}", "{#", "#}", "{% endfor %}", "{% macro m() %}", "{%- break %}", "text\n", "\0"]
    ),
)


@given(st.lists(pieces, max_size=6).map("".join))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_whatever_a_template_is_made_of_it_gives_text_or_one_sentence(template: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "CPU_SECONDS", 1)
        try:
            text = chat_template.render(template, [{"role": "user", "content": "hi"}], {"eos_token": "</s>"})
        except MinillmError as error:
            assert is_one_sentence(str(error)) and "chat template" in str(error)
        else:
            assert type(text) is str and len(text) <= chat_template.MAX_OUTPUT


def test_template_that_sleeps_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.01)
    assert "come to an end" in refusal(lambda: chat_template.render("x", [{"role": "user", "content": "hi"}], {}))


def conversations(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize("case", ["nested loops", "doubling text", "large output", "its own refusal"])
def test_hostile_template_among_many_conversations(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    template = "{% if messages[0].content == 'bad' %}" + TEMPLATES[case] + "{% else %}ok{% endif %}"
    many = conversations(*["good"] * 9, "bad", "good")
    assert "chat template" in refusal(lambda: list(chat_template.render_all(template, many, {})))


def test_conversations_that_are_rendered_together_have_their_limits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 30)
    template = "{{ messages[0].content * 10 }}"
    assert list(chat_template.render_all(template, conversations("a", "b", "c"), {})) == ["a" * 10, "b" * 10, "c" * 10]
    for many in (conversations("a", "b", "cc"), conversations("aaaa", "b", "c")):
        message = refusal(lambda: list(chat_template.render_all(template, many, {})))  # noqa: B023
        assert "writes more than 30 characters" in message
    # Each of 100 takes some tenths of a second, and all of them get two.
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    slow = "{% for i in range(99999) %}{% if i * i % 7 == 8 %}{% endif %}{% endfor %}" * 20
    assert "too much time" in refusal(lambda: list(chat_template.render_all(slow, conversations(*["x"] * 100), {})))


@pytest.mark.parametrize(
    ("texts", "processes"),
    [
        ([], []),
        (["a"] * 3, [3]),
        (["a"] * 9, [4, 4, 1]),
        (["a" * 50, "a" * 50, "a"], [2, 1]),
        (["a" * 51, "a" * 50, "a"], [1, 2]),
        (["a" * 500, "a", "a" * 500], [1, 1, 1]),
    ],
)
def test_a_process_renders_so_many_conversations_of_so_many_characters(
    texts: list[str], processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TOGETHER", 4)
    monkeypatch.setattr(chat_template, "TOGETHER_CHARACTERS", 100)
    started, run = [], subprocess.run

    def counted(*args: Any, input: bytes, **kwargs: Any) -> Any:
        started.append(len(json.loads(input)["conversations"]))
        return run(*args, input=input, **kwargs)

    monkeypatch.setattr(subprocess, "run", counted)
    rendered = list(chat_template.render_all("<{{ messages[0].content }}>", conversations(*texts), {}))
    assert rendered == [f"<{text}>" for text in texts]
    assert started == processes


def test_conversations_that_are_rendered_together_know_nothing_of_each_other() -> None:
    template = (
        "{% if seen is defined %}{{ seen }}{% endif %}{% set seen = messages[0].content %}"
        "{% set n = namespace(x=0) %}{% set n.x = n.x + 1 %}{{ n.x }}{{ messages | length }}{{ messages[0].content }}"
    )
    rendered = list(chat_template.render_all(template, conversations("a", "é\n\x1e", "", '"]', "\U0001f44b"), {}))
    assert rendered == ["11a", "11é\n\x1e", "11", '11"]', "11\U0001f44b"]


def test_half_of_a_surrogate_pair_that_a_template_writes_becomes_a_question_mark() -> None:
    assert list(chat_template.render_all("{{ '\\ud800' }}.", conversations("a", "b"), {})) == ["?."] * 2


def test_templates_have_the_helpers_they_are_written_for() -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content | tojson }}\n"
        "{%- endfor %} {{ strftime_now('%Y') | length }} {{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "<é> '"}, {"role": "user", "content": "no"}]
    transformers = pytest.importorskip("transformers")
    (expected,), _ = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert chat_template.render(template, messages, {"bos_token": "<s>"}) == expected
    assert expected == '"<é> \'" 4 <s>TrueTrue'


# --- Memory: what a file may cost, however it is written


SCALE = 8  # the bounds are tested on files an eighth as long, with an eighth of the memory


def in_little_memory(code: str, folder: Path) -> list[str]:
    """The lines that `code` prints in a process that may take 1.25 GiB / SCALE beyond what its imports took."""
    prelude = f"""
import resource
from pathlib import Path
import torch
from minillm import checkpoint, checkpoint_config, gguf_file
from minillm.errors import MinillmError
for module, limits in ((checkpoint, ["MAX_HEADER_BYTES"]), (checkpoint_config, ["MAX_JSON_BYTES"]),
                       (gguf_file, ["MAX_HEADER_BYTES", "MAX_ITEMS"])):
    for limit in limits:
        setattr(module, limit, getattr(module, limit) // {SCALE})
folder = Path({str(folder)!r})
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
mapped = max(path.stat().st_size for path in folder.iterdir())  # such a file is no memory, and counts as such
resource.setrlimit(resource.RLIMIT_AS, (taken + mapped + 5 * 2**28 // {SCALE},) * 2)
"""
    done = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout.splitlines()


def sparse(path: Path, beginning: bytes, size: int) -> None:
    """A file that takes no disk: a beginning, and zeros."""
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(size)


SPLIT = {"type": "Split", "pattern": {"Regex": "((a{1,1000}){1,1000}){1,100}"}, "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
GREEDY_TOKENIZERS: dict[str, dict[str, Any]] = {
    "doublings": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "doublings in decoding": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 100}},
    "repeated parts": {"pre_tokenizer": SPLIT},
    "a strip of 2^40": {"decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 0}},
    "an unknown decoder": {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
    "copies": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("case", GREEDY_TOKENIZERS)
def test_tokenizer_json_that_asks_for_memory_is_refused_before_the_library_reads_it(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(minillm.load("tiny", "cpu")[1].backend.to_str()) | GREEDY_TOKENIZERS[case]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", lambda path: pytest.fail("read"))
    assert "not supported" in refusal(lambda: tokenizer_from_folder(folder))


def test_padding_to_any_length_is_switched_off_before_it_is_used(folder: Path) -> None:
    content = json.loads(minillm.load("tiny", "cpu")[1].backend.to_str())
    for padding in ({"strategy": {"Fixed": 2**40}}, {"strategy": "BatchLongest", "pad_to_multiple_of": 2**40}):
        (folder / "tokenizer.json").write_text(json.dumps(content | {"padding": PADDING | padding}))
        assert tokenizer_from_folder(folder).encode("ab") == [97, 98]


def test_pattern_that_backtracks_without_end_is_one_sentence(folder: Path) -> None:
    content = json.loads(minillm.load("tiny", "cpu")[1].backend.to_str())
    content["pre_tokenizer"] = SPLIT | {"pattern": {"Regex": "(x+x+)+y"}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("xxy") == [120, 120, 121]
    assert "fails at this text" in refusal(lambda: tokenizer.encode("x" * 40))


def test_tokens_that_are_no_unicode_are_in_no_vocabulary(folder: Path) -> None:
    minillm.load("tiny", "cpu")[1].backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800", "bos_token": {"content": "\\udfff"}}')
    assert tokenizer_from_folder(folder).stop_tokens == frozenset()


ITEMS = gguf_file.MAX_ITEMS // SCALE
GREEDY_GGUF: list[tuple[bytes, str]] = [  # all are 4 GiB long, on no disk: zeros follow
    (gguf_bytes([text("k") + struct.pack("<IQ", 8, 2**31)], []), "more than 8 MiB"),  # one text
    (gguf_bytes([struct.pack("<Q", 2**31)], [], n_metadata=1), "more than 8 MiB"),  # one name
    (gguf_bytes([array("k", 0, 2**31)], []), "items"),
    (gguf_bytes([array("k", 12, ITEMS)], []), "no token_embd"),  # as many numbers as may be
    (gguf_bytes([array("k", 8, ITEMS, text("ab") * ITEMS)], []), "no token_embd"),  # as many texts
    (gguf_bytes([array(str(i), 0, ITEMS // 4, bytes(ITEMS // 4)) for i in range(5)], []), "items"),  # many together
    (gguf_bytes(METADATA, [*TENSORS, tensor("rope_freqs.weight", [2**29])], DATA), "RoPE factors"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is set on Linux only")
def test_headers_and_json_take_no_more_memory_than_is_said(folder: Path) -> None:
    """All in one process: starting it takes longer than reading them."""
    for number, (beginning, _) in enumerate(GREEDY_GGUF):
        sparse(folder / f"{number}.gguf", beginning, 2**32)
    size = checkpoint_config.MAX_JSON_BYTES // SCALE
    (folder / "full.json").write_bytes(b'{"a":[' + b"{}," * ((size - 12) // 3) + b"{}]}")
    sparse(folder / "large.json", b"", size + 1)
    entry = '"%06x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    count = checkpoint.MAX_HEADER_BYTES // SCALE // (len(entry % 0) + 1)
    header = "{" + ",".join(entry % i for i in range(count)) + "}"
    (folder / "model.safetensors").write_bytes(header_bytes(header.encode()))
    code = f"""
def said(call):
    try:
        call()
    except MinillmError as error:
        print(error)
for number in range({len(GREEDY_GGUF)}):
    said(lambda: checkpoint.load_gguf(folder / f"{{number}}.gguf", "cpu"))
print(len(checkpoint_config.read_json(folder / "full.json")["a"]))
said(lambda: checkpoint_config.read_json(folder / "large.json"))
said(lambda: checkpoint.load_safetensors(folder, "cpu"))
"""
    *ggufs, items, large, tensors = in_little_memory(code, folder)
    for line, (_, words_in_message) in zip(ggufs, GREEDY_GGUF, strict=True):
        assert words_in_message in line and is_one_sentence(line)
    assert int(items) == (size - 12) // 3 + 1 and "too large" in large and "lacks 11 tensors" in tensors
    sparse(folder / "model.safetensors", struct.pack("<Q", checkpoint.MAX_HEADER_BYTES + 1), 2**25)
    assert "more than any model's" in refusal(lambda: load_safetensors(folder, "cpu"))


def test_tensors_that_share_bytes_are_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a file of a megabyte could become a thousand layers of a megabyte each."""
    shared = [tensor(f"{name}.weight", dims) for name, dims in SHAPES.items()]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(METADATA, shared, bytes(512)))
    monkeypatch.setattr(checkpoint, "fill_model", lambda *args: pytest.fail("filled"))
    assert "overlap" in refusal(lambda: load_gguf(path, "cpu"))


# --- Files that are no files


NOT_FILES = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
@pytest.mark.parametrize("name", [*NOT_FILES, "generation_config.json", "m.gguf"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_pipes_and_devices_are_not_opened(name: str, kind: str, folder: Path) -> None:
    """To open a pipe waits for its writer, without an end, and a device gives bytes without an end."""
    minillm.load("tiny", "cpu")[1].backend.save(str(folder / "tokenizer.json"))
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    refusal(lambda: minillm.load(str(folder / name if name == "m.gguf" else folder), "cpu"))


# --- Lines of JSON: traces, prompts, answers


ARGS = argparse.Namespace(max_new_tokens=4, temperature=0.0, top_k=None, top_p=None, min_p=None, seed=3)
LINES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*trace.TRACE_KEYS, "prompt", "max_new_tokens", "temperature", "seed", "text"]),
                inner,
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=4))
def test_lines_of_any_kind_are_read_or_refused_in_a_sentence(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    arrivals, problems = trace.read_trace(path)
    problems += [f"Line {line}: {problem}" for line, problem in read_questions(path, ARGS)[1]]
    assert all(is_one_sentence(problem) and len(problem) < 400 for problem in problems), problems
    if arrivals:  # what was taken can be served
        short = [replace(arrival, prompt=1, output_tokens=1) for arrival in arrivals]
        assert len(workload.simulate(short, lambda n, lengths: 1.0, max_batch=2).requests) == len(arrivals)
    try:
        answer_file.answered(path, {"a": "x", 1: "y"})
    except MinillmError as error:
        assert is_one_sentence(str(error))
    assert path.read_bytes() == before


def test_files_and_lines_of_json_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "16 MiB" in refusal(lambda: json_lines.parse_line(b"[" * (json_lines.MAX_LINE_BYTES + 1)))
    monkeypatch.setattr(json_lines, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'"a"\n' * (1 << 18))
    assert len(json_lines.numbered_lines(path)) == 1 << 18
    path.write_bytes(b'"a"\n' * (1 << 18) + b"\n")
    assert "split it" in refusal(lambda: json_lines.numbered_lines(path))
    if Path("/dev/zero").exists():
        assert "split it" in refusal(lambda: json_lines.numbered_lines("/dev/zero"))


def test_lengths_of_a_trace_take_no_memory() -> None:
    arrivals = [trace.Arrival(i, 0.0, trace.MOST_TOKENS, 1) for i in range(10_000)]  # 80 GB as lists of ids
    assert len(workload.simulate(arrivals, lambda n, lengths: 1.0, max_batch=5_000).steps) == 2
