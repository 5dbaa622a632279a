"""The kernels stage: one step for all tokens of a bucket, the same tokens as ever, and nothing where it cannot be done."""

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import (
    SHAPES,
    assert_same_logits,
    is_one_sentence,
    lively_model,
    logits_through,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)

from minillm.cli import main
from minillm.config import KNOWN_MODELS
from minillm.errors import MinillmError, UsageError
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.position import predict_stage
from minillm.sampling import Sampler
from minillm.stages import STAGES, gqa, kernels, naive, static_cache
from minillm.stages.kernels import Launched, NotCompiled
from minillm.stages.quantization import quantize
from minillm.stages.static_cache import StaticKVCache, bucket

every_shape = pytest.mark.parametrize("shape", SHAPES)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler, which torch.compile calls on a CPU"
)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 8, 16, 32 and so on, so that short texts cross their borders."""
    monkeypatch.setattr(static_cache, "SMALLEST_BUCKET", 8)


@pytest.fixture(autouse=True)
def forget_models() -> Iterator[None]:
    yield
    kernels._launched.cache_clear()


# --- The cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "columns"), [(1, 128), (127, 128), (128, 128), (129, 256), (256, 256), (257, 512)])
def test_a_bucket_is_the_next_power_of_two(n: int, columns: int) -> None:
    assert bucket(n) == columns


@every_shape
@pytest.mark.parametrize("length", [1, 7, 9])
def test_tokens_equal_naive_ones_across_buckets(shape: str, length: int, small_buckets: None) -> None:
    model, prompt = lively_model(SHAPES[shape], dtype=torch.float64), random_prompt(length, 97)
    assert kernels.generate(model, prompt, 30).tokens == naive.generate(model, prompt, 30).tokens


@every_shape
def test_chunks_of_every_size_equal_the_whole_text(shape: str, small_buckets: None) -> None:
    model, n = lively_model(SHAPES[shape], dtype=torch.float64), 19
    tokens = torch.tensor([random_prompt(n, 97, seed=3)])
    expected = logits_whole(model, tokens)
    for size in range(1, n + 1):
        assert_same_logits(logits_through(model, tokens, StaticKVCache(model, n), size), expected)


def test_rows_in_lockstep_equal_rows_alone(small_buckets: None) -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    rows = [random_prompt(13, 97, seed) for seed in range(3)]
    for size in (1, 5):
        together = logits_through(model, torch.tensor(rows), StaticKVCache(model, 13, batch=3), size)
        for row, logits in zip(rows, together, strict=True):
            assert_same_logits(logits, logits_whole(model, torch.tensor([row]))[0])


def test_a_full_cache_says_so_before_it_writes_and_stays_usable() -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    tokens = torch.tensor([random_prompt(6, 97)])
    cache = StaticKVCache(model, 6)  # whose columns are more, and are none to use
    model(tokens[:, :4], cache)
    with pytest.raises(MinillmError) as error:
        model(torch.ones(1, 3, dtype=torch.int64), cache)
    assert is_one_sentence(str(error.value)) and "holds 4 of 6 tokens and was asked for 3 more" in str(error.value)
    assert cache.length == 4
    assert_same_logits(model(tokens[:, 4:], cache), logits_whole(model, tokens)[:, 4:])


def test_a_step_finds_everything_at_the_same_place(small_buckets: None) -> None:
    model = lively_model(SHAPES["llama"])
    cache = StaticKVCache(model, 40)

    def places() -> list[int]:
        tensors = [cache.position, cache.lengths, cache.visible, *(layer.keys for layer in cache.layers)]
        return [tensor.data_ptr() for tensor in tensors]

    model(torch.tensor([[1, 2, 3]]), cache)
    before, shapes = places(), []
    for token in range(30):
        model(torch.tensor([[token]]), cache)
        assert places() == before
        shapes.append(cache.visible.shape[-1])
    assert shapes == [8] * 5 + [16] * 8 + [32] * 16 + [64]


def test_a_later_request_does_not_see_an_earlier_one(small_buckets: None) -> None:
    model = lively_model(SHAPES["mistral"], dtype=torch.float64)
    prompts = [random_prompt(n, 97, seed=n) for n in (20, 3, 9)]  # the memory of the first serves all
    answers = [kernels.generate(model, prompt, 12).tokens for prompt in prompts]
    assert answers == [naive.generate(model, prompt, 12).tokens for prompt in prompts]


def test_memory_is_kept_where_it_has_the_room() -> None:
    launched = Launched(lively_model(SHAPES["llama"]), compiled=False, captured=False)
    first = launched.cache(20)
    first.positions(5)
    assert launched.cache(12) is first and first.length == 0
    assert launched.cache(128) is first  # all columns of its bucket: a longer text captures nothing anew
    assert launched.cache(129) is not first and launched.cache(12, batch=2).batch == 2


def test_a_text_that_overflows_does_not_reach_the_next_one() -> None:
    model = lively_model(replace(SHAPES["llama"], tied_embeddings=False))
    model.embed.weight[0] = torch.nan
    assert kernels.generate(model, [5, 0, *range(1, 30)], 8).tokens == [0] * 8
    assert kernels.generate(model, [4], 8).tokens == naive.generate(model, [4], 8).tokens


# --- Compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@needs_compiler
def test_compiled_steps_give_the_same_tokens_and_logits(small_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three layers in stretches of two: a program of two layers and one of one, for each bucket.
    monkeypatch.setattr(kernels, "STRETCH", 2)
    model = lively_model(replace(SHAPES["llama"], n_layers=3))
    prompt = random_prompt(5, 97)
    expected = naive.generate(model, prompt, 10).tokens
    assert kernels.generate(model, prompt, 10, compiled=True).tokens == expected
    launched = kernels._launched(model, True, False)
    # Begin, norm and head; two stretches in 8 and in 16 columns.
    assert launched.compiled and len(launched._programs) == 3 + 2 * 2

    # Another model of the same shapes has programs of its own, and none of them sees the other's numbers.
    other = lively_model(replace(SHAPES["llama"], n_layers=3, norm_eps=0.1), seed=1)
    assert kernels.generate(other, prompt, 3, compiled=True).tokens == naive.generate(other, prompt, 3).tokens
    with torch.inference_mode():
        cache, tokens = launched.cache(9), torch.tensor([[*prompt, 7]])
        launched.hidden(tokens[:, :5], cache)
        logits = launched.head(launched.hidden(tokens[:, 5:], cache))
    assert_same_logits(logits, logits_whole(model, tokens)[:, 5:])


@needs_compiler
def test_compiled_int4_steps_stay_within_rounding_of_eager_ones() -> None:
    # The kernels round activations to bf16: another order of summation before that may round them to a neighbour.
    model = quantize(lively_model(replace(SHAPES["llama3"], n_layers=1, d_ff=64)), "int4")
    tokens = torch.tensor([random_prompt(9, 97)])
    assert kernels.compiling_pays(model)
    launched = Launched(model, compiled=True, captured=False)
    with torch.inference_mode():
        cache = launched.cache(9)
        launched.hidden(tokens[:, :8], cache)
        actual = launched.head(launched.hidden(tokens[:, 8:], cache))
        reference = gqa.GroupedKVCache(model, 9)
        model(tokens[:, :8], reference)
        expected = model(tokens[:, 8:], reference)
    assert (actual - expected).abs().max() <= 0.02 * expected.abs().max()


def test_float_layers_on_a_cpu_are_not_compiled_unasked() -> None:
    assert not kernels.compiling_pays(lively_model(SHAPES["llama"]))


@pytest.fixture
def no_compiler() -> Iterator[None]:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        yield


def test_without_a_compiler_a_stage_says_so_and_runs(no_compiler: None) -> None:
    model, prompt = lively_model(SHAPES["llama"]), random_prompt(4, 97)
    with pytest.warns(NotCompiled) as told:
        tokens = kernels.generate(model, prompt, 6, compiled=True).tokens
    assert tokens == naive.generate(model, prompt, 6).tokens
    (message,) = (str(warning.message) for warning in told if warning.category is NotCompiled)
    assert is_one_sentence(message) and "compiler" in message
    with warnings.catch_warnings(action="error", category=NotCompiled):
        kernels.generate(model, prompt, 6, compiled=True)  # said once


@pytest.mark.filterwarnings("default::minillm.stages.kernels.NotCompiled")
def test_a_command_says_so_in_one_line(no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "random:tiny", "--stage", "kernels", "--max-new-tokens", "3"]
    assert main(["generate", "a", *options]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minillm: Decode steps run eagerly") and is_one_sentence(line)


# --- The stage ----------------------------------------------------------------------------------------------------------


def test_only_cuda_captures() -> None:
    with pytest.raises(UsageError) as error:
        kernels.generate(lively_model(SHAPES["llama"]), [1, 2], 3, captured=True)
    assert is_one_sentence(str(error.value)) and "this model is on cpu" in str(error.value)


def test_a_seed_gives_the_same_text_again() -> None:
    model: Transformer = lively_model(SHAPES["qwen3"])
    texts = [kernels.generate(model, [5, 6], 12, sampler=Sampler(0.9, seed=3)).tokens for _ in range(2)]
    assert texts[0] == texts[1] == gqa.generate(model, [5, 6], 12, sampler=Sampler(0.9, seed=3)).tokens


def test_stop_tokens_end_it_and_are_told() -> None:
    model = lively_model(SHAPES["llama"])
    free = kernels.generate(model, [1, 2, 3], 10).tokens
    seen: list[int] = []
    stopped = kernels.generate(model, [1, 2, 3], 10, stop_tokens={free[4]}, on_token=seen.append)
    assert stopped.tokens == seen == free[: free.index(free[4]) + 1]


def test_launched_steps_are_predicted_without_overhead_and_prompts_with_it() -> None:
    config = KNOWN_MODELS["tiny"]
    slow_host = Ceilings("x", "fp32", bandwidth=1e12, peak=1e15, overhead=1e-3)
    fast_host = replace(slow_host, overhead=0.0)
    (prefill, step), (free_prefill, free_step) = (
        predict_stage(STAGES["kernels"], config, ceilings, 20) for ceilings in (slow_host, fast_host)
    )
    assert step.predicted_s == free_step.predicted_s < 1e-3 and step.bound != "overhead"
    assert prefill.predicted_s >= prefill.cost.n_operators * 1e-3 > free_prefill.predicted_s
    eager = predict_stage(STAGES["quantization_int4"], config, slow_host, 20)[1]
    assert eager.predicted_s >= eager.cost.n_operators * 1e-3
