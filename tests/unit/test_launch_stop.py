"""Requests to stop."""

import signal
import subprocess
import sys

import pytest
from llmtrain.launch.stop import StopRequest

PROGRAM = """
import os, signal, sys
from llmtrain.launch.stop import StopRequest

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
    """This holds even while the interpreter shuts down, which restores the default handlers."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(number)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_the_user_sees_that_a_request_arrived() -> None:
    stop = StopRequest()
    assert stop.with_request("evaluating 8 samples: 5%") == "evaluating 8 samples: 5%"
    stop.asked = True
    assert (
        stop.with_request("evaluating 8 samples: 5%")
        == "told to stop, finishing this step or batch first; evaluating 8 samples: 5%"
    )
    assert stop.with_request("") == "told to stop, finishing this step or batch first"


TWICE = """
import hashlib, os, signal, sys, threading, time
from llmtrain.launch import stop as stopping

# On a loaded machine the call takes longer than what ends a call that does not return.
stopping.GRACE = 60

def press():
    for _ in range(int(sys.argv[1])):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

with stopping.StopRequest() as stop:
    threading.Thread(target=press).start()
    started = time.monotonic()
    while time.monotonic() < started + 1:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
    print(stop.asked, flush=True)
"""


DEEP = """
import ctypes, os, signal, threading, time
from llmtrain.launch import stop

stop.GRACE = 0.2
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)

def press():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    print(request.with_request("evaluating 1 sample"), flush=True)
    os.kill(os.getpid(), signal.SIGINT)

with stop.StopRequest() as request:
    threading.Thread(target=press).start()
    # The second call never returns, whatever signals arrive.
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_in_a_long_call_a_request_is_seen_and_a_second_ctrl_c_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "told to stop, finishing this step or batch first; evaluating 1 sample\n"
    assert (done.returncode, done.stderr) == (130, "llmtrain: interrupted\n")


@pytest.mark.parametrize(("presses", "stopped"), [(1, False), (2, True)])
def test_a_second_ctrl_c_counts_though_the_first_is_still_to_be_heeded(presses: int, stopped: bool) -> None:
    """Python calls its handler after a C call, once for all signals that arrived during the call."""
    done = subprocess.run([sys.executable, "-c", TWICE, str(presses)], capture_output=True, text=True, check=False)
    assert done.stdout == ("" if stopped else "True\n")
    assert ("KeyboardInterrupt" in done.stderr) is stopped
