"""The count equals the closed forms, written down here from the definition of each operator, to the byte.

`Pass` below adds up one forward pass operator by operator: what each reads and writes, and what of that is weight or cache.
It knows the model and the stages from their definition only, and shares no code with the counter.
"""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    PLAIN_STAGES,
    SHAPES,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.generation import Recorder
from minillm.model import Transformer
from minillm.roofline.counting import Cost, Operator, count
from minillm.roofline.position import count_run, phase_costs
from minillm.sampling import Sampler, greedy
from minillm.stages import kv_cache

# Each is awkward in another way: tied and not, with biases, with norms of q and k, D apart from C / Hq, G of 1, 2, 3 and 4.
CONFIGS = [
    ModelConfig("grouped-tied", 2, 32, 6, 2, 8, 48, 97, 192, tied_embeddings=True),
    ModelConfig("untied-biased", 3, 32, 4, 2, 8, 40, 97, 192, qkv_bias=True),
    ModelConfig("normed-wide-heads", 2, 32, 4, 2, 12, 48, 97, 192, tied_embeddings=True, qk_norm=True),
    ModelConfig("multi-head", 2, 32, 4, 4, 8, 48, 97, 192),
    ModelConfig("multi-query-biased-normed", 1, 24, 4, 1, 10, 36, 61, 192, qkv_bias=True, qk_norm=True),
    ModelConfig("windowed", 2, 32, 4, 2, 8, 48, 97, 192, sliding_window=4),
]
X = torch.zeros(6, 8)  # 192 bytes
DTYPES = [torch.float32, torch.bfloat16]
CACHED = [name for name in PLAIN_STAGES if name != "naive"]
RUNS = [  # stage, tokens of the prompt, new tokens, batch
    *(("naive", 7, 1, 1), ("naive", 7, 3, 3), ("naive", 1, 2, 1)),
    *((stage, *run) for stage in CACHED for run in ((7, 1, 1), (7, 1, 3), (7, 3, 1), (7, 3, 3), (1, 2, 3), (63, 3, 2))),
]


def model_on(device: str, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    with torch.device(device):
        return Transformer(config).to(dtype)


# --- closed forms -----------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """One forward pass of a stage: T new tokens of each of B sequences, S tokens with those before them.

    Bytes are elements times b, of tokens and positions 8, of angles 4, of masks 1.
    """

    config: ModelConfig
    stage: str
    B: int
    T: int
    S: int
    b: int
    flops: int = 0
    bytes: int = 0
    ideal: int = 0

    def __post_init__(self) -> None:
        B, T, b, c = self.B, self.T, self.b, self.config
        C, F, V = c.d_model, c.d_ff, c.vocab_size
        tokens = B * T
        # Packed: the tokens of all sequences in one row, each with a position of its own. Else all share the positions.
        self.packed = self.stage == "batching"
        self.positions = tokens if self.packed else T

        if self.packed:
            self.packing()
        else:
            self.add(written=8 * T)  # the positions
        self.angles()
        self.add(read=8 * tokens, weights=b * tokens * C, written=b * tokens * C)  # embedding: a row for each token
        for _ in range(c.n_layers):
            self.norm(C)
            self.attention()
            self.residual()
            self.norm(C)
            self.linear(C, 2 * F)
            self.add(read=b * tokens * F, written=b * tokens * F)  # silu(gate), the first half of the product
            self.add(read=b * 2 * tokens * F, written=b * tokens * F)  # times up, the other half
            self.linear(F, C)
            self.residual()
        self.norm(C)
        if self.packed and T > 1:
            self.add(read=b * B * C + 8 * B, written=b * B * C)  # the last position of each sequence, gathered
        rows = B * T if self.stage == "naive" else B  # the head: naive asks every position, the others the last one
        self.linear(C, V, rows=rows)
        self.add(read=b * B * V, written=8 * B)  # argmax over the last position
        if self.stage == "naive":
            self.add(read=8 * B * (T + 1), written=8 * B * (T + 1))  # cat of the tokens

    def angles(self) -> None:
        """Shared by all layers, in float32: positions times D frequencies, and the cosine and the sine of that.

        Each is cast where the model has another dtype.
        """
        P, D, b = self.positions, self.config.head_dim, self.b
        self.add(read=8 * P, weights=4 * D, written=4 * P * D)
        for _ in ("cos", "sin"):
            self.add(read=4 * P * D, written=4 * P * D)
            if b != 4:
                self.add(read=4 * P * D, written=b * P * D)

    def packing(self) -> None:
        """What continuous batching notes on the device for a pass: int64 numbers, and memory made ready."""
        B, T, S, c = self.B, self.T, self.S, self.config
        if T == S:
            self.add(written=8 * B + 8 * B)  # the numbers of the slots, and how much each holds: nothing
            self.add(written=8 * B)  # which is set once more for each request that comes
        blocks = -(-S // 64) - (0 if T == S else -(-(S - 1) // 64))
        self.add(written=blocks * 2 * c.n_layers * B * c.n_kv_heads * 64 * c.head_dim * self.b)  # zeroed
        # Of a prompt, the new lengths and the places of the last tokens. In decode the positions, which are the old lengths,
        # and the new lengths.
        self.add(read=2 * 8 * B, written=2 * 8 * B)
        if c.sliding_window is not None and S > c.sliding_window:
            self.add(written=8 * S)  # the S places of a slot
            self.add(read=8 * B, written=8 * B)  # where the window of each begins
            self.add(read=2 * (8 * S + 8 * B), written=2 * B * S)  # two comparisons
            self.add(read=2 * B * S, written=B * S)  # and
        self.add(read=8 * B * T, written=8 * B * T)  # cat of the tokens

    def attention(self) -> None:
        B, T, S, b, c = self.B, self.T, self.S, self.b, self.config
        C, D, Hq, Hkv = c.d_model, c.head_dim, c.n_heads, c.n_kv_heads
        heads = Hq + 2 * Hkv
        self.linear(C, heads * D, bias=c.qkv_bias)
        for H in (Hq, Hkv):
            if c.qk_norm:
                self.norm(D, vectors=B * H * T)
            n = B * H * T * D
            self.add(read=b * n, written=b * n)  # the halves of each head swapped
            self.add(read=b * (n + self.positions * D), written=b * n)  # x cos
            self.add(read=b * (2 * n + self.positions * D), written=b * n)  # + swapped sin
        copies = Hq if self.stage in ("naive", "kv_cache") else Hkv  # by `repeat_interleave`, or into the cache
        places = 2 * 8 * B * T if self.packed else 0  # of each token, its slot and its place there
        for _ in ("k", "v"):
            self.add(read=b * B * Hkv * T * D + places, written=b * B * copies * T * D)
        windowed = c.sliding_window is not None and S > c.sliding_window
        if self.packed:
            mask = B * S if windowed else 0
            if T == 1:
                self.attend(B, 1, S, Hkv, mask)
            else:  # the last token of each as in decode, and then each prompt by itself; the results are joined
                self.add(read=b * B * Hq * D + 8 * B, written=b * B * Hq * D)
                self.attend(B, 1, S, Hkv, mask)
                for _ in range(B):
                    self.attend(1, T, S, Hkv, self.made_mask() if windowed else 0)
                self.add(read=b * B * T * Hq * D, written=b * B * T * Hq * D)
        elif self.stage not in ("naive", "kv_cache") and T == 1:
            self.attend(B, 1, min(S, c.sliding_window or S), Hkv, 0)
        else:
            self.attend(B, T, S, copies, self.made_mask() if windowed else 0)
        if c.qk_norm and (B > 1 and T == 1 if self.packed else T > 1):
            # RMSNorm leaves q with the heads first and attention's result like it: merging the heads of several tokens copies.
            self.add(read=b * B * T * Hq * D, written=b * B * T * Hq * D)
        self.linear(Hq * D, C)

    def attend(self, B: int, T: int, S: int, heads: int, mask: int) -> None:
        """The operator, over keys and values of that many heads: q k^T, and its softmax times v. The causal half counts too."""
        Hq, D, b = self.config.n_heads, self.config.head_dim, self.b
        self.flops += 4 * B * Hq * T * S * D
        self.add(**{"read" if self.stage == "naive" else "weights": b * 2 * B * heads * S * D})
        self.add(read=b * B * Hq * T * D + mask, written=b * B * Hq * T * D)

    def made_mask(self) -> int:
        """Bytes of a mask (T, S): written by ones, read and written by tril and by triu."""
        mask = self.T * self.S
        self.add(written=mask)
        self.add(read=2 * mask, written=2 * mask)
        return mask

    def linear(self, inputs: int, outputs: int, bias: bool = False, rows: int | None = None) -> None:
        rows = self.B * self.T if rows is None else rows
        self.flops += 2 * rows * inputs * outputs
        weights = inputs * outputs + (outputs if bias else 0)
        self.add(read=self.b * rows * inputs, weights=self.b * weights, written=self.b * rows * outputs)

    def norm(self, size: int, vectors: int | None = None) -> None:
        n = size * (self.B * self.T if vectors is None else vectors)
        self.add(read=self.b * n, weights=self.b * size, written=self.b * n)

    def residual(self) -> None:
        n = self.B * self.T * self.config.d_model
        self.add(read=self.b * 2 * n, written=self.b * n)

    def add(self, read: int = 0, weights: int = 0, written: int = 0) -> None:
        self.bytes += read + weights + written
        self.ideal += weights


def closed_form(
    config: ModelConfig, stage: str, prompt: int, new: int, B: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """FLOPs, bytes and ideal bytes of generating `new` tokens for B prompts."""
    b = dtype.itemsize
    if stage == "naive":
        passes = [Pass(config, stage, B, T, T, b) for T in range(prompt, prompt + new)]
    else:
        passes = [Pass(config, stage, B, prompt, prompt, b)]
        passes += [Pass(config, stage, B, 1, prompt + i, b) for i in range(1, new)]
    return sum(p.flops for p in passes), sum(p.bytes for p in passes), sum(p.ideal for p in passes)


def decode_step(stage: str, model: Transformer, S: int, B: int = 1) -> Cost:
    """One step that attends over S tokens of each of B sequences: what a run of 2 tokens has more than a run of 1."""
    return count_run(PLAIN_STAGES[stage], model, S - 1, 2, B) - count_run(PLAIN_STAGES[stage], model, S - 1, 1, B)


def figures(cost: Cost) -> tuple[int, int, int]:
    return cost.flops, cost.bytes, cost.ideal_bytes


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_prefill_and_whole_generations_equal_the_closed_form(
    config: ModelConfig, dtype: torch.dtype, device: str
) -> None:
    model = model_on(device, config, dtype)
    for stage, prompt, new, batch in RUNS:
        cost = count_run(PLAIN_STAGES[stage], model, prompt, new, batch)
        assert figures(cost) == closed_form(config, stage, prompt, new, batch, dtype), (stage, prompt, new, batch)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_decode_step_equals_the_closed_form(config: ModelConfig, dtype: torch.dtype, device: str) -> None:
    model = model_on(device, config, dtype)
    for stage, T, S in (("naive", 9, 9), *((stage, 1, 9) for stage in CACHED)):
        for batch in (1, 3):
            step = decode_step(stage, model, 9, batch)
            expected = Pass(config, stage, batch, T, S, dtype.itemsize)
            assert figures(step) == (expected.flops, expected.bytes, expected.ideal), (stage, batch)


def test_every_operator_costs_on_meta_what_it_costs_on_the_cpu() -> None:
    for config in SHAPES.values():
        for stage in PLAIN_STAGES.values():
            on_cpu = count_run(stage, model_on("cpu", config), 6, 3, 2)
            assert on_cpu.calls == count_run(stage, model_on("meta", config), 6, 3, 2).calls


def test_a_prompt_in_chunks_costs_a_mask_more_and_reads_the_weights_once_a_chunk() -> None:
    config = CONFIGS[0]
    model, B, T, S, b = model_on("cpu", config), 2, 4, 8, 4
    tokens = torch.zeros(B, S, dtype=torch.int64)

    def both_chunks() -> None:
        cache = kv_cache.KVCache(model, S, B)
        for chunk in tokens.split(T, dim=1):
            model.hidden(chunk, cache)

    head_and_argmax = 2 * B * config.d_model * config.vocab_size
    first, second = Pass(config, "kv_cache", B, T, T, b), Pass(config, "kv_cache", B, T, S, b)
    cost = count(both_chunks)
    assert cost.flops == first.flops + second.flops - 2 * head_and_argmax
    C, V = config.d_model, config.vocab_size
    without_head = 2 * b * (B * C + C * V + 2 * B * V) + 2 * 8 * B  # linear, argmax
    mask = config.n_layers * 4 * T * S  # written by ones, read and written by tril, read by attention: one byte each
    assert cost.bytes == first.bytes + second.bytes - without_head + mask


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda config: config.name)
def test_flops_of_a_generation_follow_the_two_laws(config: ModelConfig) -> None:
    """Naive: P n^2 + 4/3 A L n^3; cached: 2 P n + 2 A L n^2. Exactly, n passes over i tokens each:

    sum of 2 P i + 4 A L i^2 = P n (n+1) + 2/3 A L n (n+1) (2n+1), and sum of 2 P + 4 A L i = 2 P n + 2 A L n (n+1).
    """
    P, A, L, n = config.matmul_params, config.n_heads * config.head_dim, config.n_layers, 16
    model = model_on("meta", config)
    naive = count_run(PLAIN_STAGES["naive"], model, 1, n).flops
    cached = count_run(PLAIN_STAGES["kv_cache"], model, 1, n).flops
    assert naive == P * n * (n + 1) + 2 * A * L * n * (n + 1) * (2 * n + 1) // 3
    assert cached == 2 * P * n + 2 * A * L * n * (n + 1)
    # The laws leave out terms of relative size 1/n and 3/(2n).
    assert 1 < naive / (P * n**2 + 4 / 3 * A * L * n**3) < 1 + 2 / n
    assert 1 < cached / (2 * P * n + 2 * A * L * n**2) < 1 + 1 / n


def test_a_long_prompt_costs_the_cache_the_head_only_once() -> None:
    config = CONFIGS[1]
    model, T, head = model_on("meta", config), 11, 2 * config.d_model * config.vocab_size
    naive, cached = (count_run(PLAIN_STAGES[stage], model, T, 1).flops for stage in ("naive", "kv_cache"))
    assert naive - cached == (T - 1) * head


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.name)
def test_decode_attention_stays_below_two_flops_for_every_byte_of_an_element(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    """One K/V for each query head: 4 S D FLOPs over b (2 S D + 2 D) bytes, 2 S / (S + 1) / b, which nears 2 / b."""
    S, b = 150, dtype.itemsize
    model = model_on("meta", config, dtype)
    step = decode_step("kv_cache", model, S)
    [attention] = [op for op, _ in step if op.name == "scaled_dot_product_attention"]
    assert attention.flops / attention.bytes == pytest.approx(2 * S / (S + 1) / b)
    assert 0.99 * 2 / b < attention.flops / attention.bytes < 2 / b


def kept(cost: Cost, config: ModelConfig, B: int) -> int:
    """Bytes of keys and values that a step writes into its cache, and reads from it for attention."""
    writes = {"copy", "index_put"}  # of a step that decodes, the only operators of these names with a shape of heads
    written = sum(
        n * op.written for op, n in cost if op.name in writes and str(config.head_dim) in re.split("x|, ", op.shape)
    )
    return written + sum(n * op.ideal for op, n in cost if op.name == "scaled_dot_product_attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", CONFIGS[:5], ids=lambda config: config.name)
@pytest.mark.parametrize("B", [1, 3])
def test_keys_and_values_take_g_times_fewer_bytes_without_copies(
    config: ModelConfig, dtype: torch.dtype, B: int
) -> None:
    model, S, b, D = model_on("meta", config, dtype), 30, dtype.itemsize, config.head_dim
    expanded = decode_step("kv_cache", model, S, B)
    weights = config.streamed_params * b + B * config.d_model * b + 4 * D  # those streamed, embeddings, frequencies
    assert kept(expanded, config, B) == 2 * b * config.n_layers * B * config.n_heads * (S + 1) * D
    for stage in ("gqa", "batching_static", "batching"):
        grouped = decode_step(stage, model, S, B)
        assert grouped.flops == expanded.flops
        assert kept(expanded, config, B) == config.group_size * kept(grouped, config, B)
        assert expanded.ideal_bytes - weights == config.group_size * (grouped.ideal_bytes - weights) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", CONFIGS[:5], ids=lambda config: config.name)
def test_grouped_decode_attention_nears_two_g_flops_for_every_byte_of_an_element(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    """4 G S D FLOPs a KV head over b (2 S D + 2 G D) bytes: 2 G S / (S + G) / b."""
    S, b, G = 150, dtype.itemsize, config.group_size
    step = decode_step("gqa", model_on("meta", config, dtype), S)
    [attention] = [op for op, _ in step if op.name == "scaled_dot_product_attention"]
    assert attention.flops / attention.bytes == pytest.approx(2 * G * S / (S + G) / b)
    assert 0.97 * 2 * G / b < attention.flops / attention.bytes < 2 * G / b


@pytest.mark.parametrize("stage", ["gqa", "batching_static"])
def test_a_window_keeps_the_bytes_of_grouped_decode_constant(stage: str) -> None:
    model = model_on("meta", CONFIGS[5])
    assert decode_step(stage, model, 10, 2).bytes == decode_step(stage, model, 90, 2).bytes


def test_ideal_bytes_of_a_decode_step_are_the_streamed_weights_and_the_cache() -> None:
    for config in CONFIGS:
        S, B, b = 30, 3, 2
        model = model_on("meta", config, torch.bfloat16)
        step = decode_step("kv_cache", model, S, B)
        cache = 2 * config.n_layers * B * config.n_heads * S * config.head_dim * b
        rows_and_frequencies = B * config.d_model * b + 4 * config.head_dim
        assert step.ideal_bytes == config.streamed_params * b + cache + rows_and_frequencies


def test_a_decode_step_of_llama_3_8b_reads_15_gb_of_weights() -> None:
    model = model_on("meta", KNOWN_MODELS["llama-3-8b"], torch.bfloat16)
    step = decode_step("kv_cache", model, 10)
    assert step.ideal_bytes == pytest.approx(15.01e9, rel=1e-3)


def flops_by_pytorch(fn: Callable[[], object]) -> int:
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("stage", PLAIN_STAGES)
def test_flops_equal_those_of_pytorchs_counter(config: ModelConfig, stage: str) -> None:
    # On meta: there attention falls apart into matrix products. Of the CPU's fused kernel PyTorch's counter knows nothing.
    model = model_on("meta", config)
    tokens = torch.zeros(2, 6, dtype=torch.int64, device="meta")

    def run() -> None:
        PLAIN_STAGES[stage].run(model, tokens, 3, greedy, Recorder(model.device))

    assert count(run).flops == flops_by_pytorch(run) > 0


# --- ideal bytes ------------------------------------------------------------------------------------------------------


def test_ideal_is_what_existed_before_and_what_was_allocated_to_be_filled() -> None:
    weight = torch.zeros(8, 8)
    assert count(lambda: X @ weight).ideal_bytes == 192 + 256
    assert count(lambda: X.clone() @ weight).ideal_bytes == 192 + 256  # read by clone, then an intermediate
    assert count(lambda: (X + 1) @ weight).ideal_bytes == 192 + 256

    def through_a_cache(make: Callable[..., Tensor]) -> int:
        def run() -> None:
            cache = make(6, 8)
            cache[:3] = (X + 1)[:3]
            cache[:3].exp()

        return count(run).ideal_bytes

    assert through_a_cache(torch.empty) == through_a_cache(torch.zeros) == through_a_cache(X.new_zeros) == 192 + 96
    assert through_a_cache(torch.ones) == 192  # an operator's result


def test_ideal_counts_a_weight_once_for_each_operator_that_needs_it() -> None:
    assert count(lambda: [X.exp() for _ in range(3)]).ideal_bytes == 3 * 192


def test_token_ids_positions_and_constants_are_no_weights() -> None:
    ids = torch.arange(6)
    assert count(lambda: ids + 1).ideal_bytes == 0
    assert count(lambda: torch.tensor([1.0, 2.0]).exp()).ideal_bytes == 0
    assert count(lambda: X.exp().mul_(2).exp()).ideal_bytes == 192  # changed in place, it stays an intermediate


def test_writing_into_memory_made_for_it_leaves_it_a_cache() -> None:
    def run() -> None:
        cache = torch.empty(6, 8)
        torch.exp(X, out=cache)
        cache.exp()

    assert count(run).ideal_bytes == 192 + 192


def test_ideal_does_not_depend_on_which_memory_is_used_again() -> None:
    """Freed results leave their addresses to later tensors, of whatever kind: the count must not confuse them."""

    def run() -> None:
        for _ in range(50):
            (X + 1).exp().exp()  # results that are freed at once
            cache = torch.empty(6, 8)
            cache.copy_(X)
            cache.exp()  # 192 ideal
            del cache
            (X + 1).exp()
            torch.tensor([1.0]).exp()

    # Each round: X is read twice and copied once, the cache is read once.
    assert {count(run).ideal_bytes for _ in range(3)} == {50 * 4 * 192}


def test_a_count_is_the_same_again_after_a_model_was_freed() -> None:
    def cost() -> Cost:
        model = model_on("cpu", CONFIGS[0])
        return count_run(PLAIN_STAGES["kv_cache"], model, 5, 3)

    first = cost()
    gc.collect()
    assert all(cost().calls == first.calls for _ in range(5))


# --- what a stage is counted as ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", PLAIN_STAGES)
def test_generate_costs_what_its_run_costs(stage: str) -> None:
    """Reading the request and handing out the tokens moves nothing."""
    config = CONFIGS[0]
    model, prompt = model_on("cpu", config), random_prompt(5, config.vocab_size)
    cost = count(lambda: PLAIN_STAGES[stage].generate(model, prompt, 3))
    assert cost.calls == count_run(PLAIN_STAGES[stage], model, 5, 3).calls


def test_sampling_adds_no_flops_and_its_scratch_memory() -> None:
    config = CONFIGS[0]
    model = model_on("meta", config)
    greedy_cost = count(lambda: kv_cache.generate(model, [1, 2], 2))
    sampled = count(lambda: kv_cache.generate(model, [1, 2], 2, sampler=Sampler(0.8, 5, 0.9, 0.1, 0)))
    assert sampled.flops == greedy_cost.flops
    # Memory that is allocated and filled in place looks like a cache: the noise, read twice, and the probabilities that are
    # put back in the order of ids, which min_p reads three times.
    assert sampled.ideal_bytes == greedy_cost.ideal_bytes + 2 * (2 + 3) * 4 * config.vocab_size
    assert sampled.bytes > greedy_cost.bytes


def test_decode_is_the_run_of_n_tokens_minus_that_of_one() -> None:
    model = model_on("meta", CONFIGS[0])
    for stage in PLAIN_STAGES.values():
        costs = phase_costs(stage, model, 5, 4)
        assert (costs["prefill"] + costs["decode"]).calls == count_run(stage, model, 5, 4).calls
        assert costs["prefill"].calls == count_run(stage, model, 5, 1).calls
        assert list(phase_costs(stage, model, 5, 1)) == ["prefill"]


def test_a_model_of_70b_is_counted_in_exact_integers() -> None:
    config = KNOWN_MODELS["llama-3-70b"]
    model = model_on("meta", replace(config, max_positions=10_000), torch.bfloat16)
    cost = count_run(PLAIN_STAGES["kv_cache"], model, 4096, 1, 8)
    assert figures(cost) == closed_form(config, "kv_cache", 4096, 1, 8, torch.bfloat16)
    assert all(type(figure) is int for figure in figures(cost))


# --- Cost ------------------------------------------------------------------------------------------------------------


def test_costs_add_and_subtract() -> None:
    one, two = count(lambda: X.exp()), count(lambda: [X.exp(), X @ X.t()])
    assert figures(one + two) == tuple(a + b for a, b in zip(figures(one), figures(two), strict=True))
    assert (two - one).calls == count(lambda: X @ X.t()).calls
    assert (one - one).calls == {}
    assert (one + one).n_operators == 2
    assert Cost().intensity == 0
    assert two.intensity == two.flops / two.bytes


def test_a_cost_cannot_lose_what_it_does_not_contain() -> None:
    one, other = count(lambda: X.exp()), count(lambda: X.cos())
    with pytest.raises(ValueError, match="contains all its operators"):
        one - other
    with pytest.raises(ValueError, match="contains all its operators"):
        one - (one + one)


def test_an_operator_names_itself_and_its_shapes() -> None:
    y = torch.zeros(6, 8)
    assert list(count(lambda: y.add_(X[0]))) == [(Operator("add", "6x8, 8", 0, 192 + 32, 192, 192 + 32), 1)]


def test_counting_leaves_the_results_as_they_are() -> None:
    results: list[Tensor] = []
    count(lambda: results.append(X + 1))
    assert torch.equal(results[0], torch.ones(6, 8))
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    count(lambda: results.append(F.scaled_dot_product_attention(q, k, v)))
    assert torch.equal(results[1], F.scaled_dot_product_attention(q, k, v))
