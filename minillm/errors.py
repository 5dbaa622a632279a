"""The two errors a user can meet. Their message is one sentence: what is wrong and what to do."""


class MinillmError(ValueError):
    """The work cannot be done: a file is damaged, a device is missing, a cache is full. Commands exit with 1."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a stack of frames: IPython asks an error for it by this name."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(MinillmError):
    """The request itself is wrong: an unknown name, an empty prompt, a count below one. Commands exit with 2."""


def printable(text: str) -> str:
    """On one line, and without what a terminal obeys instead of showing: text from a file can carry its control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
