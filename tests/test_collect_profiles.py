"""What a collection writes is found, read and simulated; the measurements are made up."""

from pathlib import Path

import numpy as np
import pytest

from calibration.collect.collect import group_sizes
from calibration.collect.host import CPU_KIND, Host, count_cores, find_host, free_memory
from calibration.collect.ledger import BESIDE, COPIES, MESSAGES, PROBES, Ledger
from calibration.collect.matching import OpTime, OpTimes
from calibration.collect.probes import Launch
from calibration.collect.profiles import topology_of, write_profiles
from calibration.collect.rows import COMPUTING, Rows
from calibration.collect.stations import Beside, Timing
from simcore.cluster import resolve
from simcore.collectives import make_collective, topology
from simcore.cost import cost_table
from simcore.errors import UsageError
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.job import Job
from simcore.op_curves import CostSource
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.signature import OpClass, Phase, Signature
from simcore.simulation import simulate

GPU = Host("cuda", "local-Test-GPU", 1, "a GPU", 0)
SIZES = [4**power for power in range(5, 13)]


def cpu(count: int) -> Host:
    return Host("cpu", CPU_KIND, count, "one core", 2**30)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACEWRIGHT_HOME", str(tmp_path))
    return tmp_path


def op_times() -> OpTimes:
    dims = (("m", 64), ("n", 32), ("k", 16))
    product = OpTime("aten.mm", "matmul", "fp32", dims, 1.0, 14336, "F", 1, 2.004e-3, 1e-4)
    add = OpTime(
        "aten.add", "pointwise", "fp32", (("elements", 99),), 1.0, 1188, "B", 1, 1.004e-3, 0.0
    )
    return OpTimes([product, add], 0.0, 0.0, 0)


def probed(host: Host, folder: Path) -> Ledger:
    """A ledger with what a profile cannot do without."""
    ledger = Ledger(folder, host.kind, host.software)
    rows = Rows(host.kind, host.software, on_gpu=host.device == "cuda")
    records = rows.launch(Launch(per_op=10e-6, in_call=4e-6, num_ops=99))
    records += rows.ops("a model", op_times(), 3)
    findings = {"context": 3e8, "fragmentation": 0.1, "total": 8e9}
    ledger.finish(PROBES, records, findings)
    return ledger


def talked(host: Host, folder: Path) -> Ledger:
    """A ledger with messages of 100 us and 2 GB/s, half of it time of the core, and collectives."""
    ledger = probed(host, folder)
    rows = Rows(host.kind, host.software, on_gpu=False)
    records = []
    for size in SIZES:
        seconds = 100e-6 + size / 2e9
        ends = [Timing(seconds, 0.0, seconds / 2, 9)] * 2
        records += rows.messages(size, "one", ends, "gloo")
        for members in group_sizes(host.num_devices):
            ranks = [Timing(3 * seconds, 0.0, 0.6 * 3 * seconds, 9)] * members
            records += rows.collective("all_reduce", size, ranks, "gloo")
    ledger.finish(MESSAGES, records, {})
    beside = [Beside(1e-3, 2e-3, 40e-6), Beside(1e-3, 2e-3, 60e-6)]
    ledger.finish(BESIDE, [r for c in COMPUTING for r in rows.beside(1, c, beside, "gloo")], {})
    return ledger


def two_ops() -> OpGraph:
    builder = GraphBuilder("two ops", batch=2)
    shapes = {"m": (0, 32), "n": (32, 0), "k": (16, 0)}
    dims = tuple((name, *size) for name, size in shapes.items())
    product = builder.op(
        "product", target="aten.mm", phase=Phase.F, op_class=OpClass.MATMUL,
        signature=Signature("matmul", "fp32", dims, 1.0, (4096, 5120)), outputs=(Out(8),),
    )  # fmt: skip
    builder.op(
        "other", target="aten.div", phase=Phase.F, op_class=OpClass.POINTWISE,
        signature=Signature("pointwise", "fp32", (("elements", 99, 0),), 1.0, (1188, 0)),
        inputs=builder.outputs(product), outputs=(Out(8),),
    )  # fmt: skip
    return builder.build()


def test_one_core_is_a_cluster_whose_ops_cost_what_was_measured(home: Path) -> None:
    write_profiles(cpu(1), probed(cpu(1), home), home)
    cluster, graph, job = resolve("local"), two_ops(), Job(batch=2)
    assert (cluster.device_names, cluster.links) == (("cpu0",), ())
    table = cost_table(graph, job, [CPU_KIND], [2])
    assert table.seconds[0, 0, 0] == pytest.approx(2e-3)
    assert table.source[:, 0].tolist() == [CostSource.MEASURED, CostSource.ROOFLINE]
    assert table.seconds[1, 0, 0] == pytest.approx(1e-3)  # the share of its class; another target
    plan = Plan.from_placement(graph, cluster, job, np.zeros(graph.num_units, np.int64))
    assert simulate(graph, cluster, job, plan).step_time == pytest.approx(3e-3 + 2 * 10e-6)


def test_what_messages_cost_their_ends_is_in_the_profile(home: Path) -> None:
    write_profiles(cpu(2), talked(cpu(2), home), home)
    limits = load_profile(CPU_KIND).limits
    assert limits.compute_beside_copy[0] == pytest.approx(2.0)  # half the core is left
    assert len(set(limits.compute_beside_copy)) == 1
    assert limits.compute_beside_collective[0] == pytest.approx(2.5)
    assert limits.message_overhead == pytest.approx(50e-6)
    assert limits.copy_beside_compute == 1.0
    profile = load_profile(CPU_KIND)
    assert profile.synchronous
    assert profile.memory == 2**30
    assert profile.slow_down is not None
    assert "core" in profile.slow_down.source


def test_two_cores_are_joined_by_a_link_less_what_the_host_does(home: Path) -> None:
    write_profiles(cpu(2), talked(cpu(2), home), home)
    cluster = resolve("local")
    (link,) = cluster.links
    assert link.bandwidth == pytest.approx(2e9, rel=0.01)
    assert link.latency == pytest.approx(50e-6, rel=0.02)


@pytest.mark.parametrize("count", [3, 4])
def test_more_cores_share_their_ports_and_latencies_add_up(home: Path, count: int) -> None:
    write_profiles(cpu(count), talked(cpu(count), home), home)
    cluster = resolve("local")
    assert cluster.switches == ("switch",)
    off = ~np.eye(count, dtype=bool)
    assert cluster.route_latency[off] == pytest.approx(50e-6, rel=0.02)
    assert cluster.route_bandwidth[off] == pytest.approx(2e9, rel=0.01)


def test_collectives_take_what_was_measured(home: Path) -> None:
    write_profiles(cpu(4), talked(cpu(4), home), home)
    cluster = resolve("local")
    for members in ([0, 1], [1, 3], [0, 1, 2, 3]):
        assert topology(cluster, members) == topology_of(CPU_KIND, "local-gloo")
        found = make_collective("all_reduce", SIZES[3], cluster, members)
        assert found.idle_time == pytest.approx(3 * (100e-6 + SIZES[3] / 2e9), rel=1e-3)


def test_a_gpu_is_joined_to_the_cores_that_were_collected_before(home: Path) -> None:
    write_profiles(cpu(1), probed(cpu(1), home), home)
    ledger = probed(GPU, home)
    rows = Rows(GPU.kind, GPU.software, on_gpu=True)
    copies = [rows.copy(n, way, 5e-6 + n / 2e10, 0.0) for n in SIZES for way in ("h2d", "d2h")]
    ledger.finish(COPIES, copies, {"compute": 1.1, "copy": 1.3})
    write_profiles(GPU, ledger, home)
    cluster = resolve("local")
    assert cluster.device_names == ("gpu0", "cpu0")
    assert cluster.links[0].bandwidth == pytest.approx(2e10, rel=0.01)
    profile = load_profile(GPU.kind)
    assert not profile.synchronous
    assert profile.memory == 8_000_000_000
    assert profile.limits.copy_beside_compute == 1.3
    assert set(profile.limits.compute_beside_copy) == {1.1}


def test_the_host_is_found_and_a_gpu_that_is_not_there_is_refused() -> None:
    import torch

    host = find_host("cpu")
    assert (host.device, host.kind) == ("cpu", CPU_KIND)
    assert 1 <= host.num_devices <= count_cores()
    assert 0 < host.memory * host.num_devices <= free_memory() * 1.1
    assert host.software == f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        assert find_host("auto").device == "cpu"
        with pytest.raises(UsageError, match="no CUDA device"):
            find_host("cuda")


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_groups_are_powers_of_two_and_all(count: int, sizes: list[int]) -> None:
    assert group_sizes(count) == sizes


def test_provenance_names_no_machine(home: Path) -> None:
    import platform

    files = write_profiles(cpu(2), talked(cpu(2), home), home)
    text = "".join(path.read_text() for path in files)
    assert platform.node() not in text
    assert str(home) not in text
