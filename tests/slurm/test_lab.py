"""A Slurm of this machine: its nodes work, and it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.slurmlab.files import Spec
from tools.slurmlab.lab import Lab, why_not

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
SLURMLAB = (sys.executable, "-m", "tools.slurmlab")


def daemons(folder: str) -> list[str]:
    """Return the commands of processes whose command line or environment names a lab's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if folder.encode() in seen and int(process.name) != os.getpid():
            found.append(seen.split(b"\0")[0].decode())
    return found


def test_nodes_are_there_and_gone(lab: Lab) -> None:
    """The session's lab remains while another lab starts and ends beside it."""
    with Lab(Spec(nodes=3, cpus=4)) as other:
        command = ["srun", "-N3", "--ntasks-per-node=2", "sh", "-c", "hostname; exec getent hosts n3"]
        environment = {**os.environ, **other.environment}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        assert sorted(word for word in said if word[0] == "n" and word != "n3") == ["n1", "n1", "n2", "n2"]
        assert said.count("127.0.1.3") == 6
        subprocess.run(["sbatch", "--output=/dev/null", "--wrap=sleep 1000"], env=environment, check=True)
        assert daemons(str(other.folder))
    assert daemons(str(other.folder)) == []
    assert not other.folder.exists()
    assert daemons(str(lab.folder))


@pytest.mark.usefixtures("lab")
def test_up_and_down(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    up = [*SLURMLAB, "up", "--nodes", "1", "--dir", str(folder)]
    said = subprocess.run(up, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"export SLURM_CONF={folder}/slurm.conf\n"
    assert subprocess.run(up, cwd=ROOT, capture_output=True, check=False).returncode == 2
    run = subprocess.run(["bash", "-c", f"{said} srun hostname"], capture_output=True, text=True, check=True)
    assert run.stdout == "n1\n"
    subprocess.run([*SLURMLAB, "down", "--dir", str(folder)], cwd=ROOT, check=True)
    assert daemons(str(folder)) == []
    assert not folder.exists()


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_lab_leaves_no_process(number: int) -> None:
    command = [*SLURMLAB, "run", "--nodes", "1", "--", "sh", "-c", "echo $SLURM_CONF; exec sleep 1000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = str(Path(process.stdout.readline()).parent)
        assert daemons(folder)
        process.send_signal(number)
    deadline = time.monotonic() + 10
    while daemons(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert daemons(folder) == []
    with Lab(Spec(nodes=1)):
        # The killed lab could not delete these.
        assert not Path(folder).exists()


def test_without_means_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not() == "slurmlab needs Slurm's daemons; apt-get install slurm-wlm munge util-linux"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "slurmlab runs Slurm's daemons, which needs root; run it as root"
