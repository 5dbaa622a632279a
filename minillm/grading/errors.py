"""What can become of an exercise besides passing it. Each carries the one sentence that the learner reads."""


class Wrong(Exception):
    """The answer is wrong, or there is none: an endless loop, a crash, an exception."""


class NotWritten(Exception):
    """The learner's code raised NotImplementedError: the stub, or a part of it, is still there."""


class NotGraded(Exception):
    """Nothing could be asked. `whole_file` is set where that holds for every exercise of the learner's file."""

    def __init__(self, sentence: str, whole_file: bool = False) -> None:
        super().__init__(sentence)
        self.whole_file = whole_file
