"""The program `llmtrain`, also as `python -m llmtrain`."""

import signal
import sys


def program() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from llmtrain.cli.main import main

        return main()
    except KeyboardInterrupt:
        # What prints may not be imported yet; the shell or the launcher shows the interrupt.
        return 130
    finally:
        # An interrupt while Python ends would add a traceback to what is said.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(program())
