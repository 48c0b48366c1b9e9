"""`make install` says what it is about to do."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Stands in for Python: its module venv makes a pip that only prints.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo RUNS "$1" "$2"
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho RUNS pip\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


def test_an_installation_says_what_takes_long(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    words = ["make", "-s", "install", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split(" in")[0] for line in done.stdout.splitlines()] == [
        "creating a virtual environment",
        "RUNS -m venv",
        "downloading and",
        "RUNS pip",
        "llmtrain is",
    ]
    assert "takes some minutes" in done.stdout
