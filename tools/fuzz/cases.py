"""The inputs of each reader: mutated valid files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tools.fuzz import seeds
from tools.fuzz.mutate import NUMBERS, WORDS, as_json, as_yaml, change_bytes, change_document, change_text, odd_value

Files = dict[str, bytes]


@dataclass
class Case:
    """One input. files: content by name in the folder. words: arguments of the command line."""

    files: Files = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


def document(random: Random, names: Mapping[str, object]) -> tuple[str, bytes]:
    """Return the name and the YAML of one of the documents, with mutated values and sometimes mutated text."""
    name = random.choice(sorted(names))
    text = as_yaml(change_document(seeds.copy(names[name]), random), random)
    return name, change_text(text, random) if random.random() < 0.3 else text


def recipe_case(random: Random) -> Case:
    """A recipe, sometimes with one that it extends, and sometimes with overrides."""
    _, text = document(random, seeds.recipes())
    files = {"recipe.yaml": text}
    if random.random() < 0.1:
        files |= {"recipe.yaml": b"extends: base.yaml\n" + text, "base.yaml": document(random, seeds.recipes())[1]}
    return Case(files, override_case(random).words if random.random() < 0.1 else [])


def override_case(random: Random) -> Case:
    """Words of the form key=value."""
    from llmtrain.recipe.keys import recipe_keys

    keys, words = sorted(recipe_keys()), []
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = random.choice(
            (random.choice(WORDS), str(random.choice(NUMBERS)), as_json(odd_value(random)).decode("utf-8", "replace"))
        )
        key = random.choice(keys) if random.random() < 0.95 else random.choice(WORDS)
        words.append(f"{key}={value}"[:100_000] if random.random() < 0.97 else value)
    return Case(words=words)


def cluster_case(random: Random) -> Case:
    """A cluster file, sometimes with overrides."""
    words = random.choice(
        ([], [], [], ["parallel.pipeline=2"], ["parallel.tensor=2", "--ranks"], override_case(random).words)
    )
    return Case({"cluster.yaml": document(random, seeds.clusters())[1]}, words)


def site_case(random: Random) -> Case:
    """A site's profile, sometimes with the seeds of an array."""
    words = (
        [random.choice((*WORDS, "0-3", "0-9%2", "1,3,5", "0-999999999999", "9-1", "0-9:2"))]
        if random.random() < 0.2
        else []
    )
    return Case({"site.yaml": document(random, {"site": seeds.SITE})[1]}, words)


def run_case(random: Random) -> Case:
    """A run folder with one mutated file."""
    files = seeds.run_folder()
    name = random.choice(
        ("metrics.jsonl", "metrics.jsonl", "metrics.jsonl", "run.json", "lock", "slurm/jobs", "slurm/sources")
    )
    lines = files[name].splitlines(keepends=True) if name == "metrics.jsonl" else [files[name]]
    for _ in range(random.choice((1, 1, 3))):
        at = random.randrange(len(lines))
        line = lines[at]
        if random.random() < 0.6 and name.endswith(("json", "jsonl", "lock")):
            line = as_json(change_document(seeds.parsed(line), random)) + b"\n"
        lines[at] = change_text(line, random) if random.random() < 0.4 else line
    files[name] = b"".join(lines)
    return Case(files)


def manifest_case(random: Random) -> Case:
    """A checkpoint with a mutated manifest and its correct checksum."""
    files = seeds.checkpoint()
    text = as_json(change_document(seeds.parsed(files["manifest.json"]), random))
    text = change_text(text, random) if random.random() < 0.2 else text
    return Case({f"step-00000001/{name}": content for name, content in {**files, **seeds.sealed(text)}.items()})


def shard_case(random: Random) -> Case:
    """A checkpoint with a mutated tensor file, with or without correct checksums."""
    files = seeds.checkpoint()
    name = "rank-00000.safetensors"
    files[name] = change_safetensors(files[name], random)
    if random.random() < 0.7:
        files |= seeds.resealed(files, name)
    return Case({f"step-00000001/{each}": content for each, content in files.items()})


def change_safetensors(data: bytes, random: Random) -> bytes:
    """Mutate values of the header, or bytes."""
    if random.random() < 0.4:
        return change_bytes(data, random)
    length = int.from_bytes(data[:8], "little")
    header = as_json(change_document(seeds.parsed(data[8 : 8 + length]), random))
    header = change_text(header, random) if random.random() < 0.2 else header
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def hf_config_case(random: Random) -> Case:
    """A mutated configuration of a Hugging Face model."""
    name, config = random.choice(sorted(seeds.hf_configs().items()))
    text = as_json(change_document(seeds.copy(config), random))
    return Case({"config.json": change_text(text, random) if random.random() < 0.2 else text}, [name])


def hf_weights_case(random: Random) -> Case:
    """Mutated weights of a Hugging Face model: a mutated file, or a mutated index."""
    files = seeds.hf_model()
    if random.random() < 0.3:
        index = {
            "metadata": {"total_size": 1},
            "weight_map": dict.fromkeys(seeds.names_in(files["model.safetensors"]), "a.safetensors"),
        }
        files = {"config.json": files["config.json"], "a.safetensors": files["model.safetensors"]}
        text = as_json(change_document(index, random))
        files["model.safetensors.index.json"] = change_text(text, random) if random.random() < 0.2 else text
    else:
        files["model.safetensors"] = change_safetensors(files["model.safetensors"], random)
    return Case(files)


def data_case(random: Random) -> Case:
    """A prepared set with one mutated file."""
    files = dict(seeds.data_set())
    name = random.choice(("set.idx", "set.idx", "set.idx", "set.bin", "set.checksums"))
    files[name] = change_bytes(files[name], random)
    if name != "set.checksums" and random.random() < 0.8:
        del files["set.checksums"]
    elif name == "set.checksums" and random.random() < 0.5:
        files[name] = seeds.sealed_checksums(files[name])
    return Case(files)


def jsonl_case(random: Random) -> Case:
    """Mutated JSON lines, sometimes compressed."""
    lines = [as_json({"text": f"word {number}", "id": number, "meta": {"a": [1, None]}}) for number in range(20)]
    for _ in range(random.choice((1, 2, 5))):
        at = random.randrange(len(lines))
        record = as_json(change_document(seeds.parsed(lines[at]), random))
        lines[at] = change_text(record, random) if random.random() < 0.5 else record
    data = b"\n".join(lines)
    data = change_text(data, random) if random.random() < 0.2 else data
    return Case(compressed("set.jsonl", data, random))


def compressed(name: str, data: bytes, random: Random) -> Files:
    """Return a file, sometimes compressed, and then sometimes mutated."""
    suffix, pack = random.choice((("", bytes), ("", bytes), (".gz", seeds.gzipped), (".zst", seeds.zstandard)))
    packed = pack(data)
    return {name + suffix: change_bytes(packed, random) if suffix and random.random() < 0.5 else packed}


def text_case(random: Random) -> Case:
    """Mutated plain text, sometimes compressed."""
    return Case(
        compressed("set.txt", change_text(seeds.TEXT, random), random), ["\n\n"] if random.random() < 0.3 else []
    )


def parquet_case(random: Random) -> Case:
    """A Parquet file with mutated bytes, mostly in the footer, which has the metadata."""
    case = changed_parquet(seeds.parquet_files(views=False), random)
    # This draw comes last, so that the numbers of older finds still give the same inputs.
    return changed_parquet(seeds.parquet_files(views=True), random) if random.random() < 0.1 else case


def changed_parquet(files: Sequence[bytes], random: Random) -> Case:
    """Mutate one of the files."""
    data = random.choice(files)
    cut = random.choice((0, max(0, len(data) - 600), len(data) - 8))
    return Case({"set.parquet": data[:cut] + change_bytes(data[cut:], random)})


def tokenizer_case(random: Random) -> Case:
    """A tokenizer folder with one mutated file."""
    files = dict(seeds.tokenizer())
    name = random.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    text = as_json(change_document(seeds.parsed(files[name]), random))
    files[name] = change_text(text, random) if random.random() < 0.2 else text
    return Case({f"tokenizer/{each}": content for each, content in files.items()})
