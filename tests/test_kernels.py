"""The kernels stage: one step for all tokens of a bucket, the same tokens as ever, and nothing where it cannot be done."""

import gc
import os
import shutil
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SHAPES,
    Columns,
    assert_same_logits,
    is_one_sentence,
    lively_model,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from torch import Tensor, nn

from minillm.cli import main
from minillm.config import KNOWN_MODELS
from minillm.errors import MinillmError, UsageError
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.position import predict_stage
from minillm.sampling import Sampler, greedy
from minillm.stages import STAGES, gqa, kernels, naive, triton_kernels
from minillm.stages.kernels import Launched, NotCompiled
from minillm.stages.quantization import quantize
from minillm.stages.quantized_linear import FastInt4Linear
from minillm.stages.static_cache import LayerCache, StaticKVCache
from minillm.stages.triton_kernels import TritonInt4Linear

every_shape = pytest.mark.parametrize("shape", SHAPES)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler, which torch.compile calls on a CPU"
)


@pytest.fixture(autouse=True)
def forget_models() -> Iterator[None]:
    yield
    kernels._launched.cache_clear()


@pytest.fixture(scope="module")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests that call the compiler: what it makes goes to a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


# --- On one memory ------------------------------------------------------------------------------------------------------


@every_shape
@pytest.mark.parametrize("length", [1, 7, 9])
def test_tokens_equal_naive_ones_across_buckets(shape: str, length: int, small_buckets: None) -> None:
    model, prompt = lively_model(SHAPES[shape], dtype=torch.float64), random_prompt(length, 97)
    assert kernels.generate(model, prompt, 30).tokens == naive.generate(model, prompt, 30).tokens


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


# --- Launched, without a compiler and without a GPU -------------------------------------------------------------------


def form(x: Any) -> Any:
    """What may not change from call to call of a program: shapes and dtypes of all tensors in an argument."""
    match x:
        case Tensor():
            return x.dtype, x.shape
        case list() | tuple():
            return tuple(map(form, x))
        case nn.Module():
            return tuple(map(form, x.parameters()))
        case LayerCache():
            return form([x.keys, x.values, x.whole.visible])
    raise TypeError(f"A program is given a {type(x).__name__}.")


@dataclass
class Program:
    """Stands in the place of a compiled program: runs its function as it is, and notes the form of each call's arguments."""

    fn: Callable[..., Any]
    calls: list[Any] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(form(arguments))
        return self.fn(*arguments)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """All that is asked to be compiled, which is not."""
    made: list[Program] = []
    monkeypatch.setattr(kernels, "_compile", lambda fn, device: made.append(Program(fn)) or made[-1])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which is set, and not set back
    return made


@torch.inference_mode()
def decoded(launched: Launched, tokens: Tensor, n_prompt: int) -> list[Tensor]:
    """Hidden states (B, 1, C) of all tokens (B, T) that are decoded after a prompt of `n_prompt`."""
    cache = launched.cache(tokens.shape[1], len(tokens))
    launched.hidden(tokens[:, :n_prompt], cache)
    return [launched.hidden(token, cache) for token in tokens[:, n_prompt:].split(1, dim=1)]


def assert_decodes_as_naive(launched: Launched, tokens: Tensor, n_prompt: int) -> None:
    hidden = torch.cat(decoded(launched, tokens, n_prompt), dim=1)
    assert_same_logits(launched.model.head(hidden), logits_whole(launched.model, tokens)[:, n_prompt:])


@pytest.mark.parametrize(("n_layers", "lengths"), [(4, 1), (5, 2)], ids=["two and two", "two, two and one"])
def test_a_program_serves_all_calls_of_one_form(
    n_layers: int, lengths: int, programs: list[Program], small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "STRETCH", 2)
    model = lively_model(replace(SHAPES["llama"], n_layers=n_layers))
    prompt = random_prompt(5, 97)
    assert kernels.generate(model, prompt, 10, compiled=True).tokens == naive.generate(model, prompt, 10).tokens
    # A stretch of each length in 8 and in 16 columns; the norm and the head.
    one = {kernels._begin: 1, kernels._through: 2 * lengths, kernels._apply: 2}
    assert Counter(program.fn for program in programs) == one
    # The first call of the first program finds out whether there is a compiler. The head is asked after the prompt, too.
    assert [len(program.calls) for program in programs[:3]] == [1 + 9, 10, 2 * 3]

    # Two sequences have programs of their own, but for the head.
    tokens = torch.tensor([random_prompt(9, 97, seed) for seed in range(2)])
    launched = kernels._launched(model, True, False)
    assert_decodes_as_naive(launched, tokens, 7)
    two = {kernels._begin: 2, kernels._through: 2 * 2 * lengths, kernels._apply: 3}
    assert Counter(program.fn for program in programs) == two
    assert [len(set(program.calls)) for program in programs] == [1] * len(programs)

    # Only what is captured is bound to one memory.
    with torch.inference_mode():
        logits = launched.head(launched.hidden(tokens[:1, :1], StaticKVCache(model, 3)))
    assert_same_logits(logits, logits_whole(model, tokens[:1, :1]))


def test_no_more_memory_is_taken_than_the_text_needs(small_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(SHAPES["llama"])
    for n, most in ((4, 8), (5, 16)):  # the last token is not fed back
        kernels.generate(model, [1, 2, 3, 4, 5], n)
        assert kernels._launched(model, False, False)._cache.capacity == most
    taken = []
    monkeypatch.setattr(kernels, "StaticKVCache", lambda *a, **k: taken.append(k) or StaticKVCache(*a, **k))
    columns = Columns()
    kernels.run(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, greedy, columns)
    assert taken == [{"capacity": 6, "batch": 2}]
    assert columns.rows == [naive.generate(model, prompt, 4).tokens for prompt in ([1, 2, 3], [4, 5, 6])]


def test_a_larger_memory_is_taken_when_the_smaller_one_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(lively_model(SHAPES["llama"]), compiled=False, captured=False)
    first = weakref.ref(launched.cache(8).layers[0])
    there = []
    monkeypatch.setattr(
        kernels, "StaticKVCache", lambda *a: (gc.collect(), there.append(first()), StaticKVCache(*a))[2]
    )
    launched.cache(500)
    assert there == [None]


class Repeated:
    """Stands in the place of a CUDA graph: computes a step again, into the memory of its first result."""

    def __init__(self, step: Callable[[], Tensor], result: Tensor) -> None:
        self.step, self.result = step, result

    def replay(self) -> None:
        self.result.copy_(self.step())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Repeated]:
    """All steps that are captured, on a CPU."""
    made: list[Repeated] = []

    def capture(step: Callable[[], Tensor], device: torch.device, pool: object) -> tuple[Repeated, Tensor]:
        step()
        made.append(Repeated(step, step()))
        return made[-1], made[-1].result

    monkeypatch.setattr(kernels, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return made


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_captured_once_for_each_bucket(
    compiled: bool, captured: list[Repeated], programs: list[Program], small_buckets: None
) -> None:
    launched = Launched(lively_model(SHAPES["mistral"]), compiled=compiled, captured=False)
    launched.captured = True  # as on CUDA
    tokens = torch.tensor([random_prompt(20, 97)])
    results = decoded(launched, tokens, 5)
    assert_same_logits(
        launched.model.head(torch.cat(results, dim=1)), logits_whole(launched.model, tokens)[:, 5:]
    )  # a result is not overwritten by a later one
    assert len(captured) == 3  # in 8, 16 and 32 columns
    assert_decodes_as_naive(launched, tokens.flip(1), 1)
    assert len(captured) == 3
    assert bool(programs) is compiled

    # Other memory: what was captured would write into the old one.
    with torch.inference_mode():
        old = launched.cache(20)
    assert_decodes_as_naive(launched, torch.cat([tokens, tokens.flip(1)]), 15)
    assert len(captured) == 3 + 2  # in 16 and 32 columns
    with torch.inference_mode(), pytest.raises(MinillmError) as error:
        launched.hidden(tokens[:, :1], old)
    assert is_one_sentence(str(error.value)) and "ask for one again" in str(error.value)
    assert old.length == 0


def test_a_prompt_runs_as_it_always_does(captured: list[Repeated], programs: list[Program]) -> None:
    launched = Launched(lively_model(SHAPES["llama"]), compiled=True, captured=False)
    launched.captured = True
    tokens = torch.tensor([[1, 2]])
    with torch.inference_mode():
        hidden = launched.hidden(tokens, launched.cache(9))
    assert_same_logits(launched.model.head(hidden), logits_whole(launched.model, tokens))
    assert not captured and len(programs) == 1  # which found out whether there is a compiler


def test_compiled_code_is_kept_with_the_models(
    programs: list[Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    model = lively_model(SHAPES["llama"])
    for folder in (str(tmp_path / "compiled"), "elsewhere"):
        assert Launched(model, compiled=True, captured=False).compiled
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # what is set stays


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("No compiler.\nA long story."), "(No compiler)"), (RuntimeError(), "(RuntimeError)")],
)
def test_what_cannot_be_compiled_runs_eagerly_and_the_caller_is_told_why(
    error: RuntimeError, reason: str, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(kernels, "_compile", lambda fn, device: fail)
    model = lively_model(SHAPES["llama"])
    with pytest.warns(NotCompiled) as told:
        tokens = kernels.generate(model, [1, 2, 3], 5, compiled=True).tokens
    assert tokens == naive.generate(model, [1, 2, 3], 5).tokens
    (warning,) = told
    assert warning.filename == __file__ and reason in str(warning.message)


@pytest.mark.parametrize(
    ("device", "triton", "pays"), [("cuda", True, True), ("cuda", False, False), ("mps", True, False)]
)
def test_compiling_on_a_gpu_needs_cuda_and_triton(
    device: str, triton: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantize(lively_model(SHAPES["llama"]), "int8")
    assert kernels.compiling_pays(model)  # on the CPU, as its layers are not float
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device(device)))
    monkeypatch.setattr(kernels, "triton_is_here", lambda: triton)
    assert kernels.compiling_pays(model) is pays


def test_what_pays_is_compiled_unless_told_otherwise(programs: list[Program]) -> None:
    model = quantize(lively_model(SHAPES["llama"]), "int8")
    kernels.generate(model, [1, 2], 3, compiled=False)
    assert not programs
    kernels.generate(model, [1, 2], 3)
    assert programs


@pytest.mark.parametrize(
    ("device", "triton", "layer"),
    [("cpu", True, FastInt4Linear), ("cuda", True, TritonInt4Linear), ("cuda", False, None), ("mps", True, None)],
)
def test_the_stage_quantizes_for_its_own_kernels_where_they_run(
    device: str, triton: bool, layer: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lively_model(replace(SHAPES["llama3"], d_model=64, d_ff=64))
    asked = []
    monkeypatch.setattr(kernels, "quantize", lambda *a, **k: asked.append((a[1:], k)) or quantize(*a, **k))
    monkeypatch.setattr(kernels, "triton_is_here", lambda: triton)
    monkeypatch.setattr(triton_kernels, "check_kernels", lambda *_: None)
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device(device)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    if layer is None:  # the fast layers, which want a newer GPU
        with pytest.raises(MinillmError):
            kernels.prepare(model)
    else:
        assert type(kernels.prepare(model).head) is layer
    assert asked == [(("int4",), {"readable": True} if layer is TritonInt4Linear else {})]


# --- Compiled ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_compiled_steps_give_the_same_tokens_and_logits(
    small_buckets: None, compiled_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_compiled_int4_steps_stay_within_rounding_of_eager_ones(compiled_code: None) -> None:
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
def no_compiler(compiled_code: None) -> Iterator[None]:
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


def test_only_cuda_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        kernels.generate(lively_model(SHAPES["llama"]), [1, 2], 3, captured=True)
    assert is_one_sentence(str(error.value)) and "this model is on cpu" in str(error.value)
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device("cuda")))
    assert Launched(lively_model(SHAPES["llama"]), compiled=False, captured=True).captured


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
