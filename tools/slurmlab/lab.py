"""A real Slurm on this machine, with several nodes, each with its own slurmd and host name.

It uses one folder and its own process, mount and host-name namespaces. When their first process dies, the kernel kills
all others. So no daemon, job or change to the machine can remain.
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

# Seconds to wait for all nodes to come up.
PATIENCE = 60
_PREFIX = "slurmlab-"
_NEEDED = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
_NEEDED |= dict.fromkeys(("unshare", "setpriv", "mount"), "util-linux")


class Lab:
    """A Slurm in a `with` block. Needs root.

        with Lab(Spec(nodes=2)) as lab:
            subprocess.run(["srun", "-N2", "hostname"], env={**os.environ, **lab.environment})

    Entering raises BadInputError if this machine cannot run a lab, RunFailedError if the lab does not come up.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with which Slurm's commands use the lab."""
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
    """Return why this machine cannot run a lab, as a sentence, or None if it can."""
    if os.geteuid() != 0:
        return "slurmlab runs Slurm's daemons, which needs root; run it as root"
    missing = [package for tool, package in _NEEDED.items() if shutil.which(tool) is None]
    if missing:
        return f"slurmlab needs Slurm's daemons; apt-get install {' '.join(dict.fromkeys(missing))}"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"slurmlab cannot create namespaces here: {' '.join(tried.stderr.split())}"
    return None


def environment(folder: Path) -> Mapping[str, str]:
    """Return the environment variables with which Slurm's commands use the lab in `folder`."""
    return {"SLURM_CONF": str(folder / "slurm.conf")}


def bring_up(spec: Spec, folder: Path) -> None:
    """Start a lab that runs until `stop`. Raises BadInputError if the folder has one or this machine cannot run one."""
    _refuse_without_means()
    if folder.exists():
        raise BadInputError(f"{folder} exists, so a lab is running; stop it first, or give another folder with --dir")
    folder.mkdir(parents=True)
    try:
        start(spec, folder, ("setsid",))
        wait_until_up(spec, folder)
    except BaseException:
        stop(folder)
        raise


def start(spec: Spec, folder: Path, how: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Write a lab's files into an empty folder and start its daemons. how: prefix of the command."""
    write(spec, folder, free_ports(1 + spec.nodes))
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            [*how, *_NAMESPACES, "bash", str(folder / "start.sh")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment(folder)},
        )  # fmt: skip


def stop(folder: Path) -> bool:
    """Kill the lab in `folder` and all its jobs, and delete the folder. Return whether it existed."""
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
    """Wait until all nodes accept jobs. Raises RunFailedError after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    ask = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    while time.monotonic() < deadline:
        idle = subprocess.run(
            ask, env={**os.environ, **environment(folder)}, capture_output=True, text=True, check=False
        )
        if sorted(idle.stdout.split()) == sorted(spec.names):
            return
        time.sleep(0.2)
    log = (folder / "start.log").read_text(errors="replace").splitlines()
    raise RunFailedError(f"Slurm did not start within {PATIENCE} s; the end of its log: {' / '.join(log[-3:])}")


_NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def _refuse_without_means() -> None:
    if (reason := why_not()) is not None:
        raise BadInputError(reason)


def _remove_leftovers() -> None:
    """Delete the folders of labs whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int, script: str) -> bool:
    """Whether a process is the first one of a lab, or its parent: its command line ends with the lab's script."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[-2:-1] == [script.encode()]
