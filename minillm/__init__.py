"""minillm: LLM inference, one technique at a time, each predicted and then measured on a roofline."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.checkpoint import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import `load`, and PyTorch with it, when it is first asked for: `minillm --help` should not wait for that."""
    if name == "load":
        from minillm.checkpoint import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
