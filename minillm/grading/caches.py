"""Judging a cache of the learner's: models that run on it must give the logits of a whole pass without any cache.

How it stores things is not looked at. Where logits are wrong they are compared with those of *suspects*, simple caches with one
mistake in each, to tell the learner which mistake it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.grading.answer import ask
from minillm.grading.channel import Remote
from minillm.grading.errors import Wrong
from minillm.grading.models import PROMPT, continued, example_model
from minillm.model import Cache, Transformer
from minillm.stages import naive

# Several layers, groups of 3, 1 and 4 query heads, no two numbers alike that could be taken for each other.
GQA = ModelConfig("gqa", 3, 24, 6, 2, 8, 40, 61, 96)
MHA = ModelConfig("mha", 2, 20, 3, 3, 10, 28, 53, 96, tied_embeddings=True)
MQA = ModelConfig("mqa", 2, 16, 4, 1, 6, 36, 47, 96, qkv_bias=True)
DEEP = ModelConfig("deep", 48, 4, 2, 1, 2, 8, 11, 8192)

# Of the largest logit. Rounding moves them by 3e-5 of it in float32 and by about 3e-2 in bfloat16; a mistake by a tenth.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 8e-2}


@cache
def lively(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """A random model of peaked attention, in which a wrong position, head or mask changes the logits by a tenth and more."""
    model, generator = Transformer(config), torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.4 if parameter.dim() == 1 or name == "embed.weight" else 1.5 / parameter.shape[-1] ** 0.5
        parameter.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
    return model.to(dtype)


def tokens_for(config: ModelConfig, batch: int, length: int) -> Tensor:
    """Random token ids (batch, length)."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, Hq, T, D), the last T of S positions, over k and v (B, Hkv, S, D): the definition, in float64."""
    T, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(G, dim=1) for x in (k, v))
    scores = q.double() @ k.mT / q.shape[3] ** 0.5
    hidden = ~torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Checked:
    """A cache that the learner's class makes, as the model sees it. Shapes are checked on the way, and positions kept."""

    def __init__(self, make: Remote, config: ModelConfig, capacity: int, batch: int = 1) -> None:
        self.cache, self.batch = make(config, capacity), batch
        if not hasattr(self.cache, "attend"):  # a plain value
            raise Wrong(f"{make!r}(config, capacity) must make an object with the methods positions and attend.")
        self.seen: list[list[int]] = []

    def positions(self, n_tokens: int) -> Tensor:
        answer = ask(self.cache.positions, n_tokens)
        value = answer.value
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            raise answer.wrong("must return a tensor of whole numbers, the positions.")
        if value.shape not in ((1, n_tokens), (self.batch, n_tokens)):
            raise answer.wrong(f"has shape {tuple(value.shape)} where {(1, n_tokens)} is due.")
        self.seen += value.tolist()[:1]
        return value

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = ask(self.cache.attend, layer, q, k, v)
        answer.label = f"{self.cache!r}.attend with q {tuple(q.shape)} and k {tuple(k.shape)}"
        value = answer.value
        if not isinstance(value, Tensor):
            raise answer.wrong(f"must return a tensor, the attention of the new tokens, not {value!r:.40}.")
        if value.shape != q.shape:
            raise answer.wrong(f"has shape {tuple(value.shape)} where {tuple(q.shape)} is due, that of q.")
        if value.dtype != q.dtype:
            raise answer.wrong(f"returns {value.dtype} where {q.dtype} is due.".replace("torch.", ""))
        if not bool(torch.isfinite(value.float()).all()):
            raise answer.wrong("gives NaN or infinity: a query that sees no key, or memory that was never written.")
        return value


@torch.inference_mode()
def run(model: Transformer, cache: Cache, tokens: Tensor, sizes: list[int]) -> Tensor:
    """Logits (B, T, V) of all tokens (B, T), which come in passes of these sizes."""
    return torch.cat([model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], dim=1)


def compare(
    make: Remote,
    config: ModelConfig,
    batch: int,
    sizes: list[int],
    suspects: Mapping[str, Callable[[], Cache]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare logits through the learner's cache with those of a whole pass without any. Raises `Wrong`.

    `suspects` makes a cache for each sentence that names a mistake.
    """
    model, total = lively(config, dtype), sum(sizes)
    tokens = tokens_for(config, batch, total)
    got = run(model, Checked(make, config, total + 3, batch), tokens, sizes).double()
    right = run(model, naive.NoCache(model), tokens, [total]).double()
    tolerance = _TOLERANCES[dtype] * float(right.abs().max())
    error = (got - right).abs().amax(dim=(0, 2))  # (T,)
    if float(error.max()) <= tolerance:
        return
    first = int((error > tolerance).nonzero()[0])
    fitting = (
        f" {sentence}"
        for sentence, suspect in suspects.items()
        if float((run(model, suspect(), tokens, sizes).double() - got).abs().max()) <= tolerance
    )
    rows = f", {batch} sequences" if batch > 1 else ""
    passes = ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")
    shape = f"{config.n_layers} layers, {config.n_heads} query heads on {config.n_kv_heads}{rows}"
    hint = next(fitting, "")
    raise Wrong(f"With {make!r} and passes of {passes} tokens ({shape}) logits are wrong from token {first} on.{hint}")


def compare_two(make: Remote) -> None:
    """Two caches of the learner's class at a time. Raises `Wrong` where one disturbs the other."""
    first, second = Checked(make, GQA, 16), Checked(make, GQA, 16)
    model, tokens = lively(GQA), tokens_for(GQA, 1, 9)
    alone = run(model, naive.NoCache(model), tokens, [9])[:, -1]
    run(model, first, tokens[:, :8], [8])
    run(model, second, tokens.flip(1)[:, :5], [5])
    got = run(model, first, tokens[:, 8:], [1])[:, -1]
    if float((got - alone).abs().max()) > _TOLERANCES[torch.float32] * float(alone.abs().max()):
        raise Wrong(f"Two {make!r} objects disturb each other: keep keys and values in the object, not in the class.")


def attend_deep(make: Remote) -> None:
    """Many layers, and a long text: two tokens after 2,100. Raises `Wrong`."""
    for n_layers, sizes in ((DEEP.n_layers, (1, 1)), (1, (2100, 2))):
        checked, S = Checked(make, replace(DEEP, n_layers=n_layers), 4000), sum(sizes)
        generator = torch.Generator().manual_seed(S)
        q = torch.randn(n_layers, 1, DEEP.n_heads, S, DEEP.head_dim, generator=generator)
        k, v = torch.randn(2, n_layers, 1, DEEP.n_kv_heads, S, DEEP.head_dim, generator=generator)
        for new in (slice(0, sizes[0]), slice(sizes[0], S)):
            checked.positions(new.stop - new.start)
            for layer in range(n_layers):
                given = (x[layer, :, :, new].contiguous() for x in (q, k, v))
                answer = ask(checked.cache.attend, layer, *given)
                answer.label = f"{make!r}.attend in layer {layer} of {n_layers}, after {new.start} tokens"
                if new.start:  # float32 over values of about 1 is off by some 1e-6
                    answer.tensor(attention(q[layer, :, :, new], k[layer], v[layer]), atol=1e-5)


def run_real(make: Remote) -> str:
    """Run the example model on the learner's cache, and remark what it wrote. Raises `Wrong` where it writes something else."""
    model, tokenizer, which = example_model()
    prompt = tokenizer.encode(PROMPT)
    checked, tokens, new = Checked(make, model.config, len(prompt) + 8), torch.tensor([prompt]), []
    for _ in range(8):
        tokens = run(model, checked, tokens, [tokens.shape[1]])[:, -1:].argmax(-1)
        new.append(int(tokens))
    if new != naive.generate(model, prompt, 8).tokens:
        raise Wrong(
            f"With {make!r}, {which} writes {tokenizer.decode(new)!r}, which is not what it writes without a cache."
        )
    return f"Your cache just ran {which}: {continued(PROMPT, new)}"
