"""`python -m llmtrain`."""

import sys

from llmtrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
