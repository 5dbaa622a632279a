"""The engines that peers.py runs side by side, each in its own best way to generate greedily."""

import importlib.util
import warnings
from typing import Any, Protocol

import torch

from minillm.device import DTYPE_NAMES
from minillm.download import default_model_path
from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.stages import batching, gqa, kernels
from minillm.stages.quantization import quantize
from minillm.weights import named_parts


class Engine(Protocol):
    """`generate` returns exactly n greedy tokens after each prompt, computed from nothing and read by the host.

    The prompts are of one length.
    """

    name: str
    precision: str

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]: ...


class Minillm:
    """The newest stage for the number of prompts: `gqa` for one, continuous batching for several at once."""

    name = "minillm"

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.precision = DTYPE_NAMES[model.dtype]

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        if len(prompts) == 1:
            return [gqa.generate(self.model, prompts[0], n).tokens]
        return [answer.tokens for answer in batching.generate(self.model, prompts, n, max_batch=len(prompts))]


class Quantized(Minillm):
    """The same stages with the weights of `model` quantized to `precision`, int8 or int4, and activations in its dtype."""

    def __init__(self, model: Transformer, precision: str) -> None:
        super().__init__(quantize(model, precision))
        self.precision = precision


class Compiled:
    """The `kernels` stage: int4 weights, decode steps compiled, and on CUDA captured. It takes one prompt.

    Its first call compiles. Raises `MinillmError` there where nothing can be compiled.
    """

    name, precision = "minillm", "compiled int4"

    def __init__(self, model: Transformer) -> None:
        self.model = kernels.prepare(model)

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        (prompt,) = prompts
        with warnings.catch_warnings():
            warnings.simplefilter("error", kernels.NotCompiled)  # or eager steps would go by the name of compiled ones
            try:
                return [kernels.generate(self.model, prompt, n).tokens]
            except kernels.NotCompiled as reason:
                raise MinillmError(f"The engine kernels cannot run, leave it out with --engines: {reason}") from None


class Plain(Minillm):
    """The gqa stage. Several prompts are answered one after another, each alone."""

    def __init__(self, model: Transformer, precision: str) -> None:
        super().__init__(model)
        self.precision = precision

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        return [gqa.generate(self.model, prompt, n).tokens for prompt in prompts]


class Transformers:
    """Hugging Face transformers with the weights of `model`: `generate`, with its fused attention and its default cache."""

    name = "transformers"

    def __init__(self, model: Transformer) -> None:
        self.model = llama_of_transformers(model)
        self.precision = DTYPE_NAMES[model.dtype]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self.model.device)  # (B, T)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n)
        return out[:, ids.shape[1] :].tolist()


def llama_of_transformers(model: Transformer) -> Any:
    """A `LlamaForCausalLM` with a copy of the weights of `model`, greedy, with no processor of logits and no end token.

    Raises `MinillmError` for another architecture.
    """
    import transformers

    c = model.config
    if c.architecture != "llama":
        raise MinillmError(f"{c.name} is a {c.architecture} model; peers are compared on a llama model.")
    if c.rope_factors is not None:
        raise MinillmError(f"{c.name} scales its rotary frequencies; peers are compared on a model that does not.")
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    missing, unexpected = theirs.load_state_dict(named_parts(model), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    theirs = theirs.to(model.device).eval().requires_grad_(False)
    # A plain GenerationConfig is greedy search with use_cache and nothing done to the logits.
    theirs.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
    return theirs


class LlamaCpp:
    """llama.cpp through llama-cpp-python, on the default model's own 4-bit file. It takes one prompt."""

    name = "llama.cpp"
    precision = "Q4_1"

    def __init__(self, device: torch.device, context: int) -> None:
        import llama_cpp

        on_gpu = device.type == "cuda"
        if on_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise MinillmError("This llama-cpp-python is built for the CPU only: leave llama.cpp out with --engines.")
        threads = torch.get_num_threads()
        self.model = llama_cpp.Llama(
            str(default_model_path()),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1 if on_gpu else 0,
            verbose=False,
        )

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        (prompt,) = prompts
        self.model.reset()  # or it would keep the prefix that this prompt shares with the last one
        stream = self.model.generate(prompt, temp=0.0)
        return [[token for token, _ in zip(stream, range(n), strict=False)]]


# What can be asked for: minillm in the dtypes that are asked for, what other stages make of its model, and the peers.
QUANTIZED_STAGES = {"quantization": "int8", "quantization_int4": "int4"}  # stage: precision of its weights
KERNELS = "kernels"
PACKAGE_OF = {
    Minillm.name: "torch",
    **dict.fromkeys((*QUANTIZED_STAGES, KERNELS), "torch"),
    Transformers.name: "transformers",
    LlamaCpp.name: "llama_cpp",
}


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(PACKAGE_OF[engine]) is not None
