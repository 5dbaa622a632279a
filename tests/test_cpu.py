"""Which library multiplies matrices on the CPU, from which copy of the weights: these stay the same, and so do products."""

import copy
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from minillm import cpu
from minillm.config import known_model
from minillm.cpu import OneDNNLinear, fastest_linear, use_fastest_linear
from minillm.roofline.counting import count
from minillm.roofline.position import count_run, meta_twin
from minillm.stages import STAGES, kv_cache
from minillm.stages.naive import NoCache
from minillm.weights import random_model

TINY = known_model("tiny")


@pytest.fixture
def other_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is not Intel's."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(cpu, "processor_name", lambda: "AMD EPYC")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_onednn_gives_the_same_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(2, rows, 24)
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    with torch.inference_mode():
        # 24 products of numbers of order 1, rounded at each of 24 additions: 24 eps is far above what can come out.
        torch.testing.assert_close(OneDNNLinear(linear)(x).double(), exact, rtol=0, atol=24 * 1.2e-7 * 4)


def test_exchanged_layers_keep_weights_ties_and_tokens(other_processor: None) -> None:
    model = random_model(replace(TINY, tied_embeddings=True))
    weights = dict(model.named_parameters())
    before = kv_cache.generate(model, [1, 2, 3], 12).tokens
    logits = model(torch.tensor([[5, 6, 7]]), NoCache(model))
    use_fastest_linear(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 4 * TINY.n_layers + 1
    assert all(type(linear) is OneDNNLinear for linear in linears)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model(torch.tensor([[5, 6, 7]]), NoCache(model)), logits, rtol=1e-5, atol=1e-5)
    assert kv_cache.generate(model, [1, 2, 3], 12).tokens == before


@pytest.mark.parametrize("place", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_a_model_may_be_moved_after_the_exchange(place: torch.dtype | str, other_processor: None) -> None:
    model = use_fastest_linear(random_model(TINY)).to(place)
    plain = random_model(TINY).to(place)
    tokens = torch.tensor([[5, 6, 7]], device=model.device)
    logits, expected = model(tokens, NoCache(model)), plain(tokens, NoCache(plain))
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    assert place == "meta" or torch.equal(logits, expected)


def test_exchanged_layers_are_counted_like_linear_ones(other_processor: None) -> None:
    plain, exchanged = random_model(TINY), use_fastest_linear(random_model(TINY))
    costs = [count(lambda m=model: kv_cache.generate(m, [1, 2, 3], 3)) for model in (plain, exchanged)]
    assert costs[0].flops == costs[1].flops
    assert costs[0].bytes == costs[1].bytes
    assert costs[0].ideal_bytes == costs[1].ideal_bytes


def test_intel_keeps_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_name", lambda: "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz")
    linear = nn.Linear(8, 8)
    assert fastest_linear(linear) is linear


def test_other_dtypes_and_devices_keep_the_plain_layer(other_processor: None) -> None:
    for linear in (
        nn.Linear(8, 8, dtype=torch.float16),
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8, device="meta"),
    ):
        assert fastest_linear(linear) is linear


def test_onednn_in_bf16_gives_the_product_of_the_plain_layer(other_processor: None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, dtype=torch.bfloat16)
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        # Both add up in float32 and round once: they differ by that rounding at most, 2^-8 of the value.
        torch.testing.assert_close(fastest_linear(linear)(x), linear(x), rtol=2**-7, atol=1e-6)


def packed_layers(model: nn.Module) -> list[bool]:
    """Of each layer, whether it keeps a packed copy once it has been used."""
    layers = [layer for layer in model.modules() if isinstance(layer, OneDNNLinear)]
    with torch.inference_mode():
        for layer in layers:
            layer(torch.ones(1, layer.in_features, dtype=layer.weight.dtype))
    return [layer._packed is not None and layer._packed[0] is not None for layer in layers]


@pytest.fixture
def room(other_processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory to spare, whose packed weights are known to pay."""
    if not cpu._can_pack():
        pytest.skip("packed weights are used on x86 only")
    monkeypatch.setattr(cpu, "free_memory", lambda: 2**40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_a_packed_weight_gives_the_product_of_the_weight(rows: int, dtype: torch.dtype, room: None) -> None:
    """For sizes that fill no block of 16 or 64, too."""
    torch.manual_seed(0)
    linear = nn.Linear(40, 147, dtype=dtype)
    layer, x = OneDNNLinear(linear), torch.randn(2, rows, 40, dtype=dtype)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    with torch.inference_mode():
        out = layer(x)
        assert packed_layers(layer) == [True]
        assert out.dtype is dtype
        # Added up in float32 (40 products of numbers of order 1), then rounded once to the dtype.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=eps, atol=40 * 1.2e-7 * 4)


def test_the_benchmark_sets_packed_weights_beside_ones_in_rows(room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    linear = importlib.import_module("linear")
    plain = nn.Linear(24, 40, bias=False)
    assert packed_layers(OneDNNLinear(plain)) == [True]
    assert packed_layers(linear._in_rows(plain)) == [False]


def test_a_weight_that_changes_is_read_itself(room: None) -> None:
    layer, x = OneDNNLinear(nn.Linear(24, 40, bias=False)), torch.ones(1, 24)
    with torch.inference_mode():
        before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), 2 * before)
    other = nn.Linear(24, 40, bias=False)  # made and filled as often as the first one was
    layer = OneDNNLinear(nn.Linear(24, 40, bias=False))
    layer.weight = other.weight
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), other(x))


def test_a_copy_of_a_layer_packs_its_own_weight(room: None) -> None:
    layer, x = OneDNNLinear(nn.Linear(24, 40, dtype=torch.bfloat16)), torch.ones(1, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = layer(x)  # packs the layer that is copied
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert packed_layers(twin) == [True]
    with torch.inference_mode():
        assert torch.equal(twin(x), before)
        assert torch.equal(layer(x), torch.zeros_like(before))


@pytest.mark.parametrize(("spare", "packed"), [(-1, 0), (0, 1), (2**40, 9)])
def test_packed_copies_leave_a_reserve_of_memory_free(
    spare: int, packed: int, room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spare`: bytes beyond the reserve and a copy of the smallest layer. What is packed is gone from what is free."""
    model = random_model(TINY)
    sizes = [layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear)]
    free = cpu.RESERVE + min(sizes) + spare
    pack = torch.ops.mkldnn._reorder_linear_weight

    def taken(weight: torch.Tensor, rows: int) -> torch.Tensor:
        nonlocal free
        free -= weight.nbytes
        return pack(weight, rows)

    monkeypatch.setattr(cpu, "free_memory", lambda: free)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", taken)
    assert sum(packed_layers(use_fastest_linear(model))) == packed


def test_nothing_is_packed_before_it_is_used(room: None) -> None:
    model = use_fastest_linear(random_model(TINY))
    layers = [layer for layer in model.modules() if isinstance(layer, OneDNNLinear)]
    assert layers and all(layer._packed is None for layer in layers)


def test_without_a_word_from_the_system_nothing_is_packed(room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "free_memory", lambda: None)
    assert not any(packed_layers(use_fastest_linear(random_model(TINY))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_layers_are_counted_like_those_of_shapes_alone(dtype: torch.dtype, room: None) -> None:
    config = replace(TINY, vocab_size=101, tied_embeddings=True)  # a head whose blocks are padded
    packed, plain, shapes = random_model(config).to(dtype), random_model(config).to(dtype), meta_twin(config, dtype)
    use_fastest_linear(packed)
    assert all(packed_layers(packed))
    costs = [count_run(STAGES["gqa"], model, 5, 3) for model in (packed, plain, shapes)]
    assert costs[0].calls == costs[1].calls == costs[2].calls
    assert costs[0].ideal_bytes > sum(p.nbytes for p in plain.parameters())  # three passes read the weights


def test_intel_takes_packed_weights_in_bf16(room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_name", lambda: "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz")
    assert packed_layers(fastest_linear(nn.Linear(24, 40, dtype=torch.bfloat16))) == [True]
