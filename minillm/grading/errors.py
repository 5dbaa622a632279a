"""What can become of an exercise besides passing it. Each carries the one sentence that the learner reads."""

from minillm.errors import printable

MOST_CHARACTERS = 1000  # of such a sentence


def sentence(text: str) -> str:
    """A sentence with parts that are the learner's, as it can be shown: printable, and not longer than any real one."""
    text = printable(text[: 10 * MOST_CHARACTERS])
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


class Wrong(Exception):
    """The answer is wrong, or there is none: an endless loop, a crash, an exception."""


class NotWritten(Exception):
    """The learner's code raised NotImplementedError: the stub, or a part of it, is still there."""


class NotGraded(Exception):
    """Nothing could be asked. `whole_file` is set where that holds for every exercise of the learner's file."""

    def __init__(self, sentence: str, whole_file: bool = False) -> None:
        super().__init__(sentence)
        self.whole_file = whole_file
