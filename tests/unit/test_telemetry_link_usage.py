"""Link rates during training: histograms, collection on the main rank, and machines with few counters."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.offload.usage import TierUsage
from llmtrain.telemetry import counters
from llmtrain.telemetry import link_usage as links
from llmtrain.telemetry.counters import AmdLinks, Counts, HostLink, HostLinks, NvidiaLinks, RdmaPorts, VolumeCounters
from llmtrain.telemetry.link_usage import LinkMeter, LinkSampler, RateHistogram


class Counting:
    """A link with given readings."""

    def __init__(self, *readings: Counts) -> None:
        self.readings: Iterator[Counts] = iter(readings)

    def counts(self) -> Counts:
        return next(self.readings)


class Growing:
    """A card that sends a megabyte and receives half a megabyte between readings."""

    def __init__(self) -> None:
        self.readings = 0

    def counts(self) -> Counts:
        self.readings += 1
        return {"nic eth0": (1e6 * self.readings, 5e5 * self.readings), "nic eth1": (7.0, 7.0)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test sets."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    for module in (links, counters):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_spread_is_that_of_all_samples() -> None:
    histogram, rates = RateHistogram(), [*range(1, 1000), 50_000]
    for rate in rates:
        histogram.add(2.0 * rate, 2.0)
    figures = histogram.figures()
    assert figures["average"] == pytest.approx(sum(rates) / len(rates), abs=0.5)
    assert figures["p90"] == pytest.approx(900, rel=0.015)
    assert figures["peak"] == 50_000


def test_a_link_that_rests_has_a_percentile_of_nothing() -> None:
    histogram = RateHistogram()
    for moved in [0.0] * 95 + [100.0] * 5:
        histogram.add(moved, 1.0)
    assert histogram.figures() == {"average": 5, "p90": 0, "peak": 100}


def test_memory_does_not_grow_with_the_run() -> None:
    histogram = RateHistogram()
    for sample in range(100_000):
        histogram.add(1e9 + 1e4 * (sample % 9973), 1.0)
    assert len(histogram._samples) < 20


def test_rates_are_per_second_in_each_direction(clock: SimpleNamespace) -> None:
    meter = LinkMeter([Counting({"nic a": (0, 0)}, {"nic a": (100, 20)}, {"nic a": (400, 20)})])
    for clock.now in (1.0, 2.5):
        meter.sample()
    rates = meter.rates()["nic a"]
    assert (rates["sent"]["average"], rates["sent"]["peak"]) == (160, 200)
    assert (rates["received"]["average"], rates["received"]["peak"]) == (8, 20)
    assert (rates["both"]["average"], rates["both"]["peak"]) == (168, 200)


def test_what_makes_no_rate_is_left_out(clock: SimpleNamespace) -> None:
    readings: list[Counts] = [
        {"idle": (5, 5), "reset": (1000, 0)},
        {"idle": (5, 5), "reset": (10, 0), "new": (1e6, 0)},
        {},
        {"new": (2e6, 0)},
        {"new": (2e6 + 50, 0)},
    ]
    meter = LinkMeter([Counting(*readings)])
    for clock.now in range(1, 5):
        meter.sample()
    assert {link: rates["sent"]["peak"] for link, rates in meter.rates().items()} == {"new": 50}


def test_too_soon_for_a_rate(clock: SimpleNamespace) -> None:
    meter = LinkMeter([Counting({"a": (0, 0)}, {"a": (9, 9)}, {"a": (20, 0)})])
    clock.now = 0.01
    meter.sample()
    clock.now = 1.0
    meter.sample()
    assert meter.rates()["a"]["sent"] == {"average": 20, "p90": 20, "peak": 20}


def ranks(rank: int, local_rank: int, store: dist.Store | None) -> Ranks:
    return Ranks(rank, local_rank, Layout({Axis.DATA: 4}), torch.device("cpu"), Links(store))


def test_the_main_rank_hears_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PERIOD", 0.02)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = dist.PrefixStore("test", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    with (
        LinkSampler(ranks(0, 0, store), [Growing()]) as main,
        LinkSampler(ranks(1, 1, store), [Growing()]) as beside,
        LinkSampler(ranks(2, 0, store), [Growing()]),
    ):
        until = time.monotonic() + 20
        while len(main.nodes()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        main.stop()
    assert set(main.nodes()) == {0, 1}
    for rates in main.nodes().values():
        assert set(rates) == {"nic eth0"}
        assert rates["nic eth0"]["sent"]["average"] == pytest.approx(
            2 * rates["nic eth0"]["received"]["average"], abs=2
        )
    assert beside.nodes() == {}
    averages = {node: rates["nic eth0"]["both"]["average"] for node, rates in main.nodes().items()}
    busiest = main.busiest()["nic eth0"]
    assert busiest["average"] == max(averages.values()) == averages[int(busiest["node"])]


def test_a_lost_store_ends_the_thread_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    # The main thread checks what ended the other thread: pytest does not see a failure raised there.
    asked, died = list[str](), list[threading.ExceptHookArgs]()

    class Lost(dist.HashStore):
        def clone(self) -> "Lost":
            return self

        def add(self, key: str, amount: int) -> int:
            asked.append(key)
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(links, "PERIOD", 0.01)
    monkeypatch.setattr("threading.excepthook", died.append)
    with LinkSampler(ranks(2, 0, Lost()), [Growing()]) as sampler:
        sampler.stop()
    assert asked == ["links"]
    assert died == []


def test_this_machine_counts() -> None:
    before = HostLinks().counts()
    assert any(link.startswith("nic ") for link in before)
    assert not any(link.startswith(("disk loop", "disk ram")) for link in before)


def test_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/proc/net/dev")

    def absent(**_: Any) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(psutil, "net_io_counters", refuse)
    monkeypatch.setattr(psutil, "disk_io_counters", absent)
    assert HostLinks().counts() == {}
    assert LinkMeter([HostLinks()]).rates() == {}
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: {})
    monkeypatch.setattr(counters, "_BLOCK_DEVICES", tmp_path)
    assert HostLinks().counts() == {}


def nvml(fail: bool = False) -> SimpleNamespace:
    """The values of NVML for two cards, by its documentation: KiB so far, and KB/s at the moment."""

    class NVMLError(Exception):
        pass

    def throughput(handle: int, counter: int) -> int:
        if fail:
            raise NVMLError
        return 1000 * (handle + 1) + counter

    def values(handle: int, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert [link for _, link in fields] == [0xFFFFFFFF] * 2
        counted = {138: 10, 139: 20}
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=counted[field])) for field, _ in fields]

    return SimpleNamespace(
        NVMLError=NVMLError, NVML_SUCCESS=0, NVML_PCIE_UTIL_TX_BYTES=0, NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        nvmlDeviceGetPcieThroughput=throughput, nvmlDeviceGetFieldValues=values,
    )  # fmt: skip


def test_cards_of_nvidia(clock: SimpleNamespace) -> None:
    cards = NvidiaLinks(nvml(), [0, 1])
    clock.now = 2.0
    # The sum of both cards.
    assert cards.counts() == {"nvlink": (20 * 1024, 40 * 1024), "pcie": (2 * 3e6, 2 * 3.002e6)}
    clock.now = 3.0
    assert cards.counts()["pcie"] == (3 * 3e6, 3 * 3.002e6)
    assert set(NvidiaLinks(nvml(fail=True), [0]).counts()) == {"nvlink"}


def amd(metrics: list[dict[str, Any]]) -> SimpleNamespace:
    """AMD SMI with these metrics of the cards."""
    return SimpleNamespace(
        AmdSmiException=OSError,
        AmdSmiInitFlags=SimpleNamespace(INIT_AMD_GPUS=2),
        amdsmi_init=lambda flags: None,
        amdsmi_get_processor_handles=lambda: list(range(len(metrics))),
        amdsmi_get_gpu_metrics_info=lambda card: metrics[card],
    )


def test_cards_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of all links of both cards; a link that is not there is a text."""
    cards: list[dict[str, Any]] = [
        {"xgmi_write_data_acc": [1, 2, "N/A"], "xgmi_read_data_acc": [10, 0, "N/A"]},
        {"xgmi_write_data_acc": [4], "xgmi_read_data_acc": "N/A"},
    ]
    monkeypatch.setattr(counters, "gpu_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", amd(cards))
    *_, links = counters.all_sources()
    assert isinstance(links, AmdLinks)
    assert links.counts() == {"xgmi": (7e3, 10e3)}


@pytest.mark.parametrize(("ranks", "cards"), [("1", ["GPU-a"]), ("4", [0, 1, 2, 3])])
def test_cards_of_a_machine(ranks: str, cards: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank sees its own card alone, the first one counts those of all."""
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
    )
    monkeypatch.setattr(counters, "gpu_count", lambda: 1)
    monkeypatch.setattr(counters, "gpus", lambda: [SimpleNamespace(uuid="a")])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    links = NvidiaLinks.open()
    assert links is not None
    assert links._handles == cards


def test_without_their_libraries_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "gpu_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert NvidiaLinks.open() is None
    assert AmdLinks.open() is None
    assert [type(source) for source in counters.all_sources()] == [HostLinks, RdmaPorts]


def test_rdma_ports_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """InfiniBand counts units of 4 bytes, EFA bytes; a card without counters is left out."""
    for name, text in {
        "mlx5_0/ports/1/counters/port_xmit_data": "1000\n",
        "mlx5_0/ports/1/counters/port_rcv_data": "50\n",
        "mlx5_0/ports/2/counters/port_xmit_data": "7\n",
        "mlx5_0/ports/2/counters/port_rcv_data": "0\n",
        "rdmap0s6/ports/1/hw_counters/tx_bytes": "300\n",
        "rdmap0s6/ports/1/hw_counters/rx_bytes": "20\n",
        "siw0/ports/1/state": "4: ACTIVE\n",
    }.items():
        path = tmp_path / "class/infiniband" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert RdmaPorts(tmp_path).counts() == {
        "rdma mlx5_0:1": (4000, 200), "rdma mlx5_0:2": (28, 0), "rdma rdmap0s6:1": (300, 20),
    }  # fmt: skip
    assert RdmaPorts(tmp_path / "none").counts() == {}


def test_volumes_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """A stat file has reads, merged reads, sectors read, milliseconds, and the same of writes."""
    number = os.stat(tmp_path).st_dev
    stat = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}/stat"
    volumes = VolumeCounters([str(tmp_path), "/proc", "/not/there"], tmp_path)
    assert volumes.counts() == {}
    stat.parent.mkdir(parents=True)
    stat.write_text("  1 0 100 5 2 0 300 7 0 1 1\n")
    assert volumes.counts() == {f"volume {tmp_path}": (300 * 512, 100 * 512)}
    stat.write_text("1 0\n")
    assert volumes.counts() == {}


def test_what_this_machine_s_volume_moves_is_counted(tmp_path: Path) -> None:
    volumes = VolumeCounters([str(tmp_path)])
    before = volumes.counts()
    if not before:
        pytest.skip("the file system is on no block device")
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(2**20))
        os.fsync(file.fileno())
    (name, (written, _)), *_ = volumes.counts().items()
    assert written - before[name][0] >= 2**20


def test_the_host_link_of_a_run_is_sampled_beside_the_machine_s_links() -> None:
    moved = [0]

    def usage() -> TierUsage:
        moved[0] += 10**6
        return TierUsage(to_host=moved[0], to_device=3 * moved[0])

    with LinkSampler(ranks(0, 0, None), [Growing()], [HostLink(usage)]) as sampler:
        deadline = time.monotonic() + 30
        while "host link" not in sampler.busiest() and time.monotonic() < deadline:
            time.sleep(0.05)
    (rates,) = (links["host link"] for links in sampler.nodes().values())
    assert rates["sent"]["average"] == pytest.approx(3 * rates["received"]["average"], rel=1e-3)
