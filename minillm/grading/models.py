"""A real model for the learner's code to run in, where that costs no download."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.model import Transformer
    from minillm.tokenizer import Tokenizer

PROMPT = "The capital of France is"


@cache
def example_model() -> "tuple[Transformer, Tokenizer, str]":
    """SmolLM2-135M if its file is on this machine, else the tiny random model; its tokenizer; and which of them it is."""
    from minillm.checkpoint import load
    from minillm.download import MODEL_FILE, cache_folder

    if (cache_folder() / MODEL_FILE).is_file():
        return *load("smollm2-135m", "cpu", "fp32"), "SmolLM2-135M"
    return *load("tiny", "cpu", "fp32"), "a tiny random model (the real one is not on this machine, so this is noise)"


def continued(prompt: str, new: Sequence[int]) -> str:
    """A prompt and what the example model wrote after it, on one line, in quotation marks. Of the random model: the ids."""
    _, tokenizer, which = example_model()
    text = tokenizer.decode(list(new)) if which.startswith("SmolLM2") else str(list(new))
    return f'"{prompt} {" ".join(text.split())}"'
