"""FLOPs against published sizes and torch's own counter; peaks by name; measurements of the process itself."""

import mmap
from types import SimpleNamespace

import pytest
import torch
from llmtrain.cli.main import main
from llmtrain.cluster.description import Accelerator, Cluster, Node
from llmtrain.comm.device import device_name
from llmtrain.model.config import GPTConfig, ModelConfig
from llmtrain.model.gpt import GPT
from llmtrain.optim.config import PrecisionConfig
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.flops import computes_bf16, datasheet_peak, flops_per_token, is_amd, multiplying_parameters
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.traffic import Traffic
from llmtrain.plan.views.view import view_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.telemetry.about import RunInfo, describe
from llmtrain.telemetry.meters import CommMeter, measured_peak, memory_bytes
from llmtrain_data.config import DataConfig
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


def config(family: str = "gpt2", **sizes: object) -> GPTConfig:
    keys: dict[str, object] = {
        "family": family,
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 192,
        "positions": 32,
        "vocab": 97,
        "tie_embeddings": family == "gpt2",
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rotary_fraction": 1.0,
        "activation": "swiglu" if family == "llama" else "gelu",
        "dropout": 0.0,
    }
    return GPTConfig(**{**keys, **sizes})  # type: ignore[arg-type]


def test_gpt2_124m() -> None:
    gpt2 = config(layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, positions=1024, vocab=50257)
    # 12 hidden^2 per block, and the tied head; neither positions nor norms nor biases.
    assert multiplying_parameters(gpt2) == 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(gpt2, 1024) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024


def test_llama_shares_key_and_value_heads() -> None:
    llama = config("llama", kv_heads=1)
    per_block = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 192 * 64
    assert multiplying_parameters(llama) == 2 * per_block + 97 * 64


@pytest.mark.parametrize(("family", "kv_heads"), [("gpt2", 4), ("llama", 4), ("llama", 2), ("neox", 4)])
def test_the_model_does_what_is_counted(family: str, kv_heads: int) -> None:
    shape = config(family, kv_heads=kv_heads)
    model = GPT(shape, torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(3, 32, dtype=torch.long, device="meta"))
    # The backward pass is twice the forward pass; the counter does not halve for the causal mask either.
    assert 3 * counter.get_total_flops() == flops_per_token(shape, 32) * 3 * 32


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H800 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA H20", "fp16", 148.0),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
    ],
)
def test_peak_of_known_cards(name: str, precision: str, tflops: float) -> None:
    assert datasheet_peak(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("CPU, 2 threads", "fp32"),
        ("NVIDIA B1000", "bf16"),
    ],
)
def test_peak_that_is_not_known(name: str, precision: str) -> None:
    assert datasheet_peak(name, precision) is None


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [
        ("V100-32GB", (), False),
        ("Tesla T4", ("bf16", "fp16"), False),
        ("A100-40GB", ("fp16",), True),
        ("a new card", ("fp16",), False),
        ("a new card", ("fp16", "bf16"), True),
        (None, ("fp32",), True),
        (None, (), True),
    ],
)
def test_cards_that_compute_in_bf16(name: str | None, stated: tuple[str, ...], expected: bool) -> None:
    accelerator = Accelerator(name=name, peak=dict.fromkeys(stated, "1TFLOP/s"))
    assert computes_bf16(accelerator) is expected


def test_a_described_card_without_bf16_is_planned_in_fp16() -> None:
    described = "cluster={accelerator: {name: V100-32GB}, node: {ranks: 8}}"
    view = view_recipe("gpt2-124m", ["data.path=set", described], 8)
    assert (view.plan.compute, view.plan.kernels.attention) == ("fp16", "efficient")
    assert "precision.compute: auto -> fp16" in view.auto
    assert not [sentence for sentence in view.advice if "bf16" in sentence]


@pytest.mark.parametrize(
    ("accelerator", "compute"),
    [
        ("{name: V100-32GB}", "unknown: V100-32GB does not compute in bf16; set precision.compute=fp16"),
        ("{peak: {fp16: 1TFLOP/s}}", "unknown: give cluster.accelerator.name or cluster.accelerator.peak.bf16"),
        ("{name: A100-40GB}", "at least "),
    ],
)
def test_bf16_on_a_card_without_it_gets_advice(
    accelerator: str, compute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    described = f"cluster={{accelerator: {accelerator}, node: {{ranks: 8}}}}"
    assert main(["plan", "gpt2-124m", "data.path=set", "precision.compute=bf16", described]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"compute {compute}" in said
    advice = "precision.compute is bf16, but V100-32GB does not compute in bf16, and torch emulates it slowly; set it"
    assert (advice in said) is ("V100" in accelerator)


@pytest.mark.parametrize(
    ("name", "device", "stated", "expected"),
    [
        ("a new card", "cuda", {"fp32": "3TFLOP/s"}, 3e12),
        ("a new card", "cuda", {"bf16": "3TFLOP/s"}, None),
        ("NVIDIA L4", "cuda", {"fp32": "3TFLOP/s"}, 30.3e12),
        # CPUs only simulate the cluster of the description.
        ("CPU, 2 threads", "cpu", {"fp32": "3TFLOP/s"}, None),
    ],
)
def test_peak_that_the_cluster_states(
    monkeypatch: pytest.MonkeyPatch, name: str, device: Device, stated: dict[str, str], expected: float | None
) -> None:
    monkeypatch.setattr("llmtrain.telemetry.about.measured_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr("llmtrain.telemetry.about.device_name", lambda device: name)
    cluster = Cluster(node=Node(ranks=1), accelerator=Accelerator(peak=stated))
    recipe = Recipe(
        name="x",
        model=ModelConfig(family="gpt2", layers=2, hidden=32, heads=2, vocab=50),
        data=DataConfig(path="corpus"),
        precision=PrecisionConfig(compute="fp32"),
        cluster=cluster,
    )
    about = RunInfo(device=torch.device(device), model_state_bytes=0)
    facts = Facts(world=1, device=device, cluster=cluster)
    assert describe(make_plan(recipe, facts), about)["datasheet_peak"] == expected


def test_measuring_leaves_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    # Even the slowest machine does some thousand products per second and thread.
    assert 1e7 < measured_peak(CPU, torch.float32, budget=0.02) < 1e15
    assert torch.equal(torch.rand(3), expected)


def test_interrupted_products_do_not_lower_the_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    class Product:
        """A product that takes a hundred times as long while threads start, and then in three of four calls, as on a
        busy machine."""

        size, calls, clock = 512, 0, 0.0

        def __init__(self, random: torch.Generator, dtype: torch.dtype, size: int) -> None:
            pass

        def seconds(self) -> float:
            Product.calls += 1
            Product.clock += 1e-4
            slow = Product.calls < 20 or Product.calls % 4
            return 1e-1 if slow else 1e-3

    monkeypatch.setattr("llmtrain.telemetry.meters._Product", Product)
    monkeypatch.setattr("llmtrain.telemetry.meters.time", SimpleNamespace(perf_counter=lambda: Product.clock))
    assert measured_peak(CPU, torch.float32, budget=0.05) == 2 * 512**3 / 1e-3


def test_bytes_are_counted_by_group_and_operation_until_taken() -> None:
    meter = CommMeter()
    meter.add([Traffic("weights", "all_gather", "node", 100, 75, packed=True)])
    meter.add([Traffic("weights", "all_gather", "all", 20, 10, packed=False)] * 2)
    meter.add([Traffic("gradients", "all_to_all", "all", 4, 5, packed=False)])
    assert meter.take() == {
        "comm_bytes": {"weights": {"all_gather": 140}, "gradients": {"all_to_all": 4}},
        "comm_sent_bytes": {"node": 75, "all": 25},
        "comm_quantized_share": 0.75,
    }
    assert meter.take() == {"comm_bytes": {}, "comm_sent_bytes": {}, "comm_quantized_share": 0.0}


def test_memory_follows_what_is_held() -> None:
    before = memory_bytes(CPU, model_states=5)
    # Measure the kernel's figure, because an allocator may reuse memory that an earlier test has freed.
    held = mmap.mmap(-1, 50_000_000)
    held[:: mmap.PAGESIZE] = bytes(len(range(0, len(held), mmap.PAGESIZE)))
    after = memory_bytes(CPU, model_states=5)
    assert after["rss"] - before["rss"] > 0.9 * len(held)
    assert after["peak_rss"] >= after["rss"]
    assert after["model_states"] == 5
    assert set(after) == {"rss", "peak_rss", "model_states"}
    assert device_name(CPU).startswith(f"CPU, {torch.get_num_threads()} thread")


@pytest.mark.parametrize(
    ("name", "amd"),
    [
        ("AMD Instinct MI250X", True),
        ("MI300X", True),
        ("MI210", True),
        ("A100-40GB", False),
        ("NVIDIA H200", False),
        ("", False),
    ],
)
def test_whose_card_it_is(name: str, amd: bool) -> None:
    assert is_amd(name) is amd


@pytest.mark.parametrize(("name", "adds"), [("MI250X", False), ("A100", True)])
def test_products_of_amd_add_to_no_sum_in_fp32(name: str, adds: bool) -> None:
    described = f"cluster={{accelerator: {{name: {name}, memory: 64GB}}}}"
    assert view_recipe("gpt2-124m", ["data.path=set", described], 1).plan.kernels.adds_to_fp32 is adds
