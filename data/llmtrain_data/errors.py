"""Errors of the data package. The command line prints their messages."""


class DataError(Exception):
    """A corpus, tokenizer or prepared data set is unusable. The message is one sentence; exit code 2."""

    exit_code = 2


class PreparationStoppedError(Exception):
    """A signal stopped a preparation, which left no files. The message is one sentence."""

    def __init__(self, message: str, interrupted: bool) -> None:
        """interrupted: whether the signal was SIGINT, as from Ctrl-C."""
        super().__init__(message)
        self.exit_code = 130 if interrupted else 1
