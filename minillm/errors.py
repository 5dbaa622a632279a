"""The two errors a user can meet. Their message is one sentence: what is wrong and what to do."""


class MinillmError(ValueError):
    """The work cannot be done: a file is damaged, a device is missing, a cache is full. Commands exit with 1."""


class UsageError(MinillmError):
    """The request itself is wrong: an unknown name, an empty prompt, a count below one. Commands exit with 2."""
