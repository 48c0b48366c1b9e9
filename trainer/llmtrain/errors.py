"""The two ways a command ends badly, and how it ends when it was told to stop, or to stop at once."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class BadInputError(Exception):
    """A recipe, argument or file that the user has to change. One sentence; exit code 2."""


class RunFailedError(Exception):
    """A run that could not go on. One sentence; exit code 1."""


class PreemptedError(Exception):
    """The run was told to stop and saved a checkpoint. One sentence; exit code 75."""
