"""What several test files share."""

import pytest

import minillm
from minillm.model import Transformer
from minillm.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> tuple[Transformer, Tokenizer]:
    """The real model, float32 on the CPU, and its tokenizer. Fetched once; change neither."""
    return minillm.load("smollm2-135m", device="cpu", dtype="fp32")
