"""`llmtrain doctor`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has, what is missing and how to install it; exit code 1 if training cannot work."""
    from llmtrain.doctor import can_train, examine

    findings = examine()
    fit = can_train(findings)
    if as_json:
        typer.echo(json.dumps({"can_train": fit, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            advice = f"  -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.state:<7} {finding.name:<13} {finding.detail}{advice}")
        typer.echo("training works here" if fit else "training does not work here: see what is broken above")
    raise typer.Exit(0 if fit else 1)
