"""A real Slurm on this machine: several nodes, each with a slurmd and a name of its own, and nothing of it stays.

All of it lives in one folder and in process, mount and host-name namespaces of its own, whose first process takes all
others along when it is killed: whatever happens, no daemon, no job and no change to the machine is left.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from llmtrain.errors import BadInputError, RunFailedError

from tools.ports import free_ports
from tools.slurmlab.files import Spec, write

# Seconds in which all nodes have to come up.
PATIENCE = 60
_PREFIX = "slurmlab-"
_NEEDED = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
_NEEDED |= dict.fromkeys(("unshare", "setpriv", "mount"), "util-linux")


class Lab:
    """A Slurm in a `with` block. Needs root.

        with Lab(Spec(nodes=2)) as lab:
            subprocess.run(["srun", "-N2", "hostname"], env={**os.environ, **lab.environment})

    Entering raises BadInputError where no lab can be made, RunFailedError when it does not come up.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that lead Slurm's commands to the lab."""
        return environment(self.folder)

    def __enter__(self) -> Self:
        _refuse_without_means()
        _remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        try:
            self._process = start(self.spec, self.folder, ("setpriv", "--pdeathsig", "KILL", "--"))
            wait_until_up(self.spec, self.folder)
        except BaseException:
            stop(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self.folder)
        self._process.wait()


def why_not() -> str | None:
    """Return why no lab can be made here, as a sentence, or None if one can."""
    if os.geteuid() != 0:
        return "slurmlab runs Slurm's daemons, which needs root; run it as root"
    missing = [package for tool, package in _NEEDED.items() if shutil.which(tool) is None]
    if missing:
        return f"slurmlab needs Slurm's daemons; apt-get install {' '.join(dict.fromkeys(missing))}"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"slurmlab cannot make namespaces here: {' '.join(tried.stderr.split())}"
    return None


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables that lead Slurm's commands to the lab in `folder`."""
    return {"SLURM_CONF": str(folder / "slurm.conf")}


def bring_up(spec: Spec, folder: Path) -> None:
    """Start a lab that stays until `stop`. Raises BadInputError where there is one in the folder, or none can be."""
    _refuse_without_means()
    if folder.exists():
        raise BadInputError(f"{folder} exists, so a lab is up; take it down first, or name another folder with --dir")
    folder.mkdir(parents=True)
    try:
        start(spec, folder, ("setsid",))
        wait_until_up(spec, folder)
    except BaseException:
        stop(folder)
        raise


def start(spec: Spec, folder: Path, how: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Write a lab's files into an empty folder and start its daemons. how: a command that starts the one after it."""
    write(spec, folder, free_ports(1 + spec.nodes))
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            [*how, *_NAMESPACES, "bash", str(folder / "start.sh")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment(folder)},
        )  # fmt: skip


def stop(folder: Path) -> bool:
    """Kill the lab in `folder` and all its jobs, and delete it. Return whether there was one."""
    script = str(folder / "start.sh")
    while pids := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _runs(pid, script)]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    found = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return found


def wait_until_up(spec: Spec, folder: Path) -> None:
    """Return when all nodes take jobs. Raises RunFailedError when they do not in time."""
    deadline = time.monotonic() + PATIENCE
    ask = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    while time.monotonic() < deadline:
        said = subprocess.run(
            ask, env={**os.environ, **environment(folder)}, capture_output=True, text=True, check=False
        )
        if sorted(said.stdout.split()) == sorted(spec.names):
            return
        time.sleep(0.2)
    log = (folder / "start.log").read_text(errors="replace").splitlines()
    raise RunFailedError(f"Slurm did not come up within {PATIENCE} s; its last words: {' / '.join(log[-3:])}")


_NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def _refuse_without_means() -> None:
    if (reason := why_not()) is not None:
        raise BadInputError(reason)


def _remove_leftovers() -> None:
    """Delete the folders of labs that were killed together with their process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int, script: str) -> bool:
    """Whether a process is the first of a lab, or what started it: its command ends with the lab's script."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[-2:-1] == [script.encode()]
