"""The table of traps is whole; and what several stages promise together."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SHAPES,
    STAGES,
    assert_same_logits,
    fresh_memory_full_of_nan,
    lively_model,
    logits_through,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from torch import Tensor
from traps import TRAPS

from minillm.checkpoint_config import config_from_gguf
from minillm.latent_config import LatentConfig
from minillm.model import Transformer
from minillm.stages import batching, naive, speculative, static_batching
from minillm.stages.drafters import ModelDrafter
from minillm.stages.mla import LatentCache, random_latent_model
from minillm.stages.quantized_cache import QuantizedKVCache
from minillm.stages.slotted_cache import SlottedCache
from minillm.stages.static_batching import PaddedCache

ROOT = Path(__file__).parents[1]
THREAD = re.compile(r"[\w.-]+/[\w.-]+(#\d+| docs/[\w./]+)")

# --- The table -------------------------------------------------------------------------------------------------------


@cache
def functions_in(file: str) -> dict[str, str]:
    """The test functions of a file, each with its decorators as text."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {
        node.name: " ".join(map(ast.unparse, node.decorator_list))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_table_has_fifty_rows_of_three_sentences_and_threads() -> None:
    assert list(TRAPS) == list(range(1, 51))
    assert len({trap.name for trap in TRAPS.values()}) == 50
    for trap in TRAPS.values():
        assert trap.name and trap.right.rstrip(")").endswith(".")
        assert trap.threads and all(THREAD.fullmatch(thread) for thread in trap.threads)
        # Tested, or a reason why there is nothing to test: one of the two.
        assert bool(trap.faults) != bool(trap.cannot)
        assert not trap.cannot or trap.cannot.endswith(".")


@pytest.mark.parametrize("number", [number for number, trap in TRAPS.items() if trap.faults])
def test_a_row_names_tests_that_run_everywhere_and_faults_that_can_be_put_in(number: int) -> None:
    for fault in TRAPS[number].faults:
        file, _, name = fault.test.partition("::")
        decorators = functions_in(file)[name.partition("[")[0]]
        assert not re.search(r"skip|gpu|cuda|xfail", decorators), fault.test
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.old
        changed = (ROOT / fault.file).read_text().replace(fault.old, fault.new)
        ast.parse(changed)
        assert fault.new != fault.old


# --- What several stages promise --------------------------------------------------------------------------------------


@contextmanager
def fed(model: Transformer) -> Iterator[list[tuple[int, int]]]:
    """Notes each token that the model is given, with its position."""
    tokens: list[Tensor] = []
    pairs: list[tuple[int, int]] = []

    def note(_: Any, args: tuple[Tensor, Any]) -> None:
        B, T = tokens[-1].shape
        pairs.extend(zip(args[0].expand(B, T).flatten().tolist(), tokens[-1].flatten().tolist(), strict=True))

    # The embedding is asked after the rotation: so tokens are taken where they enter.
    original = model.hidden

    def hidden(given: Tensor, cache: Any) -> Tensor:
        tokens.append(given)
        return original(given, cache)

    hook = model.rope.register_forward_pre_hook(note)
    model.hidden = hidden  # type: ignore[method-assign]
    try:
        yield pairs
    finally:
        hook.remove()
        del model.hidden


def numbered(text: list[int]) -> set[tuple[int, int]]:
    """Every token of a text but the last, which is never fed back, with its place."""
    return set(enumerate(text[:-1]))


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("stage", [*STAGES, "speculative"])
def test_token_i_of_a_text_is_fed_at_position_i_in_every_stage(stage: str, length: int) -> None:
    model, prompt = lively_model(SHAPES["llama"], dtype=torch.float64), random_prompt(length, 97)
    expected = prompt + naive.generate(model, prompt, 12).tokens
    with fed(model) as pairs:
        if stage == "speculative":  # which drafts for itself, so what it feeds is right
            speculative.generate(model, prompt, 12, drafter=ModelDrafter(model), lookahead=3)
        else:
            STAGES[stage](model, prompt, 12)
    assert set(pairs) == numbered(expected)


BATCHED = {
    "batching_static": static_batching.generate,
    "batching": batching.generate,
    "speculative": lambda model, *args: speculative.generate_batch(model, *args, drafter=ModelDrafter(model)),
}


@pytest.mark.parametrize("generate", BATCHED.values(), ids=BATCHED)
def test_token_i_of_each_row_is_fed_at_position_i_in_a_ragged_batch(generate: Any) -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    prompts = [random_prompt(n, 97, seed=n) for n in (3, 1, 11, 6)]
    texts = [prompt + naive.generate(model, prompt, 9).tokens for prompt in prompts]
    with fed(model) as pairs:
        generate(model, prompts, 9)
    assert set(pairs) == set.union(*map(numbered, texts))


@torch.inference_mode()
def test_ragged_chunks_equal_the_whole_prompt_in_slots() -> None:
    # Three prompts come in chunks of their own sizes, packed beside each other: 0 is a slot that brings one token more.
    for shape in ("llama", "mistral"):
        model = lively_model(SHAPES[shape], dtype=torch.float64)
        texts = [random_prompt(30, 97, seed) for seed in range(3)]
        whole = logits_whole(model, torch.tensor(texts))  # (3, 30, V)
        slots, before = SlottedCache(model, slots=4, capacity=30), [0, 0, 0]
        for new in ([4, 1, 9], [1, 1, 1], [5, 12, 2], [1, 7, 1], [3, 1, 6], [1, 1, 1]):
            slots.pack(new)
            after = [n + m for n, m in zip(before, new, strict=True)]
            packed = [token for text, n, m in zip(texts, before, after, strict=True) for token in text[n:m]]
            parts = model(torch.tensor([packed]), slots)[0].split(new)
            for row, part, n, m in zip(whole, parts, before, after, strict=True):
                assert_same_logits(part, row[n:m])
            before = after


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_chunks_equal_the_whole_prompts_under_padding(size: int) -> None:
    for shape in ("llama", "mistral"):
        model, pads = lively_model(SHAPES[shape], dtype=torch.float64), [0, 3, 10]
        texts = [random_prompt(13 - pad, 97, seed=pad) for pad in pads]
        tokens = torch.tensor([text[:1] * pad + text for text, pad in zip(texts, pads, strict=True)])
        logits = logits_through(model, tokens, PaddedCache(model, 13, torch.tensor(pads)), size)
        for row, text, pad in zip(logits, texts, pads, strict=True):
            assert_same_logits(row[pad:], logits_whole(model, torch.tensor([text]))[0])


LATENT = LatentConfig("latent-tiny", 2, 32, 4, 1, 8, 48, 97, 192, kv_rank=16, d_nope=8, d_v=8)
# Caches that no stage of the ladder makes: those of the ladder are tested with their stages.
OTHER_CACHES: dict[str, tuple[Transformer, Any]] = {
    "latent": (random_latent_model(LATENT, dtype=torch.float64), LatentCache),
    "expanded latent": (random_latent_model(LATENT, dtype=torch.float64), partial(LatentCache, absorbed=False)),
    "quantized": (lively_model(SHAPES["qwen3"], dtype=torch.float64), QuantizedKVCache),
}


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize(("model", "make"), OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_memory_that_was_never_written_reaches_no_logit(model: Transformer, make: Any, size: int) -> None:
    tokens = torch.tensor([random_prompt(14, 97)])
    expected = logits_through(model, tokens, make(model, 14), size)
    with fresh_memory_full_of_nan():
        assert_same_logits(logits_through(model, tokens, make(model, 40), size), expected)


@pytest.mark.parametrize("window", [None, 0, 4])
def test_a_gguf_file_may_say_that_it_has_no_window(window: int | None) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": 48,
        "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    if window is not None:
        metadata["llama.attention.sliding_window"] = window
    config = config_from_gguf(metadata, 97, tied=True, rope_factors=None, name="m")
    assert config.sliding_window == (window or None)
    assert replace(config, sliding_window=None).sliding_window is None
