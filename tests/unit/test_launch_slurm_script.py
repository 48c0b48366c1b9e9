"""Batch scripts: their requests to Slurm, and their reactions to how the ranks end."""

import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.errors import BadInputError
from llmtrain.launch.slurm.config import Container, Site
from llmtrain.launch.slurm.script import (
    Allocation,
    Array,
    BatchJob,
    Chain,
    SubmittedRecipe,
    array_indices,
    render,
    train_script,
)

RECIPE = "name: a run\nseed: 3\n"
COMMAND = ("/env/bin/python", "-m", "llmtrain", "run")
JOB = BatchJob(
    name="a run",
    folder=Path("/data/my runs/a run"),
    allocation=Allocation(2, 4),
    command=COMMAND,
    recipe=SubmittedRecipe(RECIPE),
)
FULL = Site(
    account="abc", partition="gpu", qos="high", constraint="a100&nvlink", reservation="r", time="1-0", gpus_per_node=4,
    cpus_per_rank=16, exclusive=True, margin=120, modules=("cuda/12.4", "gcc"), sbatch=("--mail-type=END",),
    environment={"NCCL_DEBUG": "a 'b' $c", "N": 1}, srun=("--mpi=pmix",),
)  # fmt: skip

# Replacements of Slurm's commands. srun ends with a given code, or waits for USR1; scontrol records its arguments.
SRUN = """#!/bin/bash
echo "$@" > "$NOTES/started"
echo "${MASTER_ADDR-none} ${MASTER_PORT-none}" > "$NOTES/meets"
echo >> "$NOTES/starts"
[ -z "$SAVES" ] || mkdir -p "$NOTES/a run/checkpoints/step-$(wc -l < "$NOTES/starts")"
trap 'echo USR1 > "$NOTES/signal"; exit 75' USR1
[ "$ENDS" = later ] || exit "$ENDS"
touch "$NOTES/ready"
for _ in $(seq 200); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show config") echo "TaskPlugin              = $PLUGIN" ;;
  "show job")
    echo >> "$NOTES/questions"
    [ "$(wc -l < "$NOTES/questions")" -gt "${SILENT:-0}" ] || exit 1
    echo "JobId=5 $STATE Dependency=(null)" ;;
  *) echo "$@" >> "$NOTES/asked" ;;
esac
"""


def lines(text: str, start: str) -> list[str]:
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def test_what_a_job_asks_for() -> None:
    assert lines(render(JOB, Site()), "#SBATCH ") == [
        "--job-name='a run'",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--output='/data/my runs/a run/slurm/%j.log'",
        "--signal=B:USR1@300",
        "--open-mode=append",
        "--requeue",
    ]


def test_what_a_site_adds() -> None:
    script = render(JOB, FULL)
    assert script.startswith("#!/bin/bash -l\n")
    asked = lines(script, "#SBATCH ")
    for option in (
        "--account=abc", "--partition=gpu", "--qos=high", "--constraint='a100&nvlink'", "--reservation=r", "--time=1-0",
        "--gpus-per-node=4", "--cpus-per-task=16", "--exclusive", "--signal=B:USR1@120", "--mail-type=END",
    ):  # fmt: skip
        assert option in asked
    assert lines(script, "module load ") == ["cuda/12.4 || exit 1", "gcc || exit 1"]
    assert lines(script, "export N") == ["CCL_DEBUG=" + shlex.quote("a 'b' $c"), "=1"]
    assert lines(script, "srun_options=") == ["(--mpi=pmix)"]


def test_containers() -> None:
    image = Container(image="my image.sif", mounts=("/data", "/a:/b"))
    # The runs are below one of the mounts, and the folder of relative paths is not.
    here = Path.cwd()
    binds = f"--bind /data --bind /a:/b --bind {here} --pwd {here}"
    inside = f"apptainer exec --nv {binds} 'my image.sif' /env/bin/python -m llmtrain run"
    assert lines(render(JOB, Site(container=image)), "set -- ")[0].startswith(inside)
    script = render(JOB, Site(container=replace(image, runtime="pyxis")))
    mounts = f"/data:/data,/a:/b,{here}:{here}"
    image_and_folder = f"'--container-image=my image.sif' --container-workdir={here}"
    assert lines(script, "srun_options=") == [f"({image_and_folder} --container-mounts={mounts})"]


def test_a_container_has_the_runs_folder() -> None:
    # Inside, /data is not the folder that the runs are in.
    image = Container(image="x", runtime="pyxis", mounts=("/data:/elsewhere",))
    mounts = f"'--container-mounts=/data:/elsewhere,{Path.cwd()}:{Path.cwd()},/data/my runs:/data/my runs'"
    assert mounts in lines(render(JOB, Site(container=image)), "srun_options=")[0]


def test_seeds_are_runs_of_their_own() -> None:
    job = replace(JOB, name="x", folder=Path("/runs/x"), series=Array("1-3%2"))
    script = render(job, Site())
    assert "--array=1-3%2" in lines(script, "#SBATCH ")
    assert "--output=/runs/x-seed%a/slurm/%A_%a.log" in lines(script, "#SBATCH ")
    numbers = "SLURM_ARRAY_TASK_ID=2; SLURM_ARRAY_JOB_ID=7; SLURM_JOB_ID=9"
    program = f"recipe={lines(script, 'recipe=')[0]}; set -- {lines(script, 'set -- ')[0]}; printf '%s\\n' \"$@\""
    words = subprocess.run(
        ["bash", "-c", f"{numbers}; {program}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[-3:] == ["/runs/x-seed2/slurm/7_2.yaml", "name=x-seed2", "seed=2"]
    assert job.folders == [Path(f"/runs/x-seed{seed}") for seed in (1, 2, 3)]


def test_seeds() -> None:
    assert array_indices("0-3") == [0, 1, 2, 3]
    assert array_indices("7,1-9:4%1") == [7, 1, 5, 9]
    wrong_numbers = ("\N{SUPERSCRIPT TWO}", "0-\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000, "0-99999999999", "0-10000")
    for wrong in ("", "a", "1-", "-3", "1,1", "3-1", "0-3%", "0-4:0", "4000001", "1,,2", "1-2-3", *wrong_numbers):
        with pytest.raises(BadInputError, match="--array is"):
            array_indices(wrong)


def test_the_script_is_the_one_for_ones_own_jobs() -> None:
    text = (Path(__file__).resolve().parents[2] / "tools" / "slurm" / "train_and_requeue.sh").read_text()
    assert text.endswith(train_script())
    assert render(JOB, FULL).endswith(train_script())
    assert "srun" in train_script()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's script, in a folder with the replacements of Slurm's commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = replace(JOB, folder=tmp_path / "a run", command=("train", "a b"))
    (job.folder / "slurm").mkdir(parents=True)
    (tmp_path / "job.sh").write_text(render(job, Site(srun=("--mpi=pmix",))))
    return tmp_path / "job.sh"


def start(job: Path, ends: str, state: str = "JobState=RUNNING Reason=None", **variables: str) -> subprocess.Popen[str]:
    slurm = {
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_TASKS_PER_NODE": "4(x2)",
    }
    environment = {
        **os.environ, "PATH": f"{job.parent}:{os.environ['PATH']}", "NOTES": str(job.parent), "ENDS": ends,
        "STATE": state, "PLUGIN": "task/none", **slurm, **variables,
    }  # fmt: skip
    # A shell cannot trap a signal that its parent ignores, as this test process does once it has trained.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return subprocess.Popen(
        ["bash", str(job)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=30)
    print(output)
    return process.returncode


def requeued(job: Path) -> bool:
    notes = job.parent / "asked"
    return notes.exists() and notes.read_text() == "requeue 5\n"


@pytest.mark.parametrize(
    ("ends", "code", "again"),
    [("0", 0, False), ("1", 1, False), ("2", 2, False), ("75", 75, True), ("138", 75, True), ("143", 143, False)],
)
def test_a_run_that_was_stopped_is_requeued(job: Path, ends: str, code: int, again: bool) -> None:
    assert end(start(job, ends)) == code
    assert requeued(job) is again


@pytest.mark.parametrize(
    ("state", "again"),
    [
        ("JobState=COMPLETING Reason=TimeLimit", True),
        ("JobState=COMPLETING Reason=None", False),
        ("JobState=CANCELLED Reason=None", False),
        ("JobState=PENDING Reason=BeginTime", False),
    ],
)
def test_what_slurm_has_decided_stays_so(job: Path, state: str, again: bool) -> None:
    assert end(start(job, "75", state)) == 75
    assert requeued(job) is again


def test_ranks_that_a_preemption_ends_are_requeued(job: Path) -> None:
    """Slurm sends them TERM, and nothing to the script, for the length of the grace time."""
    job.write_text(render(replace(JOB, folder=job.parent / "a run", restarts=2), Site()))
    assert end(start(job, "143", "JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00")) == 75
    assert requeued(job)
    assert (job.parent / "starts").read_text().count("\n") == 1


@pytest.mark.parametrize(("silent", "again"), [(2, True), (9, False)])
def test_a_controller_that_does_not_answer_at_once(silent: int, again: bool, job: Path) -> None:
    """Sleeps between its questions are cut short."""
    job.write_text(job.read_text().replace('sleep "$pause"', "sleep 0"))
    process = start(job, "75", SILENT=str(silent))
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 75
    assert requeued(job) == again
    assert ("Slurm does not say how job 5 is: submit it again to resume" in said) != again


def test_ranks_meet_where_slurm_says(job: Path) -> None:
    assert end(start(job, "0", MASTER_ADDR="localhost", MASTER_PORT="1")) == 0
    assert (job.parent / "meets").read_text() == "none none\n"


@pytest.mark.parametrize(
    ("ends", "state", "restarts", "starts"),
    [
        ("1", "RUNNING", 2, 3),
        ("137", "RUNNING", 2, 3),
        ("1", "RUNNING", 0, 1),
        ("2", "RUNNING", 2, 1),
        ("75", "RUNNING", 2, 1),
        ("130", "RUNNING", 2, 1),
        ("0", "RUNNING", 2, 1),
        ("143", "CANCELLED", 2, 1),
        ("143", "RUNNING", 2, 3),
    ],
)
def test_ranks_that_fail_are_started_again(ends: str, state: str, restarts: int, starts: int, job: Path) -> None:
    (job.parent / "a run" / "checkpoints" / "step-3.partial").mkdir(parents=True)
    job.write_text(render(replace(JOB, folder=job.parent / "a run", restarts=restarts), Site()))
    assert end(start(job, ends, f"JobState={state} Reason=None")) == int(ends)
    assert (job.parent / "starts").read_text().count("\n") == starts


def test_restarts_are_counted_anew_after_a_checkpoint(job: Path) -> None:
    job.write_text(render(replace(JOB, folder=job.parent / "a run", restarts=2), Site()))
    process = start(job, "1", SAVES="yes")
    while not (job.parent / "a run" / "checkpoints" / "step-6").exists():
        assert process.poll() is None
        time.sleep(0.01)
    (job.parent / "bad").write_text("#!/bin/bash\nexit 2\n")
    (job.parent / "bad").chmod(0o755)
    (job.parent / "bad").replace(job.parent / "srun")
    assert end(process) == 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_ranks_are_asked_to_stop(job: Path, number: int) -> None:
    process = start(job, "later")
    while not (job.parent / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert end(process) == 75
    assert (job.parent / "signal").read_text() == "USR1\n"
    assert requeued(job)


def test_a_run_whose_start_takes_all_of_its_time_is_not_requeued_for_ever(job: Path) -> None:
    """It saves 300 s before the end of its job's time. Slurm may signal a minute early."""
    job.write_text(render(replace(JOB, folder=job.parent / "a run"), Site(margin=300)))
    (job.parent / "a run" / "checkpoints").mkdir()

    def stopped(seconds: int, saves: str = "") -> int:
        (job.parent / "ready").unlink(missing_ok=True)
        process = start(job, "later", SLURM_JOB_END_TIME=str(int(time.time()) + seconds), SAVES=saves)
        while not (job.parent / "ready").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        return end(process)

    assert [stopped(350), stopped(350)] == [75, 75]
    # It may be preempted as often as others like.
    assert [stopped(5000), stopped(5000)] == [75, 75]
    assert stopped(350) == 2
    assert (job.parent / "asked").read_text() == "requeue 5\n" * 4
    # Then it has more time, or its start is quick for once.
    assert [stopped(350), stopped(350), stopped(350, saves="yes"), stopped(350), stopped(350)] == [75] * 5


def test_a_job_of_an_array_requeues_itself_alone(job: Path) -> None:
    """One task of an array has the array's own id, which would requeue all of its tasks."""
    assert end(start(job, "75", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3")) == 75
    assert (job.parent / "asked").read_text() == "requeue 5_3\n"


def test_a_job_of_a_chain_leaves_it_to_the_next(job: Path) -> None:
    job.write_text(render(replace(JOB, folder=job.parent / "a run", series=Chain(2)), Site()))
    assert end(start(job, "75")) == 75
    assert not requeued(job)


def test_torchrun_is_left_out(job: Path) -> None:
    job.write_text(render(replace(JOB, folder=job.parent / "a run", command=("/env/bin/torchrun", "train")), Site()))
    assert end(start(job, "0")) == 2
    assert not (job.parent / "started").exists()


def test_how_ranks_are_started(job: Path) -> None:
    end(start(job, "0"))
    recipe = job.parent / "a run" / "slurm" / "5.yaml"
    options = "--wait=60 --kill-on-bad-exit=0 --cpus-per-task=2 --distribution=block --mpi=pmix"
    plain = f"--export=ALL {options} train a b {recipe}\n"
    assert (job.parent / "started").read_text() == plain
    assert recipe.read_text() == RECIPE
    end(start(job, "0", PLUGIN="task/cgroup,task/affinity", SLURM_CPUS_PER_TASK="3"))
    bound = (job.parent / "started").read_text()
    assert "--cpus-per-task=3 --cpu-bind=cores --distribution=block:block" in bound
    assert "--mem-bind" not in bound


@pytest.mark.parametrize(("left", "code"), [(100, 2), (1000, 0), (-1_000_000_000, 0)])
def test_a_job_without_time_for_a_step_does_not_begin(left: int, code: int, job: Path) -> None:
    """Slurm would signal it at once, and it would be requeued for ever. A job without a limit may have no end."""
    ends = max(0, int(time.time()) + left)
    assert end(start(job, "0", SLURM_JOB_END_TIME=str(ends if left > 0 else 0))) == code
    assert (job.parent / "started").exists() is (code == 0)


def test_a_large_array_has_a_short_script() -> None:
    few, many = (render(replace(JOB, series=Array(seeds)), Site()) for seeds in ("0-1", "0-9999"))
    assert len(many) < len(few) + 200
    assert "/a run-seed1/slurm'\n" in few
    assert "/a run-seed2/slurm' ...\n" in many


def test_variables_of_the_shell_that_submits_change_nothing(job: Path) -> None:
    shell = {"requeue": "no", "restarts": "2", "margin": "9" * 9, "SLURM_JOB_END_TIME": str(int(time.time()) + 900)}
    assert end(start(job, "75", **shell)) == 75
    assert requeued(job)
    assert end(start(job, "1", **shell)) == 1
    assert (job.parent / "starts").read_text().count("\n") == 2
