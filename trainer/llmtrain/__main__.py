"""`python -m llmtrain`."""

import sys

try:
    from llmtrain.cli.main import main
except KeyboardInterrupt:
    print("llmtrain: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
