"""Hugging Face transformers as the oracle: random tiny models of every family, and the real SmolLM2-135M.

Logits of the tiny models must lie within 1e-4. Measured: at most 3.1e-5 in 1,060 tokens, 1.3e-5 in 100; logits reach 10.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import enliven, logits_through, logits_whole, one_thread, random_prompt  # noqa: F401 (a fixture)
from torch import Tensor
from torch.func import functional_call

from minillm.checkpoint import load_safetensors
from minillm.model import Transformer
from minillm.stages import batching, gqa, kv_cache, naive, static_batching
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import KVCache
from minillm.stages.naive import NoCache

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}

# family -> its configuration class, model class, and what is special in it
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, head_dim apart": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 20}),
    "llama, one KV head": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, a KV head a query head": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama, theta 500,000": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": PLAIN | {"rope_theta": 5e5}}),
    "llama3 scaling": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama3 scaling, tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2, tied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 20, "rms_norm_eps": 1e-6}),
    "qwen3, tied": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "mistral, window 7": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7, "head_dim": 16}),
    "mistral, window 64": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 64, "head_dim": 16}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
VOCAB = 131


class Pair:
    """The same random weights twice: in transformers, and in minillm through a folder that transformers wrote."""

    def __init__(self, family: str, folder: Path) -> None:
        config_class, model_class, special = FAMILIES[family]
        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": PLAIN,
            "rms_norm_eps": 1e-5,
        }
        config = getattr(transformers, config_class)(**settings | special, attn_implementation="eager")
        self.theirs = getattr(transformers, model_class)(config).float().eval()
        enliven(self.theirs, seed=7)
        self.theirs.save_pretrained(folder)
        self.ours = load_safetensors(folder, "cpu", torch.float32)

    @torch.inference_mode()
    def their_logits(self, tokens: Tensor) -> Tensor:
        return self.theirs(tokens, use_cache=False).logits


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {family: Pair(family, tmp_path_factory.mktemp("model")) for family in FAMILIES}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@every_family
def test_loaded_model_has_as_many_parameters_as_the_original(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    assert (
        sum(p.numel() for p in pair.ours.parameters())
        == pair.theirs.num_parameters()
        == pair.ours.config.parameter_count
    )


@every_family
def test_logits_equal_those_of_transformers_without_a_cache(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    tokens = torch.tensor([random_prompt(100, VOCAB, seed) for seed in range(2)])
    expected = pair.their_logits(tokens)
    assert expected.abs().max() > 3  # logits that differ: a flat model would agree with anything
    assert_near(logits_whole(pair.ours, tokens), expected)


@every_family
def test_logits_equal_those_of_transformers_in_chunks_of_every_size(family: str, pairs: dict[str, Pair]) -> None:
    pair, n = pairs[family], 48
    tokens = torch.tensor([random_prompt(n, VOCAB, seed=5)])
    expected = pair.their_logits(tokens)
    for size in range(1, n + 1):
        for make in (KVCache, GroupedKVCache):
            assert_near(logits_through(pair.ours, tokens, make(pair.ours, n), size), expected)


@every_family
def test_logits_equal_those_of_transformers_past_position_1000(family: str, pairs: dict[str, Pair]) -> None:
    pair, n = pairs[family], 1060
    tokens = torch.tensor([random_prompt(n, VOCAB, seed=6)])
    expected = pair.their_logits(tokens)
    assert_near(logits_whole(pair.ours, tokens), expected)
    cache = KVCache(pair.ours, n)
    first, rest = (
        logits_through(pair.ours, tokens[:, :1030], cache, 256),
        logits_through(pair.ours, tokens[:, 1030:], cache, 1),
    )
    assert_near(torch.cat([first, rest], dim=1), expected)


class Later(NoCache):
    """No cache, and a prompt that begins at position 3,000."""

    def positions(self, n_tokens: int) -> Tensor:
        return super().positions(n_tokens) + 3000


@every_family
def test_logits_equal_those_of_transformers_from_position_3000_on(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    tokens = torch.tensor([random_prompt(60, VOCAB, seed=8)])
    with torch.inference_mode():
        expected = pair.theirs(tokens, position_ids=torch.arange(3000, 3060)[None], use_cache=False).logits
        assert_near(pair.ours(tokens, Later(pair.ours)), expected)


@every_family
def test_greedy_tokens_equal_those_of_transformers(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    for length in (1, 60):
        prompt = random_prompt(length, VOCAB, seed=length)
        [expected] = their_tokens(pair.theirs, [prompt], 16)
        assert naive.generate(pair.ours, prompt, 16).tokens == expected
        assert kv_cache.generate(pair.ours, prompt, 16).tokens == expected
        assert gqa.generate(pair.ours, prompt, 16).tokens == expected


@every_family
def test_ragged_batches_give_the_greedy_tokens_of_transformers(family: str, pairs: dict[str, Pair]) -> None:
    pair, prompts = pairs[family], [random_prompt(length, VOCAB, seed=length) for length in (3, 40, 1, 17, 8)]
    expected = [their_tokens(pair.theirs, [prompt], 16)[0] for prompt in prompts]
    for generate in (static_batching.generate, batching.generate):
        for max_batch in (2, 5):
            assert [g.tokens for g in generate(pair.ours, prompts, 16, max_batch=max_batch)] == expected


def their_tokens(model: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy tokens by transformers' own generate, prompts padded on the left, going on after an end token."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)
    return out[:, longest:].tolist()


# --- SmolLM2-135M, the real thing ------------------------------------------------------------------------------------

LAYERS, C, HQ, HKV, D, FF, V = 30, 576, 9, 3, 64, 1536, 49152  # its published shape

LONG = (
    "The roofline model asks two questions of a program: how many operations does it do, and how many bytes does it move? "
    "Their quotient is the arithmetic intensity. A machine has a highest rate of operations and a highest rate of bytes, and "
    "whichever is reached first limits the program. A matrix that is multiplied with one vector is read once and used once, so "
    "memory is the limit. A matrix that is multiplied with a thousand vectors is read once and used a thousand times, so the "
    "arithmetic units are the limit. When a language model reads its prompt, it multiplies each weight with every token of the "
    "prompt at once. When it writes its answer, it multiplies each weight with a single token, over and over. That is why the "
    "first token of an answer takes a while, why those that follow come at an even pace, and why the pace depends on how "
    "quickly the weights can be read rather than on how quickly they can be multiplied. Several answers can be written at the "
    "same time: then each weight that is read serves all of them, and the intensity grows with their number. The keys and "
    "values of past tokens do not share this fate. Each answer has its own, and they have to be read in full for every token. "
    "So a long conversation is slow for another reason than a short one. A cache that keeps fewer bytes for each token, by "
    "sharing keys among heads or by storing them in fewer bits, moves the limit. In one sentence, the lesson is that"
)
TEXTS = {
    "English": "The history of the steam engine begins",
    "German": "Als Gregor Samsa eines Morgens",
    "Chinese": "人工智能的未来是",
    "Arabic": "كان يا ما كان",
    "code": "def fibonacci(n: int) -> int:\n    if n",
    "emoji": "My mood today: 😀🎉👩‍🚀",
    "chat": "Why is the sky blue? Answer in one sentence.",
    "long": LONG,
}
PARAGRAPH = (
    "The Moon is the only natural satellite of the Earth. It orbits at an average distance of about 384,400 kilometres, and "
    "it always shows the same face to us, because it turns once on its axis in the time that it takes to go around the Earth. "
    "Its gravity causes the tides of the oceans. The first human beings to walk on the Moon were Neil Armstrong and Buzz "
    "Aldrin, in July 1969, during the Apollo 11 mission."
)


def rows_in_half_split_order(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo what llama.cpp's converter does to the rows of q and k.

    The converter reads a head's rows as (2, D/2) and swaps the two axes, so that the numbers which are turned together, i and
    i + D/2, come to lie side by side at 2i and 2i + 1. Written here row by row, apart from how the package does it.
    """
    half = weight.shape[0] // n_heads // 2
    out = np.empty_like(weight)
    for head in range(n_heads):
        base = head * 2 * half
        for i in range(half):
            out[base + i] = weight[base + 2 * i]
            out[base + half + i] = weight[base + 2 * i + 1]
    return out


@pytest.fixture(scope="module")
def stored_weights(smollm2: tuple[Transformer, Any]) -> dict[str, Tensor]:
    """The checkpoint by Hugging Face names, read with the gguf package's own reader and none of this package's code."""
    gguf = pytest.importorskip("gguf")
    from minillm.download import default_model_path

    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
    weights = {}
    for tensor in gguf.GGUFReader(default_model_path()).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if "attn_q." in tensor.name:
            values = rows_in_half_split_order(values, HQ)
        if "attn_k." in tensor.name:
            values = rows_in_half_split_order(values, HKV)
        name = f"model.layers.{block}.{names[rest]}" if tensor.name.startswith("blk.") else names[tensor.name]
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32))
    return weights


@pytest.fixture(scope="module")
def reference(stored_weights: dict[str, Tensor]) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=C,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HQ,
        num_key_value_heads=HKV,
        head_dim=D,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(stored_weights, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []
    model.tie_weights()
    return model


def test_smollm2_has_the_published_shape(smollm2: tuple[Transformer, Any]) -> None:
    config = smollm2[0].config
    shape = (
        config.n_layers,
        config.d_model,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.d_ff,
        config.vocab_size,
    )
    assert shape == (LAYERS, C, HQ, HKV, D, FF, V)
    assert (config.rope_theta, config.norm_eps, config.max_positions, config.tied_embeddings) == (1e5, 1e-5, 8192, True)
    assert sum(p.numel() for p in smollm2[0].parameters()) == 134_515_008


def test_smollm2_weights_equal_those_read_independently(
    smollm2: tuple[Transformer, Any], stored_weights: dict[str, Tensor]
) -> None:
    model = smollm2[0]
    assert torch.equal(model.embed.weight, stored_weights["model.embed_tokens.weight"])
    assert torch.equal(model.head.weight, stored_weights["model.embed_tokens.weight"])
    assert torch.equal(model.norm.weight, stored_weights["model.norm.weight"])
    for i, block in enumerate(model.blocks):
        theirs = {
            name.removeprefix(f"model.layers.{i}."): w for name, w in stored_weights.items() if f".layers.{i}." in name
        }
        q, k, v = block.attention.qkv.weight.split([HQ * D, HKV * D, HKV * D])
        gate, up = block.mlp.gate_up.weight.split([FF, FF])
        ours = {
            "input_layernorm.weight": block.attention_norm.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": block.attention.o.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": block.mlp.down.weight,
        }
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            assert torch.equal(weight, theirs[name]), f"layer {i}: {name}"


def prompt_of(text: str, tokenizer: Any) -> list[int]:
    return tokenizer.chat(TEXTS[text]) if text == "chat" else tokenizer.encode(TEXTS[text])


@pytest.fixture(scope="module")
def their_answers(smollm2: tuple[Transformer, Any], reference: Any) -> dict[str, list[int]]:
    prompts = {text: prompt_of(text, smollm2[1]) for text in TEXTS}
    long = prompts.pop("long")
    short_answers = their_tokens(reference, list(prompts.values()), 48)  # one batch: it takes as long as one prompt
    return dict(zip(prompts, short_answers, strict=True)) | {"long": their_tokens(reference, [long], 48)[0]}


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_the_same_48_tokens_alone_and_in_transformers(
    text: str, smollm2: tuple[Transformer, Any], their_answers: dict[str, list[int]]
) -> None:
    model, tokenizer = smollm2
    prompt, expected = prompt_of(text, tokenizer), their_answers[text]
    assert len(expected) == 48
    assert kv_cache.generate(model, prompt, 48).tokens == gqa.generate(model, prompt, 48).tokens == expected
    # A naive token costs a pass over all before it. After the two longest prompts the first few must do.
    n = {"long": 4, "chat": 12}.get(text, 48)
    assert naive.generate(model, prompt, n).tokens == expected[:n]


@pytest.mark.parametrize("max_batch", [3, 8])
@pytest.mark.parametrize("generate", [static_batching.generate, batching.generate], ids=["static", "continuous"])
def test_smollm2_gives_each_of_eight_ragged_prompts_the_tokens_of_transformers(
    generate: Any, max_batch: int, smollm2: tuple[Transformer, Any], their_answers: dict[str, list[int]]
) -> None:
    model, tokenizer = smollm2
    prompts, limits = [prompt_of(text, tokenizer) for text in TEXTS], [16, 5, 16, 9, 16, 12, 16, 7]
    assert len({len(prompt) for prompt in prompts}) >= 6
    generations = generate(model, prompts, limits, max_batch=max_batch)
    expected = [their_answers[text][:n] for text, n in zip(TEXTS, limits, strict=True)]
    assert [generation.tokens for generation in generations] == expected


def test_smollm2_logits_equal_those_of_transformers(smollm2: tuple[Transformer, Any], reference: Any) -> None:
    model, tokenizer = smollm2
    tokens = torch.tensor([tokenizer.encode(LONG)])
    assert tokens.shape[1] >= 250
    with torch.inference_mode():
        expected = reference(tokens, use_cache=False).logits
    # Fp32 through 30 layers. Logits reach 42, of which 2e-4 is 40 units of rounding (eps). Measured: 5e-5.
    for size in (tokens.shape[1], 61):
        actual = logits_through(model, tokens, KVCache(model, tokens.shape[1]), size)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


@torch.inference_mode()
def nats_per_token(model: Transformer, tokens: Tensor, weights: dict[str, Tensor] | None = None) -> float:
    """Mean negative log-likelihood of a text, each token predicted from those before it."""
    logits = functional_call(model, weights or {}, (tokens, NoCache(model)))
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()


def test_smollm2_predicts_english_and_only_with_its_rows_in_the_right_order(smollm2: tuple[Transformer, Any]) -> None:
    # The one check that needs no other implementation: a wrong convention shared by loader and reference would show here.
    model, tokenizer = smollm2
    tokens = torch.tensor([tokenizer.encode(PARAGRAPH)])
    as_stored = {}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.qkv.weight.split([HQ * D, HKV * D, HKV * D])
        # Put q and k back in the order of the file, pairs side by side.
        q, k = (w.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).reshape(w.shape) for w in (q, k))
        as_stored[f"blocks.{i}.attention.qkv.weight"] = torch.cat([q, k, v])
    right, wrong = nats_per_token(model, tokens), nats_per_token(model, tokens, as_stored)
    assert right < 2.3  # measured 1.97, and 3.78 for the wrong order
    assert wrong > right + 1.3
