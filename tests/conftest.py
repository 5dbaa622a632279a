"""What several test files share."""

import pytest
import torch
from command_helpers import Run

import minillm
from minillm.cli import main
from minillm.model import Transformer
from minillm.stages import static_cache
from minillm.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> tuple[Transformer, Tokenizer]:
    """The real model, float32 on the CPU, and its tokenizer. Fetched once; change neither."""
    return minillm.load("smollm2-135m", device="cpu", dtype="fp32")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: its exit status, standard output and standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(list(argv))
        except SystemExit as exit:  # how argparse ends
            status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 8, 16, 32 and so on, so that short texts cross their borders."""
    monkeypatch.setattr(static_cache, "SMALLEST_BUCKET", 8)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` runs where CUDA is and elsewhere is reported as not run, with the reason."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `draw` is run for each picture of its file's `ALL`, the names of pictures and how each is drawn."""
    if "draw" in metafunc.fixturenames and hasattr(metafunc.module, "ALL"):
        metafunc.parametrize("draw", metafunc.module.ALL.values(), ids=metafunc.module.ALL)
