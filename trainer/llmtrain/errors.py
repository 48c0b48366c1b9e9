"""The ways in which a command ends otherwise than well, and their exit codes."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

# What to do after a loss, for ranks that do not look for checkpoints.
RESUMES = "the same command resumes from the newest checkpoint, if there is one"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of a GPU or of the host could not be allocated. Imports no torch."""
    named = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and named)


class CommandError(Exception):
    """What ends a command with one sentence, and the exit code that goes with it."""

    exit_code = EXIT_FAILED


class BadInputError(CommandError):
    """A recipe, argument or file that the user has to change."""

    exit_code = EXIT_BAD_INPUT


class RunFailedError(CommandError):
    """A run that cannot continue."""


class PreemptedError(CommandError):
    """The run was told to stop; the same command resumes from its newest checkpoint."""

    exit_code = EXIT_PREEMPTED
