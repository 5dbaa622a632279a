"""What only a GPU can show: the CPU's tokens, times from its own clock, no waiting. Choices of dtype are tested anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import SHAPES, STAGES, is_one_sentence, lively_model, logits_through, logits_whole, random_prompt

from minillm.batch import Request, Row
from minillm.device import pick_device, pick_dtype
from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.roofline.ceilings import CeilingMeter
from minillm.sampling import Sampler
from minillm.stages import STAGES as ALL_STAGES
from minillm.stages import batching, kernels, speculative, static_batching
from minillm.stages.batching import Engine
from minillm.stages.drafters import ModelDrafter, NGramDrafter
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kernels import Launched
from minillm.stages.kv_cache import KVCache
from minillm.stages.quantization import quantize
from minillm.stages.static_cache import StaticKVCache
from minillm.stages.triton_kernels import with_triton_kernels

on_gpu = pytest.mark.gpu  # conftest.py reports it as not run where there is no GPU
every_stage = pytest.mark.parametrize("stage", STAGES)
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_caches = pytest.mark.parametrize("cache", [KVCache, GroupedKVCache])
both_batches = pytest.mark.parametrize(
    "generate", [static_batching.generate, batching.generate], ids=["static", "continuous"]
)
RAGGED = [random_prompt(length, 97, seed) for seed, length in enumerate((9, 1, 23, 4, 4))]


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    """No TF32: it keeps 10 bits of a product's factors, which is not the fp32 that is compared here."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_cuda(shape: str, dtype: torch.dtype = torch.float32) -> Transformer:
    return lively_model(SHAPES[shape], dtype=dtype).to("cuda")


# --- On a GPU --------------------------------------------------------------------------------------------------------


@on_gpu
@every_stage
@every_shape
def test_fp32_tokens_on_cuda_equal_those_on_the_cpu(stage: str, shape: str) -> None:
    cpu, cuda = lively_model(SHAPES[shape]), on_cuda(shape)
    for seed, length in enumerate((1, 7, 40)):
        prompt = random_prompt(length, 97, seed)
        assert STAGES[stage](cuda, prompt, 24).tokens == STAGES[stage](cpu, prompt, 24).tokens


@on_gpu
@every_shape
@both_caches
@pytest.mark.parametrize("size", [1, 6, 50])
def test_fp32_logits_on_cuda_equal_those_on_the_cpu(shape: str, cache: Any, size: int) -> None:
    tokens = torch.tensor([random_prompt(50, 97)])
    expected, cuda = logits_whole(lively_model(SHAPES[shape]), tokens), on_cuda(shape)
    actual = logits_through(cuda, tokens.cuda(), cache(cuda, 50), size).cpu()
    # Twice the bound of helpers.rounding: two libraries also differ in exp, cos and sin, and sum in other orders throughout.
    atol = 2 * 220 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@on_gpu
@every_stage
def test_smollm2_tokens_on_cuda_equal_those_on_the_cpu(stage: str, smollm2: tuple[Transformer, Any]) -> None:
    model, tokenizer = smollm2
    cuda = Transformer(model.config).to("cuda")
    cuda.load_state_dict(model.state_dict())
    for text in ("The capital of France is", "def fibonacci(n):", "Als Gregor Samsa eines Morgens"):
        prompt = tokenizer.encode(text)
        assert STAGES[stage](cuda, prompt, 32).tokens == STAGES["kv_cache"](model, prompt, 32).tokens


@on_gpu
@every_stage
@every_shape
@pytest.mark.parametrize(
    "sampler", [None, Sampler(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=3)], ids=["greedy", "sampled"]
)
def test_generation_that_nobody_reads_never_waits_for_the_gpu(stage: str, shape: str, sampler: Sampler | None) -> None:
    model = on_cuda(shape)
    options = {} if sampler is None else {"sampler": sampler}
    generate = STAGES[stage]
    expected = generate(model, random_prompt(9, 97), 12, **options).tokens  # also warms up
    torch.cuda.synchronize()
    run = Unwatched(generate)
    generation = run(model, random_prompt(9, 97), 12, **options)
    assert generation.tokens == expected


class Unwatched:
    """Runs a stage so that any synchronization after its prompt's upload raises.

    The upload itself is a copy from pageable memory, which waits by its nature, once and before the first pass. So the check is
    switched on by the model's first embedding: a batch must be admitted as a whole.
    """

    def __init__(self, generate: Any) -> None:
        self.generate = generate

    def __call__(self, model: Transformer, *args: Any, **options: Any) -> Any:
        hook = model.embed.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
        try:
            return self.generate(model, *args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            hook.remove()


@on_gpu
@both_batches
@every_shape
@pytest.mark.parametrize(
    "sampler", [None, Sampler(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=3)], ids=["greedy", "sampled"]
)
def test_a_ragged_batch_that_nobody_reads_never_waits_for_the_gpu(
    generate: Any, shape: str, sampler: Sampler | None
) -> None:
    model, limits = on_cuda(shape), [4, 12, 7, 1, 9]  # rows end at different steps, and the last ones move
    options: dict[str, Any] = {"max_batch": 5} | ({} if sampler is None else {"sampler": sampler})
    expected = [g.tokens for g in generate(model, RAGGED, limits, **options)]
    torch.cuda.synchronize()
    generations = Unwatched(generate)(model, RAGGED, limits, **options)
    assert [g.tokens for g in generations] == expected


@on_gpu
@both_batches
@every_shape
def test_rows_of_a_batch_on_cuda_equal_rows_alone_on_the_cpu(generate: Any, shape: str) -> None:
    cpu, cuda = lively_model(SHAPES[shape]), on_cuda(shape)
    expected = [STAGES["naive"](cpu, prompt, 16).tokens for prompt in RAGGED]
    for max_batch in (1, 2, 5):  # slots are used again where there are fewer than requests
        assert [g.tokens for g in generate(cuda, RAGGED, 16, max_batch=max_batch)] == expected


@on_gpu
@both_batches
def test_smollm2_batches_on_cuda_equal_each_prompt_alone_on_the_cpu(
    generate: Any, smollm2: tuple[Transformer, Any]
) -> None:
    model, tokenizer = smollm2
    cuda = Transformer(model.config).to("cuda")
    cuda.load_state_dict(model.state_dict())
    texts = (
        "The capital of France is",
        "def fibonacci(n):",
        "Als Gregor Samsa eines Morgens",
        "Once",
        "Water boils at",
    )
    prompts = [tokenizer.encode(text) for text in texts]
    expected = [STAGES["kv_cache"](model, prompt, 16).tokens for prompt in prompts]
    assert [g.tokens for g in generate(cuda, prompts, 16, max_batch=3)] == expected


@on_gpu
def test_a_neighbour_that_overflows_on_cuda_keeps_it_to_itself() -> None:
    model = lively_model(replace(SHAPES["llama"], tied_embeddings=False))
    model.embed.weight[0] = torch.nan
    model = model.to("cuda")
    prompts = [[5, 0, *range(1, 30)], [4], [7, 8], [9] * 12]
    expected = [STAGES["naive"](model, prompt, 8).tokens for prompt in prompts[1:]]
    for generate in (static_batching.generate, batching.generate):
        for max_batch in (1, 2, 4):
            assert [g.tokens for g in generate(model, prompts, 8, max_batch=max_batch)[1:]] == expected


@on_gpu
def test_memory_on_cuda_is_taken_once_and_steps_take_no_more() -> None:
    model = on_cuda("llama")
    engine = Engine(model, max_batch=5, max_length=60)
    for prompt in RAGGED:
        engine.submit(Row(model, Request(prompt, 30)))
    for _ in range(3):
        engine.step()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        engine.step()
    # Each row keeps its tokens, 8 bytes in a block of 512, all of a step in one; nothing grows with the cache.
    assert torch.cuda.memory_allocated() - before <= 20 * 4 * 512


@on_gpu
@every_stage
def test_the_watch_for_waiting_sees_a_reader(stage: str) -> None:
    model = on_cuda("llama")

    def reading(logits: torch.Tensor) -> torch.Tensor:
        logits.max().item()
        return logits.argmax(-1)

    with pytest.raises(RuntimeError, match="synchroniz"):
        Unwatched(STAGES[stage])(model, random_prompt(9, 97), 4, sampler=reading)


@on_gpu
@every_stage
def test_times_on_cuda_come_from_events_and_increase(stage: str) -> None:
    model = on_cuda("llama")
    STAGES[stage](model, random_prompt(9, 97), 3)  # warm-up
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    generation = STAGES[stage](model, random_prompt(9, 97), 16)
    end.record()
    end.synchronize()
    assert len(generation.times) == 16
    assert all(0 < a < b for a, b in zip(generation.times, generation.times[1:], strict=False))
    assert generation.times[-1] <= start.elapsed_time(end) / 1e3  # the events around the call enclose those inside


@on_gpu
@every_stage
def test_stop_tokens_and_on_token_work_on_cuda(stage: str) -> None:
    model, prompt = on_cuda("llama"), random_prompt(9, 97)
    free = STAGES[stage](model, prompt, 16).tokens
    seen: list[int] = []
    stopped = STAGES[stage](model, prompt, 16, stop_tokens={free[5]}, on_token=seen.append)
    assert stopped.tokens == seen == free[: free.index(free[5]) + 1]


@on_gpu
@every_stage
def test_a_seed_gives_the_same_text_again_on_cuda(stage: str) -> None:
    model, sampler = on_cuda("llama"), Sampler(0.9, seed=4)
    first = STAGES[stage](model, [1, 2, 3], 20, sampler=sampler).tokens
    assert STAGES[stage](model, [1, 2, 3], 20, sampler=sampler).tokens == first
    assert STAGES[stage](model, [1, 2, 3], 20, sampler=Sampler(0.9, seed=5)).tokens != first


@on_gpu
@every_shape
@both_caches
@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)], ids=["bf16", "fp16"])
def test_sixteen_bit_logits_on_cuda_stay_near_float32(shape: str, cache: Any, dtype: torch.dtype, unit: float) -> None:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16 arithmetic")
    tokens = torch.tensor([random_prompt(40, 97)])
    exact = logits_whole(lively_model(SHAPES[shape]), tokens)
    model = on_cuda(shape, dtype)
    for size in (1, 7, 40):
        rounded = logits_through(model, tokens.cuda(), cache(model, 40), size).float().cpu()
        # The bound of test_model.test_sixteen_bit_logits_stay_near_float32.
        assert (rounded - exact).abs().max() <= 90 * unit * exact.abs().max()


@on_gpu
def test_a_model_moved_to_cuda_keeps_float32_frequencies_there() -> None:
    frequencies = on_cuda("llama3", torch.float16).rope.frequencies
    assert frequencies.device.type == "cuda" and frequencies.dtype == torch.float32
    assert torch.equal(frequencies.cpu(), lively_model(SHAPES["llama3"]).rope.frequencies)


@on_gpu
@pytest.mark.parametrize("working_set", [2**20, 2**29])
def test_ceilings_on_cuda_are_those_of_a_gpu(working_set: int) -> None:
    """Sane to a factor of some tens: from a small card to the largest there is."""
    ceilings = CeilingMeter(torch.device("cuda"), torch.float16, working_set).ceilings()
    assert (5e10 if working_set > 2**28 else 1e9) < ceilings.bandwidth < 5e13
    assert 1e12 < ceilings.peak < 1e16
    assert 1e-7 < ceilings.overhead < 1e-3


# --- On a GPU: speculation, and steps that are captured or compiled ---------------------------------------------------


@on_gpu
@every_shape
def test_speculation_on_cuda_gives_the_tokens_of_the_cpu(shape: str) -> None:
    cpu, cuda = lively_model(SHAPES[shape]), on_cuda(shape)
    prompt = random_prompt(9, 97)
    expected = STAGES["naive"](cpu, prompt, 24).tokens
    for drafter in (NGramDrafter(), ModelDrafter(cuda), ModelDrafter(lively_model(SHAPES[shape], seed=1).to("cuda"))):
        assert speculative.generate(cuda, prompt, 24, drafter=drafter).tokens == expected


@pytest.fixture
def small_buckets(small_buckets: None) -> Iterator[None]:
    """As in other files; and no graph of theirs outlives the test."""
    kernels._launched.cache_clear()
    yield
    kernels._launched.cache_clear()


@on_gpu
@every_shape
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_static_cache_gives_the_fp32_tokens_of_the_cpu_across_buckets(
    captured: bool, shape: str, small_buckets: None
) -> None:
    cpu, cuda = lively_model(SHAPES[shape]), on_cuda(shape)
    for seed, length in enumerate((6, 1, 40, 9)):  # the longest comes after shorter ones, and a shorter one again
        prompt = random_prompt(length, 97, seed)
        tokens = kernels.generate(cuda, prompt, 24, compiled=False, captured=captured).tokens
        assert tokens == STAGES["naive"](cpu, prompt, 24).tokens


@on_gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_compiled_steps_give_the_fp32_tokens_of_the_cpu_across_buckets(captured: bool, small_buckets: None) -> None:
    cpu, cuda = lively_model(SHAPES["llama"]), on_cuda("llama")
    for length in (6, 9):
        prompt = random_prompt(length, 97)
        tokens = kernels.generate(cuda, prompt, 14, compiled=True, captured=captured).tokens
        assert tokens == STAGES["naive"](cpu, prompt, 14).tokens


@on_gpu
def test_graphs_are_replayed_on_other_prompts_and_take_no_more_memory(small_buckets: None) -> None:
    cpu, cuda = lively_model(SHAPES["llama"]), on_cuda("llama")
    kernels.generate(cuda, random_prompt(9, 97), 24, compiled=False, captured=True)
    launched = kernels._launched(cuda, False, True)
    graphs, before = dict(launched._graphs), torch.cuda.memory_allocated()
    assert sorted(graphs) == [16, 32]
    for seed in range(1, 4):
        prompt = random_prompt(9, 97, seed)
        generation = kernels.generate(cuda, prompt, 24, compiled=False, captured=True)
        assert generation.tokens == STAGES["naive"](cpu, prompt, 24).tokens
    del generation
    assert launched._graphs == graphs  # the same objects
    assert torch.cuda.memory_allocated() == before


@on_gpu
def test_rows_in_lockstep_are_captured_too(small_buckets: None) -> None:
    cuda = on_cuda("qwen3")
    tokens = torch.tensor([random_prompt(20, 97, seed) for seed in range(3)], device="cuda")
    launched = Launched(cuda, compiled=False, captured=True)
    with torch.inference_mode():
        cache = launched.cache(20, batch=3)
        parts = [launched.hidden(chunk, cache) for chunk in tokens.split([5, *[1] * 15], dim=1)]
        actual = launched.head(torch.cat(parts, dim=1)).cpu()
    expected = logits_whole(lively_model(SHAPES["qwen3"]), tokens.cpu())
    atol = 2 * 220 * torch.finfo(torch.float32).eps * expected.abs().max().item()  # as above
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@on_gpu
@every_shape
@pytest.mark.parametrize(
    "sampler", [None, Sampler(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=3)], ids=["greedy", "sampled"]
)
def test_a_captured_step_never_waits_for_the_gpu(shape: str, sampler: Sampler | None, small_buckets: None) -> None:
    model, prompt = on_cuda(shape), random_prompt(9, 97)
    options: dict[str, Any] = {"compiled": False, "captured": True} | ({} if sampler is None else {"sampler": sampler})
    expected = kernels.generate(model, prompt, 24, **options).tokens  # also captures, which waits
    torch.cuda.synchronize()
    assert Unwatched(kernels.generate)(model, prompt, 24, **options).tokens == expected


@on_gpu
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("kernel", ["pytorch", "triton"])
def test_captured_steps_of_quantized_models_give_the_eager_tokens(
    scheme: str, kernel: str, small_buckets: None
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16 arithmetic")
    model = lively_model(replace(SHAPES["llama3"], d_ff=64), dtype=torch.bfloat16).to("cuda")
    model = quantize(model, scheme)
    model = with_triton_kernels(model) if kernel == "triton" else model
    prompt = random_prompt(9, 97)
    eager, captured = (kernels.generate(model, prompt, 24, compiled=False, captured=c).tokens for c in (False, True))
    assert captured == eager


@on_gpu
def test_the_kernels_stage_runs_as_it_is_on_cuda() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16 arithmetic")
    stage = ALL_STAGES["kernels"]
    model = stage.prepared(lively_model(replace(SHAPES["llama3"], d_ff=64), dtype=torch.bfloat16).to("cuda"))
    prompt = random_prompt(9, 97)
    tokens = stage.generate(model, prompt, 12).tokens
    assert tokens == kernels.generate(model, prompt, 12, compiled=True, captured=False).tokens
    assert stage.generate(model, prompt, 12).tokens == tokens


@on_gpu
def test_a_capture_serves_the_cache_that_was_asked_for_last() -> None:
    model, tokens = on_cuda("llama"), torch.tensor([[3]], device="cuda")
    launched = Launched(model, compiled=False, captured=True)
    with torch.inference_mode():
        first = launched.cache(20)
        launched.hidden(tokens, first)
        launched.cache(200)
        for stale in (first, StaticKVCache(model, 20)):
            with pytest.raises(MinillmError) as error:
                launched.hidden(tokens, stale)
            assert is_one_sentence(str(error.value))


@on_gpu
def test_a_model_on_another_gpu_is_captured_there(small_buckets: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    model, prompt = lively_model(SHAPES["llama"]).to("cuda:1"), random_prompt(9, 97)
    tokens = kernels.generate(model, prompt, 24, compiled=False, captured=True).tokens
    assert tokens == STAGES["naive"](lively_model(SHAPES["llama"]), prompt, 24).tokens


# --- Anywhere: which dtype a device gets -----------------------------------------------------------------------------

CUDA = torch.device("cuda")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(capability: tuple[int, int], devices: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")

    return pretend


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_bf16_is_refused_below_compute_capability_8(capability: tuple[int, int], pretend: Any) -> None:
    pretend(capability)
    for asked in ("bf16", torch.bfloat16):
        with pytest.raises(MinillmError, match="Tesla T4 has no bfloat16 arithmetic: use --dtype fp16") as error:
            pick_dtype(asked, CUDA)
        assert is_one_sentence(str(error.value))
    assert pick_dtype(None, CUDA) == torch.float16
    assert pick_dtype("fp16", CUDA) == torch.float16
    assert pick_dtype("fp32", CUDA) == torch.float32


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_bf16_is_the_default_from_compute_capability_8_on(capability: tuple[int, int], pretend: Any) -> None:
    pretend(capability)
    assert pick_dtype(None, CUDA) == pick_dtype("bf16", CUDA) == torch.bfloat16


def test_cuda_is_the_default_where_there_is_one(pretend: Any) -> None:
    pretend((9, 0), devices=2)
    assert pick_device().type == "cuda"
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(MinillmError, match=r"There is no cuda:2: this machine has 2 CUDA device\(s\)") as error:
        pick_device("cuda:2")
    assert is_one_sentence(str(error.value))


def test_cuda_asked_for_and_absent_is_refused_in_one_sentence(pretend: Any) -> None:
    pretend((0, 0), devices=0)
    assert pick_device().type == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(MinillmError, match="No CUDA device can be used here") as error:
            pick_device(name)
        assert is_one_sentence(str(error.value))
