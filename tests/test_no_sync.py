"""A generation whose tokens nobody reads makes no tensor on the host and never waits for the device.

Numbers go to the device when a request is admitted: its prompt, and in a batch the places of its tokens. A step that only
decodes sends nothing, however many requests of whatever lengths it serves, also when some of them end in it.

On a GPU each `.item()` stalls the host until the queue is empty, and each tensor made from Python numbers is a copy. Neither
shows on a CPU. On the `meta` device both do: a tensor elsewhere is a mistake, and there is no number to read. Two interpreters
watch, since each sees what the other cannot: the *dispatch* mode every operator with the devices of its tensors, composite ones
taken apart; the *function* mode the calls that turn Python numbers into a tensor on the device (`torch.tensor(..., device=...)`
leaves no operator on meta, but copies from the host on a GPU) or a tensor into Python numbers.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PLAIN_STAGES, SHAPES, lively_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.batch import Request, Row
from minillm.model import Attention, Transformer
from minillm.sampling import Sampler
from minillm.stages import Stage, kernels
from minillm.stages.batching import Engine
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import KVCache
from minillm.stages.static_batching import PaddedCache

# Operators whose result, or the shape of it, the host must wait for.
READING_OPERATORS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "_unique2", "unique_dim", "unique_consecutive", "bincount", "lift_fresh", "lift", "pin_memory", "_pin_memory",
}  # fmt: skip
READING_METHODS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
}  # fmt: skip
MAKING_FUNCTIONS = {
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "from_numpy",
    "frombuffer",
    "new_tensor",
    "sparse_coo_tensor",
}


class Operators(TorchDispatchMode):
    """Notes each operator that touches a tensor off the meta device, or that reads one."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self.faults, self.count = faults, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # look inside composite operators too: under inference_mode they arrive whole
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            self.count += 1
            name = func.overloadpacket.__name__
            if name in READING_OPERATORS:
                self.faults.append(f"operator {func} reads a tensor")
            out = func(*args, **kwargs)
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        if not places <= {"meta"}:
            self.faults.append(f"operator {func} touches a tensor on {', '.join(sorted(places))}")
        return out


class Functions(TorchFunctionMode):
    """Notes each call that carries numbers between Python and a tensor."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self.faults, self.uploads = faults, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in MAKING_FUNCTIONS:
            self.uploads += 1
        if name in READING_METHODS:
            self.faults.append(f"{name} reads a tensor")
        if name in ("__getitem__", "__setitem__"):
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(index, (list, range)) or (isinstance(index, Tensor) and index.dtype == torch.bool):
                    self.faults.append(f"{name} with an index that the host and the device must exchange")
        return func(*args, **(kwargs or {}))


class Findings:
    def __init__(self, faults: list[str], uploads: int, operators: int) -> None:
        self.faults, self.uploads, self.operators = faults, uploads, operators


def watch(run: Callable[[], object]) -> Findings:
    """Run under both modes. An exception counts as a fault: meta tensors refuse to be read."""
    faults: list[str] = []
    with Functions(faults) as functions, Operators(faults) as operators:
        try:
            run()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            faults.append(f"{type(error).__name__}: {error}")
    return Findings(faults, functions.uploads, operators.count)


@pytest.fixture(params=["llama", "llama3", "qwen2", "qwen3", "mistral"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return lively_model(SHAPES[request.param]).to("meta")


PROMPT = list(range(9))
RAGGED = [PROMPT, [1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12, 13]]


def run_of(stage: Stage) -> Callable[..., object]:
    """(model, new tokens, options) of one prompt or, where the stage takes several, of rows of different lengths."""
    if stage.generate_batch is None:
        return lambda model, n, **options: stage.generate(model, PROMPT, n, **options)
    generate = stage.generate_batch
    return lambda model, n, **options: generate(model, RAGGED, n, **options)


RUNS = {name: run_of(stage) for name, stage in PLAIN_STAGES.items()}
RUNS["kernels"] = run_of(Stage(kernels.generate, kernels.run))  # on a model that is not quantized
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
every_batched_stage = pytest.mark.parametrize(
    "stage", [name for name in PLAIN_STAGES if PLAIN_STAGES[name].generate_batch]
)
every_sampler = pytest.mark.parametrize(
    "sampler", [{}, {"sampler": Sampler(0.8, top_k=7, top_p=0.9, min_p=0.02, seed=1)}], ids=["greedy", "sampled"]
)


def clean(whole: Findings, admission: Findings) -> bool:
    """Whether a run exchanged nothing and uploaded what the run of one token does: what its requests need to be admitted."""
    return not whole.faults and whole.uploads == admission.uploads


@every_run
@every_sampler
def test_a_generation_sends_its_prompt_and_exchanges_nothing_else(
    run: Any, sampler: dict[str, Any], model: Transformer
) -> None:
    one, five = (watch(lambda n=n: run(model, n, **sampler)) for n in (1, 5))
    assert one.faults == five.faults == []
    assert one.uploads == five.uploads > 0
    assert five.operators > 5 * 2 * 15  # that something was watched: 5 passes, 2 layers


@pytest.mark.parametrize("stage", [name for name in PLAIN_STAGES if not PLAIN_STAGES[name].generate_batch])
def test_a_prompt_is_one_upload(stage: str, model: Transformer) -> None:
    assert watch(lambda: PLAIN_STAGES[stage].generate(model, PROMPT, 12)).uploads == 1


@every_batched_stage
def test_rows_that_end_at_different_steps_send_nothing(stage: str, model: Transformer) -> None:
    # In continuous batching each end moves the last row into the gap.
    generate = PLAIN_STAGES[stage].generate_batch
    one, ragged = (
        watch(lambda limits=limits: generate(model, RAGGED, limits, max_batch=5)) for limits in (1, [5, 10, 1, 15, 6])
    )
    assert clean(ragged, one)


@every_batched_stage
def test_uploads_grow_with_admissions_and_not_with_tokens(stage: str, model: Transformer) -> None:
    generate = PLAIN_STAGES[stage].generate_batch
    short, long = (watch(lambda n=n: generate(model, RAGGED, [n, 2 * n, n, 3 * n, n], max_batch=2)) for n in (1, 4))
    assert short.faults == long.faults == []
    assert short.uploads == long.uploads > watch(lambda: generate(model, RAGGED, 1, max_batch=5)).uploads


def padded(model: Transformer, capacity: int) -> PaddedCache:
    return PaddedCache(model, capacity, torch.tensor([0, 3, 8], device="meta"))


@pytest.mark.parametrize("make, B", [(KVCache, 1), (GroupedKVCache, 1), (padded, 3)], ids=["kv_cache", "gqa", "padded"])
def test_a_decode_step_exchanges_nothing(make: Any, B: int, model: Transformer) -> None:
    cache = make(model, 12)
    tokens = torch.zeros(B, 9, dtype=torch.long, device="meta")

    def step() -> None:
        logits = model.head(model.hidden(tokens[:, :1], cache)[:, -1])
        Sampler(0.8, top_p=0.9, seed=1)(logits)

    with torch.inference_mode():
        model.hidden(tokens, cache)  # prefill
        findings = watch(step)
    assert findings.faults == []
    assert findings.uploads == 0


@every_sampler
def test_a_step_of_continuous_batching_exchanges_nothing_unless_it_admits(
    sampler: dict[str, Any], model: Transformer
) -> None:
    engine = Engine(model, max_batch=5, max_length=100)
    for i, prompt in enumerate(RAGGED):
        engine.submit(Row(model, Request(prompt, 3 + 2 * i, **sampler)))
    assert watch(engine.step).uploads == 3  # what goes where
    for _ in range(10):  # rows end after 3, 5, 7, 9 and 11 tokens, so half of these steps close a gap
        findings = watch(engine.step)
        assert findings.faults == [] and findings.uploads == 0
    assert not engine.busy


# --- That the proof proves something: each of these slips into a decode step and is seen ----------------------------


def read_item(x: Tensor) -> None:
    x.flatten()[0].item()


def read_tolist(x: Tensor) -> None:
    x.tolist()


def branch_on_value(x: Tensor) -> None:
    if x.sum() > 0:
        pass


def convert_to_int(x: Tensor) -> None:
    int(x.argmax())


def index_python_list(x: Tensor) -> None:
    [10, 20, 30][x.argmax()]


def copy_to_host(x: Tensor) -> None:
    x.cpu()


def to_host(x: Tensor) -> None:
    x.to("cpu")


def as_numpy(x: Tensor) -> None:
    x.numpy()


def constant_on_host(x: Tensor) -> None:
    x * torch.tensor(5)


def unused_constant_on_host(x: Tensor) -> None:
    torch.tensor(5)


def constant_on_device(x: Tensor) -> None:
    x * torch.tensor(5.0, device=x.device)


def zeros_on_host(x: Tensor) -> None:
    torch.zeros(3)


def positions_made_on_host(x: Tensor) -> None:
    torch.arange(3).to(x.device)


def numpy_to_tensor(x: Tensor) -> None:
    torch.from_numpy(np.zeros(3))


def boolean_mask(x: Tensor) -> None:
    x[x > 0]


def list_index(x: Tensor) -> None:
    x[[0]]


def where_with_one_argument(x: Tensor) -> None:
    torch.where(x > 0)


def compare_whole_tensors(x: Tensor) -> None:
    torch.equal(x, x)


def all_close(x: Tensor) -> None:
    torch.allclose(x, x)


def slice_up_to_a_tensor(x: Tensor) -> None:
    x[..., : x.argmax()]


SLIPS = [
    read_item, read_tolist, branch_on_value, convert_to_int, index_python_list, copy_to_host, to_host, as_numpy,
    constant_on_host, unused_constant_on_host, constant_on_device, zeros_on_host, positions_made_on_host, numpy_to_tensor,
    boolean_mask, list_index, where_with_one_argument, compare_whole_tensors, all_close, slice_up_to_a_tensor,
]  # fmt: skip


@pytest.fixture(scope="module")
def meta_llama() -> Transformer:
    return lively_model(SHAPES["llama"]).to("meta")


@pytest.fixture(scope="module")
def admissions(meta_llama: Transformer) -> dict[str, Findings]:
    return {name: watch(lambda run=run: run(meta_llama, 1)) for name, run in RUNS.items()}


@pytest.mark.parametrize("stage", RUNS)
@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
def test_the_proof_sees_a_slip_in_a_later_pass(
    slip: Callable[[Tensor], None],
    stage: str,
    meta_llama: Transformer,
    admissions: dict[str, Findings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, passes = Attention.forward, itertools.count()

    def slipping(self: Attention, x: Tensor, layer: int, *rest: Any) -> Tensor:
        if layer == 1 and next(passes) == 1:  # the second pass
            slip(x)
        return forward(self, x, layer, *rest)

    monkeypatch.setattr(Attention, "forward", slipping)
    assert not clean(watch(lambda: RUNS[stage](meta_llama, 2)), admissions[stage])
    assert next(passes) == 2


@every_run
def test_the_proof_sees_a_sampler_that_reads(run: Any, meta_llama: Transformer) -> None:
    def reading(logits: Tensor) -> Tensor:
        logits.max().item()
        return logits.argmax(-1)

    assert watch(lambda: run(meta_llama, 3, sampler=reading)).faults


@every_run
@pytest.mark.parametrize("asked", [{"stop_tokens": {1}}, {"on_token": print}], ids=["stop_tokens", "on_token"])
def test_the_proof_sees_that_stop_tokens_and_on_token_do_read(
    run: Any, asked: dict[str, Any], meta_llama: Transformer
) -> None:
    assert watch(lambda: run(meta_llama, 3, **asked)).faults
