"""Which library multiplies float32 matrices on the CPU: the weights stay the same, and so do the products."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from minillm import cpu
from minillm.checkpoint import random_model
from minillm.config import known_model
from minillm.cpu import OneDNNLinear, fastest_linear, use_fastest_linear
from minillm.roofline.counting import count
from minillm.stages import kv_cache
from minillm.stages.naive import NoCache

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
