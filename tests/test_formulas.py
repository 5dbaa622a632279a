"""The cost of each operator by itself equals what its definition says, written down here as numbers, to the byte."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.roofline.counting import Operator, count
from minillm.roofline.formulas import Formula, formula, touched, whole
from minillm.stages.naive import causal_attention

# --- views, slices, broadcasts ----------------------------------------------------------------------------------------

X = torch.zeros(6, 8)  # 192 bytes


def read_written(fn: Callable[[], object]) -> tuple[int, int]:
    cost = count(fn)
    return sum(n * op.read for op, n in cost), sum(n * op.written for op, n in cost)


@pytest.mark.parametrize(
    "view",
    [
        lambda: X[2:4, ::2],
        lambda: X.t().view(8, 2, 3),
        lambda: X.reshape(48)[None].expand(5, 48),
        lambda: X.split(2)[0].chunk(2, dim=1),
        lambda: X.unbind(),
        lambda: X.contiguous().to(torch.float32).detach(),
        lambda: X[1].unsqueeze_(0).t_().squeeze_(),
        lambda: torch.empty(1000, 1000),
        lambda: torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.empty_like(X).transpose(0, 1).flatten(0, 0),
    ],
)
def test_views_allocations_and_constants_are_free(view: Callable[[], object]) -> None:
    assert count(view).calls == {}


@pytest.mark.parametrize(
    ("fn", "read", "written"),
    [
        (lambda: X.exp(), 192, 192),
        (lambda: X[:2].exp(), 64, 64),  # of a slice, the slice
        (lambda: X[:, ::4].exp(), 48, 48),
        (lambda: X + X, 192, 192),  # the same elements are read once
        (lambda: X + X.clone(), 2 * 192 + 192, 2 * 192),
        (lambda: X[:3] + X[3:], 192, 96),  # different elements of one storage are not the same
        (lambda: X @ X.t(), 192, 4 * 36),  # also in another order
        (lambda: X + X[0], 192 + 32, 192),  # broadcast by the operator
        (lambda: X[:1].expand(100, 8).exp(), 32, 3200),  # broadcast by a view: read once, written expanded
        (lambda: X[:1].expand(100, 8).clone(), 32, 3200),
        (lambda: X[:, None].expand(6, 4, 8).reshape(24, 8), 192, 768),
        (lambda: X.repeat_interleave(3, dim=0), 192, 576),
        (lambda: torch.cat([X, X[:2]]), 256, 256),
        (lambda: X.sum(), 192, 4),
        (lambda: X.to(torch.bfloat16), 192, 96),
        (lambda: X.topk(2), 192, 6 * 2 * (4 + 8)),  # two results
        (lambda: torch.arange(5), 0, 40),
        (lambda: torch.zeros(5), 0, 20),
        (lambda: torch.where(X > 0, X, X), 192 + 48 + 192, 48 + 192),
    ],
)
def test_operators_read_each_element_once_and_write_each_result_once(
    fn: Callable[[], object], read: int, written: int
) -> None:
    assert read_written(fn) == (read, written)


@pytest.mark.parametrize(
    ("fn", "read", "written"),
    [
        (lambda y: y.add_(1), 192, 192),  # reads what it changes
        (lambda y: y.add_(X), 384, 192),
        (lambda y: y[:2].mul_(2), 64, 64),
        (lambda y: y.copy_(X), 192, 192),  # overwrites: the target is not read
        (lambda y: y.copy_(X[0]), 32, 192),  # one row, written six times
        (lambda y: y[1:3].copy_(X[:2]), 64, 64),
        (lambda y: y.fill_(1.0), 0, 192),
        (lambda y: y.zero_(), 0, 192),
        (lambda y: y.exponential_(), 0, 192),
        (lambda y: torch.exp(X, out=y), 192, 192),
        (lambda y: torch.mm(X[:, :6], X, out=y), 4 * 36 + 192, 192),
        (lambda y: y.index_copy_(0, ROWS, X[:2]), 16 + 64, 64),
        (lambda y: y.index_copy_(0, ROWS, X[:1].expand(2, 8)), 16 + 32, 64),
        (lambda y: y.index_put_((ROWS,), X[0]), 16 + 32, 64),  # one row into two
        (lambda y: y.index_put_((ROWS, ROWS), torch.zeros(())), 16 + 4, 8 + 4),  # and the zero is written first
        (lambda y: y.index_put_((ROWS,), X[:2], accumulate=True), 16 + 64 + 64, 64),
        (lambda y: y.scatter_(0, INDEX, X), 16 * 8 + 64, 64),  # 2 x 8 indices: so much of X
        (lambda y: y.scatter(0, INDEX, X), 192 + 128 + 192, 192),  # not in place: everything is copied
        (lambda y: y.__setitem__((slice(None), slice(2, 4)), X[:, :2]), 48, 48),
    ],
)
def test_in_place_operators_move_what_they_change(fn: Callable[[Tensor], object], read: int, written: int) -> None:
    y = torch.zeros(6, 8)
    assert read_written(lambda: fn(y)) == (read, written)


ROWS = torch.tensor([3, 1])
INDEX = torch.tensor([[3] * 8, [1] * 8])


@pytest.mark.parametrize(
    ("fn", "read", "written"),
    [
        (lambda: X.index_select(0, ROWS), 64 + 16, 64),
        (lambda: X[ROWS], 64 + 16, 64),
        (lambda: X[:, ROWS], 48 + 16, 48),
        (lambda: X.gather(0, INDEX), 64 + 128, 64),
        (lambda: X.gather(0, INDEX[:, :1].expand(2, 8)), 64 + 16, 64),
        (lambda: F.embedding(ROWS, X), 64 + 16, 64),
    ],
)
def test_a_gather_reads_what_it_takes_and_its_indices(fn: Callable[[], object], read: int, written: int) -> None:
    assert read_written(fn) == (read, written)
    assert count(fn).flops == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y.index_copy_(0, ROWS, X[:2]),
        lambda y: y.index_put_((ROWS,), X[0]),
        lambda y: y.scatter_(0, INDEX, X),
        lambda y: y.add_(X),
        lambda y: F.rms_norm(y, (8,)),
    ],
)
def test_only_products_and_attention_take_flops(fn: Callable[[Tensor], object]) -> None:
    assert count(lambda: fn(torch.zeros(6, 8))).flops == 0


def test_a_mask_of_places_counts_as_if_it_chose_all() -> None:
    y = torch.zeros(6, 8)
    assert read_written(lambda: y.index_put_((X > 0,), torch.tensor(1.0))) == (192 + 48 + 4, 48 + 192)


# --- FLOPs ------------------------------------------------------------------------------------------------------------

A, B3, V8 = torch.zeros(6, 8), torch.zeros(3, 8, 5), torch.zeros(8)


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda A, B3, V8: A @ A.t(), 2 * 6 * 6 * 8),
        (lambda A, B3, V8: torch.mm(A, A.t(), out=torch.empty(6, 6)), 2 * 6 * 6 * 8),
        (lambda A, B3, V8: A @ V8, 2 * 6 * 8),
        (lambda A, B3, V8: V8 @ V8, 2 * 8),
        (lambda A, B3, V8: A @ B3, 3 * 2 * 6 * 8 * 5),
        (lambda A, B3, V8: torch.bmm(A[None].expand(3, 6, 8), B3), 3 * 2 * 6 * 8 * 5),
        (lambda A, B3, V8: torch.addmm(V8[:6], A, A.t()), 2 * 6 * 6 * 8),
        (lambda A, B3, V8: torch.zeros(6, 6).addmm_(A, A.t()), 2 * 6 * 6 * 8),
        (lambda A, B3, V8: torch.addmv(V8[:6], A, V8), 2 * 6 * 8),
        (lambda A, B3, V8: torch.baddbmm(torch.zeros(3, 6, 5), A[None].expand(3, 6, 8), B3), 3 * 2 * 6 * 8 * 5),
        (lambda A, B3, V8: F.linear(A, A, V8[:6]), 2 * 6 * 6 * 8),
        (lambda A, B3, V8: F.linear(V8, A), 2 * 6 * 8),
        # Made of others, counted by its parts.
        (lambda A, B3, V8: torch.einsum("ik,bkj->bij", A, B3), 3 * 2 * 6 * 8 * 5),
        (lambda A, B3, V8: torch.tensordot(A, B3[0], dims=1), 2 * 6 * 8 * 5),
        (lambda A, B3, V8: A.exp() + A * A, 0),  # arithmetic that never binds
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_matrix_products_take_two_flops_a_multiplication(fn: Callable[..., object], flops: int, device: str) -> None:
    operands = [x.to(device) for x in (A, B3, V8)]
    with torch.device(device):
        assert count(lambda: fn(*operands)).flops == flops


def test_bytes_of_matrix_products() -> None:
    assert read_written(lambda: F.linear(A, torch.zeros(5, 8), V8[:5])) == (4 * (48 + 40 + 5), 4 * (30 + 40))
    # A matrix that a view repeats for the batch is read once.
    assert read_written(lambda: torch.bmm(A[None].expand(3, 6, 8), B3)) == (4 * (48 + 120), 4 * 90)
    assert read_written(lambda: torch.addmm(V8[:6], A, A.t())) == (4 * (6 + 48), 4 * 36)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_with_a_mask_reads_the_mask(device: str) -> None:
    B, H, T, S, D, W = 2, 3, 4, 9, 8, 5
    q, k, v = (torch.zeros(B, H, n, D, device=device) for n in (T, S, S))
    cost = count(lambda: causal_attention(q, k, v, W))
    [attention] = [op for op, _ in cost if op.name == "scaled_dot_product_attention"]
    assert attention.flops == 4 * B * H * T * S * D
    assert attention.read == 4 * B * H * D * (T + 2 * S) + T * S
    assert attention.written == 4 * B * H * T * D


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_attention_on_meta_returns_the_layout_of_the_cpu_kernel(layout: str) -> None:
    def result(device: str) -> Tensor:
        q, k, v = torch.zeros(3, 2, 4, 5, 8, device=device)
        if layout == "tokens first":
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        kept = []
        count(lambda: kept.append(F.scaled_dot_product_attention(q, k, v)))
        return kept[0]

    assert result("meta").shape == result("cpu").shape == (2, 4, 5, 8)
    assert result("meta").stride() == result("cpu").stride()


def test_heads_of_values_may_have_another_size() -> None:
    q, k, v = (torch.zeros(1, 2, 4, D, device="meta") for D in (8, 8, 6))
    cost = count(lambda: F.scaled_dot_product_attention(q, k, v))
    assert cost.flops == 2 * 2 * 4 * 4 * (8 + 6)
    longer = [torch.zeros(1, 2, n, D, device="meta") for n, D in ((4, 8), (5, 8), (5, 6))]
    [(attention, _)] = count(lambda: F.scaled_dot_product_attention(*longer))
    assert attention.written == 4 * 2 * 4 * 6


def test_attention_of_three_dimensions_is_counted_by_its_parts_as_it_is_computed() -> None:
    q, k, v = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)
    cost = count(lambda: F.scaled_dot_product_attention(q, k, v))
    assert cost.flops == 2 * 4 * 3 * 5 * 4
    assert [op.shape for op, _ in cost if op.name == "bmm"] == ["2x3x4, 2x4x5", "2x3x5, 2x5x4"]


def test_what_the_host_reads_counts_as_read() -> None:
    assert read_written(lambda: X.sum().item()) == (192 + 4, 4)


# --- formulas of one's own ---------------------------------------------------------------------------------------------


def test_a_custom_operator_registers_its_own_formula() -> None:
    with torch.library._scoped_library("minillm_test", "DEF") as library:
        library.define("fused(Tensor x, Tensor w) -> Tensor")
        library.impl("fused", lambda x, w: x @ w, "CompositeExplicitAutograd")
        fused = torch.ops.minillm_test.fused.default
        w = torch.zeros(8, 8)
        assert count(lambda: fused(X, w)).flops == 0  # nobody has said yet

        @formula(fused)
        def _fused(out: Tensor, x: Tensor, w: Tensor) -> Formula:
            return Formula(7 * out.numel(), [*whole(x), (w, 10)], 20)

        assert list(count(lambda: fused(X, w))) == [(Operator("fused", "6x8, 8x8", 336, 202, 20, 202), 1)]


def test_touched_counts_repeated_elements_once() -> None:
    assert touched(X) == touched(X.t()) == 192
    assert touched(X[:1].expand(9, 8)) == 32
    assert touched(X[:0]) == touched(X[0, 0].expand(0)) == 0
    assert touched(torch.zeros((), dtype=torch.bfloat16).expand(5, 5)) == 2


def test_the_same_elements_in_another_shape_are_read_once() -> None:
    for other in (X[None], X.t(), X[:, None].expand(6, 3, 8), X[:, :, None]):
        assert [n for _, n in whole(X, other)] == [192]
    for other in (X[:3], X[:, ::2], X.clone()):
        assert len(whole(X, other)) == 2
    assert len(whole(X[:2], X[::3])) == 2
    assert [n for _, n in whole(X[:0], X[:1])] == [0, 32]
