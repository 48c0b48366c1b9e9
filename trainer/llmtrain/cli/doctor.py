"""`llmtrain doctor`."""

from dataclasses import asdict

import typer
from llmtrain_data.output import say, say_json, say_table
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import Json


def doctor(as_json: Json = False) -> None:
    """Check this machine: show what it has, what is missing and how to install it; exit code 1 if training cannot
    work."""
    from llmtrain.launch.doctor import can_train, examine

    with loading("PyTorch"):
        findings = examine()
    fit = can_train(findings)
    if as_json:
        say_json({"can_train": fit, "findings": [asdict(finding) for finding in findings]}, indent=2)
    else:
        rows = [(finding.state, finding.name, finding.detail, finding.advice) for finding in findings]
        say_table(("state", "part", "found", "advice"), rows)
        say("training works here" if fit else "training does not work here: see what is broken above")
    raise typer.Exit(0 if fit else 1)
