"""Reading the description of a cluster. Every error is one sentence. No torch in here."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llmtrain.cluster.description import Cluster
from llmtrain.errors import BadInputError
from llmtrain.yaml.shipped import shipped_folder
from llmtrain.yaml.strict_file import StrictFile

_FILE = StrictFile(Cluster, "a cluster")


def load_cluster(source: str | Path | Mapping[str, Any], key: str = "") -> Cluster:
    """Return the cluster of a YAML file, of a shipped description by name (`frontier`), or of plain data.

    key: key of plain data in a recipe, for error messages. Raises BadInputError.
    """
    if isinstance(source, Mapping):
        return _FILE.parse(source, f"{key}." if key else "")
    return _FILE.parse(cluster_data(str(source)), f"{find_cluster(str(source))}: ")


def cluster_data(name_or_path: str) -> dict[str, Any]:
    """Return the plain data of a YAML file, or of a shipped description by name, not yet checked. Raises
    BadInputError."""
    path = find_cluster(name_or_path)
    return {"name": path.stem, **_FILE.read(path)}


def given_cluster(source: str | Cluster) -> Cluster | None:
    """Return the cluster that the recipe's key `cluster` gives; None for auto. Raises BadInputError."""
    if isinstance(source, Cluster):
        return source
    return None if source == "auto" else load_cluster(source)


def shipped_clusters() -> list[str]:
    """Return the names of the descriptions that come with llmtrain."""
    return sorted(path.stem for path in (shipped_folder() / "clusters").glob("*.yaml"))


def find_cluster(name_or_path: str) -> Path:
    """Return the file of a shipped description by name, or of a path. Raises BadInputError if there is none."""
    if name_or_path in shipped_clusters():
        return shipped_folder() / "clusters" / f"{name_or_path}.yaml"
    # If the path is not a file here, look in the shipped folder, for a path such as clusters/frontier.yaml.
    for path in (Path(name_or_path), shipped_folder() / name_or_path):
        if path.is_file():
            return path
    near = get_close_matches(Path(name_or_path).stem, shipped_clusters(), n=1)
    advice = f"did you mean {near[0]}?" if near else f"expected a YAML file, or one of {', '.join(shipped_clusters())}"
    raise BadInputError(f"there is no description of a cluster {name_or_path}; {advice}")
