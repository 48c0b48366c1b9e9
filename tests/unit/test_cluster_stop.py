"""Being asked to stop."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from llmtrain.cluster.stop import StopRequest

class AtTheVeryEnd:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGUSR1)

number = int(sys.argv[1])
with StopRequest() as stop:
    os.kill(os.getpid(), number)
    print(stop.asked, flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
sys.last = AtTheVeryEnd()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_has_ended_does_not_die_of_being_asked_to_stop(number: int) -> None:
    """Not even while the interpreter takes itself down, which gives signals their defaults back."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(number)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n")
