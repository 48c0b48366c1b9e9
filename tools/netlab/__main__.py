"""Run a command as every rank of an emulated cluster.

python -m tools.netlab --nodes 2 --ranks-per-node 2 --inter 100mbit -- python -m llmtrain run recipe.yaml
python -m tools.netlab --cluster two-sites --nodes 1 --ranks-per-node 2 --slower 1000 -- COMMAND
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError, RunFailedError

from tools.netlab import network
from tools.netlab.lab import Lab
from tools.netlab.report import as_json, as_table
from tools.netlab.spec import Spec, of_cluster, plain


def main() -> int:
    """Run the command, report and clean up. Return the exit code."""
    arguments = _parse()
    try:
        if arguments.clean:
            return _clean()
        return _run(arguments, _spec(arguments))
    except BadInputError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", help="a cluster file or its name; emulate its nodes, cards and rates")
    parser.add_argument("--nodes", type=int, help="number of nodes; with --cluster, of each of its clusters")
    parser.add_argument("--ranks-per-node", type=int, help="ranks per node (default: the cluster file's, or 1)")
    parser.add_argument("--inter", metavar="RATE", help="rate of each node's card, such as 100mbit (default: unshaped)")
    parser.add_argument(
        "--intra", metavar="RATE", help="rate of all traffic between the ranks of a node (default: unshaped)"
    )
    parser.add_argument("--latency", metavar="TIME", help="latency between nodes, such as 5ms (default: none)")
    parser.add_argument(
        "--slow",
        metavar="NODE=SPEED",
        action="append",
        default=[],
        help="run a node's ranks only for this share of the time, such as 1=0.5; repeat it for further nodes",
    )
    parser.add_argument("--slower", type=float, default=1.0, metavar="N", help="make links N times slower")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="kill the run after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--clean", action="store_true", help="remove the namespaces of killed labs, and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command of every rank")
    arguments = parser.parse_args()
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command and not arguments.clean:
        parser.error("the command is missing; put it after --")
    return arguments


def _spec(arguments: argparse.Namespace) -> Spec:
    spec = _described(arguments)
    speeds = dict(_speed(text) for text in arguments.slow)
    return replace(spec, speeds={**spec.speeds, **speeds})


def _speed(text: str) -> tuple[int, float]:
    node, _, speed = text.partition("=")
    try:
        return int(node), float(speed)
    except ValueError:
        raise BadInputError(f"--slow is {text}; expected a node's number and a share of the time: 1=0.5") from None


def _described(arguments: argparse.Namespace) -> Spec:
    if arguments.cluster is None:
        if arguments.slower != 1.0:
            raise BadInputError("--slower needs --cluster, whose rates it divides; without it, set the rate by --inter")
        nodes, ranks = arguments.nodes or 2, arguments.ranks_per_node or 1
        return plain(nodes, ranks, arguments.inter, arguments.intra, arguments.latency)
    for key in ("inter", "latency"):
        if getattr(arguments, key) is not None:
            raise BadInputError(f"--{key} and --cluster both set the cards' speed; leave one out")
    cluster = load_cluster(arguments.cluster)
    return of_cluster(cluster, arguments.nodes, arguments.ranks_per_node, arguments.slower, arguments.intra)


def _run(arguments: argparse.Namespace, spec: Spec) -> int:
    lab = Lab(spec)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not lab.pass_on(number):
            raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    with lab:
        result = lab.run(arguments.command, timeout=arguments.timeout, echo=True)
    print(as_table(result))
    if arguments.json is not None:
        arguments.json.write_text(as_json(spec, arguments.command, result))
    return result.returncode if result.returncode >= 0 else 128 - result.returncode


def _clean() -> int:
    names = network.leftovers()
    network.remove(names)
    print(f"removed {', '.join(names)}" if names else "nothing to remove")
    return 0


if __name__ == "__main__":
    sys.exit(main())
