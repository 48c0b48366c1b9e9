"""The ways in which a command ends otherwise than well, and their exit codes."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """What ends a command with one sentence, and the exit code that goes with it."""

    exit_code = EXIT_FAILED


class BadInputError(CommandError):
    """A recipe, argument or file that the user has to change."""

    exit_code = EXIT_BAD_INPUT


class RunFailedError(CommandError):
    """A run that could not go on."""


class PreemptedError(CommandError):
    """The run was told to stop; the same command resumes from its newest checkpoint."""

    exit_code = EXIT_PREEMPTED
