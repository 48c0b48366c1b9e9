"""Jobs from recipes and sites' profiles."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.description import Cluster
from llmtrain.errors import BadInputError
from llmtrain.launch.slurm import queue
from llmtrain.launch.slurm.config import seconds
from llmtrain.launch.slurm.record import jobs_of
from llmtrain.launch.slurm.script import BatchJob
from llmtrain.launch.status import statuses
from llmtrain.launch.submit import load_site, submit
from llmtrain.plan.facts import Facts
from llmtrain.recipe.load import load_recipe
from llmtrain.start.job import plan_job
from llmtrain.yaml import file as yaml_file
from llmtrain_data.indexed import IndexedWriter

RECIPE = """
model: {{family: llama, layers: 4, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{global_batch: 48}}
logging: {{dir: {folder}/runs}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    for _ in range(20):
        writer.add(np.arange(100) % 64, np.array([100]))
    writer.commit()
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


def site_file(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(text)
    return path


def planned(recipe: Path, *overrides: str, site: str = "ranks_per_node: 4", nodes: int | None = None) -> BatchJob:
    return plan_job(str(recipe), overrides, load_site(site_file(recipe.parent, site)), nodes)


@pytest.mark.parametrize(
    ("accelerator", "margin", "short"),
    [
        ("peak: {bf16: 1MFLOP/s}", 300, True),
        ("peak: {bf16: 1MFLOP/s}", 60000, False),
        ("peak: {bf16: 1TFLOP/s}", 300, False),
        ("memory: 80GB", 300, False),
    ],
    ids=["slow", "slow, with time", "fast", "unknown"],
)
def test_a_margin_shorter_than_steps_and_a_save(
    accelerator: str, margin: int, short: bool, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_file(recipe.parent, f"{{gpus_per_node: 1, margin: {margin}}}")
    cluster = f"cluster={{node: {{ranks: 1}}, accelerator: {{{accelerator}}}}}"
    assert main(["submit", str(recipe), "parallel.data=1", cluster, "--site", str(site), "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("the site's margin is 300 seconds, in which the run may not have saved" in said) is short
    assert ("in the site's profile" in said) is short


@pytest.mark.parametrize(
    ("overrides", "site", "nodes", "size"),
    [
        (["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"], "ranks_per_node: 4", None, (2, 4)),
        (["parallel.tensor=2", "parallel.data=1"], "ranks_per_node: 4", None, (1, 2)),
        (["parallel.tensor=2"], "ranks_per_node: 4", 3, (3, 4)),
        (["parallel.data=8"], "gpus_per_node: a100:4", None, (2, 4)),
        (["parallel.data=8"], "{gpus_per_node: 2, ranks_per_node: 4}", None, (2, 4)),
        (["parallel.data=16", "cluster=p4d"], "{}", None, (2, 8)),
        (["parallel.data=1"], "{}", None, (1, 1)),
        (["parallel.data=1"], "gpus_per_node: 0", None, (1, 1)),
    ],
)
def test_nodes_and_ranks(
    recipe: Path, overrides: list[str], site: str, nodes: int | None, size: tuple[int, int]
) -> None:
    job = planned(recipe, *overrides, site=site, nodes=nodes)
    assert (job.allocation.nodes, job.allocation.ranks_per_node) == size
    assert ("--nproc" in job.command) is (size == (1, 1))


@pytest.mark.parametrize(
    ("overrides", "site", "said"),
    [
        ([], "ranks_per_node: 4", "add --nodes N, or set parallel.data"),
        (["parallel.data=6"], "ranks_per_node: 4", "6 ranks, which do not fill nodes of 4"),
        (["parallel.data=2"], "gpus_per_node: 0", "set ranks_per_node in .*site.yaml"),
        (["parallel.data=2"], "{}", "set ranks_per_node in .*site.yaml"),
        (["parallel.data=5"], "ranks_per_node: 5", "train.global_batch is 48"),
        (["parallel.data=4", "name=50%"], "ranks_per_node: 4", "without %, so set another logging.dir or name"),
        (
            ["parallel.data=8", "cluster={node: {ranks: 8}}"],
            "ranks_per_node: 4",
            "ranks_per_node is 4 in the site's profile, but cluster.node.ranks is 8; add cluster.node.ranks=4, or set "
            "ranks_per_node to 8",
        ),
        (["parallel.datta=5"], "{}", "did you mean parallel.data"),
        (["parallel.data=4", "checkpoint.resume=never"], "ranks_per_node: 4", "leave checkpoint.resume out"),
    ],
)
def test_runs_that_cannot_be(recipe: Path, overrides: list[str], site: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        planned(recipe, *overrides, site=site)
    if "global_batch" in said:
        with pytest.raises(BadInputError, match=said):
            planned(recipe, *overrides, site=f"{{{site}, container: {{image: x.sif}}}}")
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: x", "acount is no key of a site; did you mean account"),
        ("container: {imge: x}", "did you mean container.image"),
        ("time: 10\nmargin: 600", "lower margin or raise time"),
        ("time: 1:xx", "expected minutes, hours:minutes:seconds"),
        ("margin: 65536", "margin is 65536; expected a number less than or equal to 65535"),
        ("margin: 0", "margin is 0; expected a number greater than or equal to 1"),
        ("ranks_per_node: four", "ranks_per_node is four; expected a valid integer"),
        ("environment: {WANDB_API_KEY: abc}", "environment.WANDB_API_KEY seems to hold a secret"),
        ("environment: {HF_TOKEN: abc}", "seems to hold a secret"),
        ("environment: {db_password: abc}", "seems to hold a secret"),
        ("environment: {HTTPS_PROXY: 'http://me:pass@proxy'}", "seems to hold a secret"),
        ("container: {image: 'docker://me:pass@registry/x'}", "container.image or mounts seems to hold a secret"),
        ("sbatch: ['--comment=https://me:pass@host']", "sbatch seems to hold a secret"),
        ("srun: ['--container-image=docker://me:pass@host/x']", "srun seems to hold a secret"),
        ("environment: {'A B': c}", "expected the name of a variable"),
        ('environment: {A: "b\\nc"}', "expected printable characters"),
        ("sbatch: ['--export=WANDB_API_KEY=x']", "sbatch has --export"),
        ("sbatch: ['--chdir=/there']", "sbatch has --chdir=/there; submit from that folder"),
        ("sbatch: [mail]", "expected one option each"),
        ('account: "x\\n#SBATCH --wrap=y"', "expected printable characters"),
        ("- a", "holds a list"),
    ],
)
def test_profiles_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        load_site(site_file(tmp_path, text))


def test_names_that_only_sound_like_secrets(tmp_path: Path) -> None:
    names = ("NCCL_DEBUG", "MONKEY", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PASSENGERS")
    site = load_site(site_file(tmp_path, "environment: {" + ", ".join(f"{name}: 1" for name in names) + "}"))
    assert tuple(site.environment) == names


def test_times(tmp_path: Path) -> None:
    assert load_site(site_file(tmp_path, "time: 24:00:00  # a day")).time == "24:00:00"
    assert load_site(site_file(tmp_path, "time: 90")).time == 90
    times = ("90", "90:30", "1:30:00", "2-0", "2-1:30", "2-1:30:15")
    assert [seconds(time) for time in times] == [5400, 5430, 5400, 172800, 178200, 178215]


def test_the_users_own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_site(None).account is None
    (tmp_path / "llmtrain").mkdir()
    site_file(tmp_path / "llmtrain", "account: mine")
    assert load_site(None).account == "mine"
    with pytest.raises(BadInputError, match="cannot be read"):
        load_site(tmp_path / "nowhere.yaml")


def test_a_dry_run_prints_a_script_without_secrets(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "f00dfeed")
    site = str(site_file(recipe.parent, "ranks_per_node: 2"))
    assert main(["submit", str(recipe), "parallel.data=4", "--site", site, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script
    assert '-m llmtrain run "$recipe"\n' in script
    assert f"recipe={recipe.parent}/runs/tiny/slurm/$SLURM_JOB_ID.yaml\n" in script
    assert "\nparallel:\n  data: 4\n" in script
    assert "f00dfeed" not in script
    assert main(["submit", str(recipe), "parallel.data=4", "--site", site, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["script"], found["nodes"], found["ranks_per_node"]) == (script, 2, 2)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("", True),
        ("sbatch: [--mail-type=END]", True),
        ("gpus_per_node: 4", False),
        ("gpus_per_node: 0", False),
        ("sbatch: ['--gres=gpu:a100:4']", False),
        ("sbatch: [--gpus-per-task=1]", False),
        ("srun: [-G4]", False),
    ],
)
def test_a_profile_that_asks_for_no_gpus(
    keys: str, told: bool, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = str(site_file(recipe.parent, f"{{ranks_per_node: 4, {keys}}}"))
    assert main(["submit", str(recipe), "parallel.data=4", "--site", site, "--dry-run"]) == 0
    assert ("asks Slurm for no GPUs" in capsys.readouterr().err) == told


def test_without_slurm_it_says_so(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", str(recipe), "parallel.data=1"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_a_chain_that_is_refused_midway_names_the_jobs_before(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = recipe.parent / "sbatch"
    sbatch.write_text(f"""#!/bin/bash
        echo x >> {recipe.parent}/asked; n=$(wc -l < {recipe.parent}/asked)
        [ "$n" -le "$MOST" ] && echo $((40 + n)) || {{ echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }}
    """)
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{recipe.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MOST", "2")
    assert main(["submit", str(recipe), "parallel.data=1", "--chain", "4"]) == 1
    error = capsys.readouterr().err
    assert "QOSMaxSubmitJobPerUserLimit; of the chain of 4 jobs 41, 42 are in the queue" in error
    assert "`scancel 41 42`" in error
    assert jobs_of(recipe.parent / "runs" / "tiny") == ["41", "42"]


def test_chains_and_arrays_do_not_go_together(recipe: Path) -> None:
    site = load_site(site_file(recipe.parent, "{}"))
    with pytest.raises(BadInputError, match="leave out --chain"):
        plan_job(str(recipe), ["parallel.data=1"], site, array="0-1", chain=2)


DESCRIPTION = "{name: site, node: {ranks: 4}, clusters: [{name: a, nic: {interface: eth7, bandwidth: 100 Gbit/s}}]}"


def test_a_job_has_the_recipe_as_it_was_submitted(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has the recipe with its extended files, cluster description and overrides; `auto` and relative paths
    stay."""
    monkeypatch.chdir(recipe.parent)
    Path("site-a.yaml").write_text(DESCRIPTION)
    child = recipe.parent / "child.yaml"
    child.write_text("extends: tiny.yaml\ndata: {path: set}\nlogging: {wandb: off}\ncluster: site-a.yaml\n")
    overrides = ["parallel.data=8", "optimizer.lr=1e-3", "train.steps=1e2"]
    expected, job = load_recipe("child.yaml", overrides), planned(child, *overrides)
    assert job.recipe.sources == (child, recipe, Path("site-a.yaml"))
    for path in ("child.yaml", "tiny.yaml", "site-a.yaml"):
        Path(path).write_text("nothing: is as it was")
    Path("copy.yaml").write_text(job.recipe.text)
    copy = load_recipe("copy.yaml")
    assert (copy.name, copy.data.path, copy.train.microbatch) == ("child", "set", "auto")
    assert isinstance(copy.cluster, Cluster)
    assert [card.interface for card in copy.cluster.clusters[0].cards] == ["eth7"]
    assert replace(copy, cluster=expected.cluster) == expected


@pytest.mark.parametrize("limit", ["LARGEST_VALUES", "LARGEST_BYTES"])
def test_a_recipe_too_large_with_its_cluster_is_refused_before_its_job_is(
    limit: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is small enough by itself."""
    monkeypatch.chdir(recipe.parent)
    Path("site-a.yaml").write_text(DESCRIPTION)
    text = planned(recipe, "parallel.data=8").recipe.text
    value = len(text) if limit == "LARGEST_BYTES" else 45
    monkeypatch.setattr(yaml_file, limit, value)
    assert planned(recipe, "parallel.data=8").recipe.text == text
    with pytest.raises(BadInputError, match=f"its cluster's description: it has more than {value}"):
        planned(recipe, "parallel.data=8", "cluster=site-a.yaml")


def test_status_tells_what_was_edited_since(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = recipe.parent / "child.yaml"
    child.write_text("extends: tiny.yaml\nparallel: {data: 1}\n")
    monkeypatch.setattr(queue, "submit", lambda script, after: "41")
    job = planned(child)
    monkeypatch.setattr(queue, "jobs", lambda numbers: None)
    assert submit(job, load_site(None)) == ["41"]
    (found,) = statuses([job.folder])
    assert found.detail == ""
    recipe.write_text(f"{recipe.read_text()}seed: 7\n")
    assert statuses([job.folder])[0].detail == "tiny.yaml changed since submission"
    child.unlink()
    assert statuses([job.folder])[0].detail == "child.yaml changed since submission; tiny.yaml changed since submission"
    # The list of sources may be untrusted.
    (job.folder / "slurm" / "sources").write_text("".join(f"0  /gone-{number}\n" for number in range(1000)))
    changed = "; ".join(f"{name} changed since submission" for name in ("gone-0", "gone-1", "gone-2", "97 more files"))
    assert statuses([job.folder])[0].detail == changed
    end = {"event": "end", "step": 1, "outcome": "finished", "reason": "all steps done"}
    (job.folder / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    assert statuses([job.folder])[0].detail == "all steps done"


def test_a_job_submitted_from_a_job_has_nothing_of_it() -> None:
    shell = {"PATH": "/bin", "SLURM_CONF": "/etc/s.conf", "SLURM_CPUS_PER_TASK": "6"}
    assert queue._without_job(shell) == shell
    assert queue._without_job(shell | {"SLURM_JOB_ID": "5"}) == {"PATH": "/bin", "SLURM_CONF": "/etc/s.conf"}


def test_a_container_has_the_files(recipe: Path) -> None:
    """What the recipe names is there, so that only the rest is checked."""
    site = "{ranks_per_node: 4, container: {image: x.sif}}"
    inside = ["data.path=/in/set", "data.tokenizer=/in/tokenizer"]
    assert planned(recipe, *inside, site=site, nodes=1).allocation.ranks == 4
    assert planned(recipe, *inside, "model.vocab=auto", site=site, nodes=1).allocation.ranks == 4
    small = "cluster={accelerator: {memory: 1MB}, node: {ranks: 4}}"
    with pytest.raises(BadInputError, match=r"more than cluster\.accelerator\.memory"):
        planned(recipe, *inside, small, site=site, nodes=1)


def test_jobs_are_planned_for_the_cards_of_their_cluster(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_for = list[Facts]()
    monkeypatch.setattr("llmtrain.start.job.check", lambda made, facts: planned_for.append(facts))
    for cluster in ("p3dn", "p4d", "frontier"):
        planned(recipe, f"cluster={cluster}", nodes=1)
    assert [(facts.bf16, facts.amd) for facts in planned_for] == [(False, False), (True, False), (True, True)]
