"""Names become arrays: what a problem knows before any placement."""

import numpy as np
import pytest

from simcore import lower
from simcore.cluster import Cluster
from simcore.errors import GraphError, PlanError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.kernel import Contention, Host, Order
from simcore.lower import Problem
from simcore.plan import Settings
from simcore.profile_store import load_profile
from simcore.signature import Signature
from simcore.simulation import simulate_batch
from simcore.units import GiB
from tests.strategies import Network, build_cluster, build_cost

V100, T4, CPU = "V100-SXM2-16GB", "T4-16GB", "CPU-2x-Xeon-E5-2698v4"
CLUSTER = Cluster.preset("4xV100-NVLink")  # four V100 and the CPU


def measured(batch: int | None = 8) -> OpGraph:
    """Two ops that were measured, and a third in the unit of the first."""
    return OpGraph.from_edges(
        [("a", 1.0), ("b", 2.0), ("c", 4.0)],
        [("a", "b", 10), ("b", "c", 3)],
        colocate={"a": "one", "c": "one"},
        measured_on=V100,
        batch=batch,
    )


def growing() -> OpGraph:
    """One op that moves 900 bytes a sample."""
    builder = GraphBuilder("growing", batch=1)
    signature = Signature("pointwise", "fp32", (("elements", 0, 1),), 1.0, (0, 900))
    builder.op("a", op_class=OpClass.POINTWISE, signature=signature, outputs=[Out((7, 3))])
    return builder.build()


# devices


def test_capacity_is_the_memory_of_the_device_less_what_is_reserved_on_gpus():
    memory = [device.memory for device in CLUSTER.devices]
    build = Problem.build
    assert build(measured(), CLUSTER, Job(batch=8)).capacity.tolist() == memory
    reserved = build(measured(), CLUSTER, Job(batch=8), reserve_memory=2 * GiB).capacity
    assert reserved.tolist() == [*(bytes_ - 2 * GiB for bytes_ in memory[:4]), memory[4]]


def test_no_gpu_has_a_negative_capacity():
    problem = Problem.build(measured(), CLUSTER, Job(batch=8), reserve_memory=2**50)
    assert problem.capacity.tolist() == [0, 0, 0, 0, CLUSTER.devices[4].memory]


def test_fragmentation_and_context_come_from_the_profile_of_each_device():
    problem = Problem.build(measured(), CLUSTER, Job(batch=8))
    profiles = [load_profile(device.kind) for device in CLUSTER.devices]
    assert problem.fragmentation.tolist() == [profile.fragmentation for profile in profiles]
    assert problem.context.tolist() == [profile.context for profile in profiles]


def test_a_unit_is_supported_where_all_its_ops_have_a_time():
    builder = GraphBuilder("g")
    builder.op("gpu only", seconds=1.0)
    builder.op("both", seconds=1.0, cpu_seconds=2.0)
    builder.op("cpu only", seconds=np.inf, cpu_seconds=2.0)
    builder.op("with the first", seconds=1.0, cpu_seconds=2.0, unit_of=0)
    problem = Problem.build(builder.build(measured_on=V100), CLUSTER, Job())
    assert problem.supported.tolist() == [
        [True, True, True, True, False],
        [True, True, True, True, True],
        [False, False, False, False, True],
    ]


def test_more_devices_than_the_kernel_takes_are_refused(monkeypatch):
    monkeypatch.setattr(lower, "MAX_DEVICES", 4)
    with pytest.raises(PlanError, match="4xV100-NVLink: 5 devices, at most 4"):
        Problem.build(measured(), CLUSTER, Job(batch=8))


# settings


@pytest.mark.parametrize("order", ["program", "ready"])
@pytest.mark.parametrize("host", ["one", "per_rank"])
@pytest.mark.parametrize("contention", ["none", "port", "fifo"])
def test_settings_become_the_numbers_of_the_kernel(order, host, contention):
    settings = Settings(order=order, host=host, contention=contention)
    mode = Problem.build(measured(), CLUSTER, Job(batch=8), settings).mode
    assert mode.order == Order[order.upper()]
    assert mode.host == Host[host.upper()]
    assert mode.contention == Contention[contention.upper()]


def test_launch_costs_are_of_the_device_and_vanish_with_a_captured_graph():
    builder = GraphBuilder("g")
    builder.op("a", kernels=3)
    problem = Problem.build(builder.build(), CLUSTER, Job(batch=1))
    eager = problem.tables.cost["launch"][:, problem.tables.columns]
    assert eager[0, 0] == 3 * load_profile(V100).launch_overhead
    assert eager[0, 4] == 3 * load_profile(CPU).launch_overhead
    settings = Settings(launch="graph")
    graph = Problem.build(builder.build(), CLUSTER, Job(batch=1), settings).tables.cost["launch"]
    assert not graph.any()


def test_a_cpu_makes_its_host_wait_for_every_op():
    problem = Problem.build(measured(), CLUSTER, Job(batch=8))
    sync = problem.tables.cost["sync"][:, problem.tables.columns]
    assert sync[:, 4].all()
    assert not sync[:, :4].any()


def test_priorities_are_kept_and_equal_where_none_are_given():
    build = Problem.build
    assert not build(measured(), CLUSTER, Job(batch=8)).tables.ops["priority"].any()
    given = build(measured(), CLUSTER, Job(batch=8), priorities=(3, -1, 2)).tables
    assert given.ops["priority"][:-1].tolist() == [3, -1, 2]


# batches


def test_each_copy_sees_its_share_of_the_batch():
    one, four = (Problem.build(growing(), CLUSTER, Job(batch=8), copies=n) for n in (1, 4))
    assert (one.batch, four.batch) == (8, 2)
    assert four.tables.tensors["num_bytes"][0] == 7 + 3 * 2
    share, whole = (problem.tables.cost["duration"][0, 0] for problem in (four, one))
    assert whole / 4 <= share < whole  # a kernel of a quarter takes a quarter at best


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(PlanError, match="a batch of 8 does not divide by 3 copies"):
        Problem.build(growing(), CLUSTER, Job(batch=8), copies=3)


def test_an_unknown_batch_cannot_be_divided():
    with pytest.raises(PlanError, match=r"growing: the batch is unknown.*--batch"):
        Problem.build(growing(), CLUSTER, Job(), copies=2)


def test_a_measured_graph_has_one_batch_unless_its_times_may_be_scaled():
    with pytest.raises(PlanError, match=r"graph: measured at one batch.*--assume-linear"):
        Problem.build(measured(), CLUSTER, Job(batch=8), copies=2)
    problem = Problem.build(measured(), CLUSTER, Job(batch=8, assume_linear=True), copies=2)
    assert problem.tables.cost["duration"][:, 0].tolist() == [0.5, 1.0, 2.0]
    assert problem.tables.tensors["num_bytes"].tolist() == [5, 2, 0]  # rounded up; an end mark


def test_only_what_grows_with_the_batch_is_scaled():
    builder = GraphBuilder("g", batch=8)
    weight = builder.parameter("w", 100)
    outputs = [Out(80, role=role) for role in (Role.ACTIVATION, Role.INPUT, Role.GRADIENT)]
    builder.op("a", seconds=1.0, inputs=[weight], outputs=outputs)
    graph = builder.build(measured_on=V100)
    problem = Problem.build(graph, CLUSTER, Job(batch=16, assume_linear=True))
    assert problem.tables.tensors["num_bytes"][:-1].tolist() == [100, 160, 160, 80]


def test_sizes_that_leave_int64_are_refused_and_not_wrapped():
    wide = OpGraph.from_edges(
        [("a", 1.0), ("b", 1.0)], [("a", "b", 2**59)], measured_on=V100, batch=1
    )
    with pytest.raises((GraphError, PlanError), match=r"2\*\*62"):
        Problem.build(wide, CLUSTER, Job(batch=2**20, assume_linear=True))
    builder = GraphBuilder("g")
    builder.op("a", op_class=OpClass.UPDATE, phase=Phase.U, elements=2**60)
    with pytest.raises((GraphError, PlanError), match=r"2\*\*62"):
        Problem.build(builder.build(), CLUSTER, Job(batch=1))


# placements


def test_units_expand_to_ops_whatever_the_shape_and_type():
    problem = Problem.build(measured(), CLUSTER, Job(batch=8))
    assert problem.expand(np.array([2, 3])).tolist() == [2, 3, 2]
    many = problem.expand(np.array([[2, 3], [0, 1]], np.int64)[:, ::-1])
    assert many.tolist() == [[3, 2, 3], [1, 0, 1]]
    assert many.dtype == np.int32
    assert many.flags.c_contiguous
    assert problem.expand(np.zeros((0, 2), np.int8)).shape == (0, 3)


def test_sixty_four_devices_and_one_op_of_no_bytes_are_a_problem():
    links = tuple((f"d{device}", "s0", 1.0, 1.0) for device in range(64))
    cluster = build_cluster(Network((V100, T4) * 32, forwards=False, switches=1, links=links))
    builder = GraphBuilder("one")
    builder.op("only", outputs=[Out(0)])
    job = Job(batch=1)
    cost = build_cost([[1.0, 2.0]], [[0.0, 0.0]], (V100, T4), job)
    problem = Problem.build(builder.build(), cluster, job, cost=cost)
    result = simulate_batch(problem, np.arange(64)[:, None])
    assert result.step_time.tolist() == [1.0, 2.0] * 32
    assert not result.allocated.any()
    assert (np.diag(result.reserved) == problem.context).all()
