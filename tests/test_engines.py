"""The engines that are set beside each other: the same weights by value, the stage that is named, nothing kept from before."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    SHAPES,
    lively_model,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)

from minillm.config import known_model
from minillm.errors import MinillmError
from minillm.stages import batching, gqa, kernels
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.quantization import quantize
from minillm.stages.slotted_cache import SlottedCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # as Python does for a script there

import engines as engines_module
from engines import Compiled, Minillm, Quantized, Transformers, is_installed, llama_of_transformers

needs_transformers = pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")

LLAMAS = {
    "llama": replace(SHAPES["llama"], n_heads=4),  # transformers wants heads that divide the width
    "multi-query": SHAPES["multi-query"],
    "multi-head": SHAPES["multi-head"],
}
TINY = known_model("tiny")  # groups of 32 divide its widths


@needs_transformers
@pytest.mark.parametrize("shape", LLAMAS)
def test_transformers_gets_the_same_weights(shape: str) -> None:
    model = lively_model(LLAMAS[shape])
    tokens = torch.tensor([random_prompt(30, 97)])
    with torch.inference_mode():
        theirs = llama_of_transformers(model)(tokens).logits
    torch.testing.assert_close(theirs, logits_whole(model, tokens), rtol=0, atol=1e-4)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_engines_give_n_tokens_and_in_fp32_the_same(dtype: torch.dtype) -> None:
    model = lively_model(LLAMAS["llama"], dtype=dtype)
    prompts = [random_prompt(20, 97, seed) for seed in range(4)]
    ours, theirs = Minillm(model), Transformers(model)
    assert ours.precision == theirs.precision == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for n, B in ((1, 1), (2, 1), (30, 1), (1, 4), (30, 4)):
        answers, found = ours.generate(prompts[:B], n), theirs.generate(prompts[:B], n)
        assert [len(answer) for answer in answers] == [len(answer) for answer in found] == [n] * B
        assert dtype != torch.float32 or found == answers


def test_minillm_runs_its_newest_stage_for_one_prompt_and_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[str, int]] = []
    for cache in (GroupedKVCache, SlottedCache):
        usual = cache.attend

        def noting(self: Any, layer: int, q: torch.Tensor, *kv: torch.Tensor, usual: Any = usual) -> torch.Tensor:
            passes.append((type(self).__name__, q.shape[2]))
            return usual(self, layer, q, *kv)

        monkeypatch.setattr(cache, "attend", noting)
    engine = Minillm(lively_model(LLAMAS["llama"]))
    engine.generate([[1, 2, 3]], 2)
    assert passes == [("GroupedKVCache", 3)] * 2 + [("GroupedKVCache", 1)] * 2  # two layers, two passes
    passes.clear()
    engine.generate([[1, 2, 3], [4, 5, 6]], 2)  # all at once
    assert passes == [("SlottedCache", 6)] * 2 + [("SlottedCache", 2)] * 2


@pytest.mark.parametrize("precision, kind", [("int8", "FastInt8Linear"), ("int4", "FastInt4Linear")])
def test_quantized_engines_run_the_same_stages_on_quantized_weights(precision: str, kind: str) -> None:
    model = lively_model(TINY, dtype=torch.bfloat16)
    engine, prompts = Quantized(model, precision), [random_prompt(12, 97, seed) for seed in range(3)]
    assert (engine.name, engine.precision) == ("minillm", precision)
    assert type(engine.model.blocks[0].attention.qkv).__name__ == kind and engine.model.dtype == torch.bfloat16
    quantized = quantize(model, precision)
    assert engine.generate(prompts[:1], 9) == [gqa.generate(quantized, prompts[0], 9).tokens]
    together = batching.generate(quantized, prompts, 9, max_batch=3)
    assert engine.generate(prompts, 9) == [answer.tokens for answer in together]


def test_the_compiled_engine_is_the_kernels_stage_on_int4_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, usual = lively_model(TINY), [], kernels.generate

    def eager(model: Any, prompt: list[int], n: int) -> Any:
        asked.append((type(model.blocks[0].attention.qkv).__name__, n))
        return usual(model, prompt, n, compiled=False)

    monkeypatch.setattr(kernels, "generate", eager)  # compiling is tested where the stage is
    engine, prompt = Compiled(model), random_prompt(12, 97)
    assert (engine.name, engine.precision) == ("minillm", "compiled int4")
    assert engine.generate([prompt], 9) == [gqa.generate(quantize(model, "int4"), prompt, 9).tokens]
    assert asked == [("FastInt4Linear", 9)]


def test_eager_steps_never_go_by_the_name_of_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fn: Any, device: torch.device) -> Any:
        raise RuntimeError("there is no compiler here")

    monkeypatch.setattr(kernels, "_compile", broken)
    with pytest.raises(MinillmError, match=r"leave it out with --engines: .*there is no compiler here"):
        Compiled(lively_model(TINY)).generate([[1, 2, 3]], 4)


@needs_transformers
def test_transformers_runs_fused_attention_a_cache_and_nothing_on_the_logits() -> None:
    model = llama_of_transformers(lively_model(LLAMAS["llama"]))
    assert model.config._attn_implementation == "sdpa"
    settings = model.generation_config
    assert settings.use_cache and not settings.do_sample and settings.eos_token_id is None
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@needs_transformers
@pytest.mark.parametrize("shape, words", [("qwen3", "qwen3 model"), ("llama3", "rotary frequencies")])
def test_a_model_that_would_not_be_the_same_there_is_refused(shape: str, words: str) -> None:
    with pytest.raises(MinillmError, match=words) as error:
        llama_of_transformers(lively_model(SHAPES[shape]))
    assert str(error.value).endswith(".")


def test_llama_cpp_forgets_before_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in that does what llama-cpp-python does: it keeps what it has read until it is told to forget.
    class Llama:
        def __init__(self, *_: object, **__: object) -> None:
            self.kept: list[int] = []
            self.read: list[int] = []

        def reset(self) -> None:
            self.kept = []

        def generate(self, prompt: list[int], temp: float) -> Iterator[int]:
            known = len(self.kept) if prompt[: len(self.kept)] == self.kept else 0
            self.read.append(len(prompt) - known)
            self.kept = list(prompt)
            yield from range(100)

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    monkeypatch.setattr(engines_module, "default_model_path", lambda: Path("model.gguf"))
    engine = engines_module.LlamaCpp(torch.device("cpu"), context=64)
    for _ in range(3):
        assert engine.generate([[5, 6, 7]], 4) == [[0, 1, 2, 3]]
    assert engine.generate([[5, 6, 7, 8]], 4) == [[0, 1, 2, 3]]
    assert engine.model.read == [3, 3, 3, 4]  # the whole prompt every time


@pytest.mark.skipif(not is_installed("llama.cpp"), reason="llama-cpp-python is not installed")
def test_llama_cpp_starts_every_answer_anew() -> None:
    engine = engines_module.LlamaCpp(torch.device("cpu"), context=64)
    prompt = [504, 3575, 282, 260]
    (first,) = engine.generate([prompt], 8)
    assert len(first) == 8 and engine.generate([prompt], 8) == [first]
    assert engine.model.n_tokens >= len(prompt) + 7  # the prompt was read again, not kept
