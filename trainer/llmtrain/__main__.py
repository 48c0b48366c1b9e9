"""`python -m llmtrain`."""

import sys

try:
    from llmtrain.cli.main import main
except KeyboardInterrupt:
    # What prints is not imported yet; the shell or the launcher shows the interrupt.
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
