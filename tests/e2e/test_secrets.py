"""Secrets in the environment reach no log, no checkpoint and no resolved recipe."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from llmtrain_data.indexed import IndexedWriter

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 4, global_batch: 4}}
optimizer: {{warmup: 2}}
checkpoint: {{every: 2}}
logging: {{every: 1, dir: {folder}/runs, wandb: offline}}
"""
SECRETS = {
    "WANDB_API_KEY": "5ec2e7" * 6 + "abcd",
    "HF_TOKEN": "hf_veryverysecrettoken",
    "AWS_SECRET_ACCESS_KEY": "aws/very/secret+key",
    "GITHUB_TOKEN": "ghp_veryverysecrettoken",
    "LLMTRAIN_TEST_PASSWORD": "correct horse battery staple",
}


def test_no_secret_is_written(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    for _ in range(50):
        writer.add(np.arange(100) % 64, np.array([100]))
    writer.commit()
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    command = [sys.executable, "-m", "llmtrain", "run", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **SECRETS}
    said = ""
    # Two ranks, with errors that quote their input.
    for arguments in (["--nproc", "2"], ["name=${oc.env:HF_TOKEN}"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)
        said += done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    written = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    names = {path.name for path in written}
    assert {"recipe.resolved.yaml", "metrics.jsonl", "manifest.json", "run.json"} <= names
    assert any(name.endswith(".wandb") for name in names)
    for key, secret in SECRETS.items():
        assert secret not in said, key
        assert [str(path) for path, content in written.items() if secret.encode() in content] == [], key
