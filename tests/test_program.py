"""Copies of a model spelled out: buckets, what overlaps, memory, and what it says in the result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size as torch_buckets

from simcore.bounds import copies_bound
from simcore.buckets import fill_buckets
from simcore.cluster import Cluster
from simcore.cost import CostTable
from simcore.describe import describe
from simcore.errors import PlanError
from simcore.graph import FixedCosts, GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import Buckets, Plan, Settings
from simcore.profile import Limits
from simcore.program import NOWHERE, Program, copy_program
from simcore.result import Result
from simcore.simulation import run_placement, simulate
from simcore.units import GB
from tests.networks import cluster as toy_cluster
from tests.networks import mesh, star
from tests.reference import ReferenceProblem, simulate_reference
from tests.strategies import build_cost

V100, T4 = "V100-SXM2-16GB", "T4-16GB"
MIB = 2**20
RANKS = Settings(host="per_rank")
EACH = Buckets(num_bytes=1)  # a bucket for each gradient
SERIAL = Buckets(num_bytes=0)
DISCIPLINES = ("none", "port", "ordered", "fifo", "fair")
quick = settings(deadline=None, max_examples=40)


def model(gradients: Sequence[Sequence[int]]) -> OpGraph:
    """A training step: per layer a forward, a backward that makes gradients, and their update.

    Args:
        gradients: [layer] bytes of each gradient; the backward of the last layer comes first.
    """
    builder = GraphBuilder("model", batch=1)
    weights = [
        [builder.parameter(f"w{k}.{i}", size) for i, size in enumerate(sizes)]
        for k, sizes in enumerate(gradients)
    ]
    data: tuple[int, ...] = ()
    forward, made = [], {}
    for k, held in enumerate(weights):
        forward.append(builder.op(f"f{k}", inputs=[*data, *held], outputs=[Out(8)]))
        data = builder.outputs(forward[-1])
    for k in reversed(range(len(gradients))):
        outputs = [Out(8), *(Out(size, role=Role.GRADIENT) for size in gradients[k])]
        handle = builder.op(
            f"b{k}", phase=Phase.B, inputs=[*data, *weights[k]], outputs=outputs,
            unit_of=forward[k],
        )  # fmt: skip
        data, made[k] = builder.outputs(handle)[:1], builder.outputs(handle)[1:]
    for k, held in enumerate(weights):
        outputs = [Out(size, storage_of=w) for size, w in zip(gradients[k], held, strict=True)]
        builder.op(
            f"u{k}", phase=Phase.U, op_class=OpClass.UPDATE, inputs=[*held, *made[k]],
            outputs=outputs, unit_of=forward[k],
        )  # fmt: skip
    return builder.build()


def costs(
    graph: OpGraph, forward: float, backward: float, update: float = 0.0, batch: int = 1
) -> CostTable:
    """Every forward, backward and update takes as long, in s."""
    by_phase = {Phase.F: forward, Phase.B: backward, Phase.U: update}
    seconds = [[by_phase[Phase(phase)]] for phase in graph.phase]
    return build_cost(seconds, [[0.0]] * graph.num_ops, (V100,), Job(batch=batch))


def play(
    program: Program, cluster: Cluster, limits: Limits | None = None, **options: Any
) -> Result:
    """Simulates a program whose copies see one sample each."""
    chosen = msgspec.structs.replace(RANKS, **options)
    problem = Problem.build(
        program.graph, cluster, Job(batch=1), chosen, cost=program.cost,
        collectives=program.collectives,
        limits=None if limits is None else [limits] * cluster.num_devices,
    )  # fmt: skip
    return describe(problem, run_placement(problem, program.placement))


def two_copies(
    gradients: Sequence[Sequence[int]],
    buckets: Buckets,
    limits: Limits | None = None,
    latency: float = 0.0,
    **options: Any,
) -> Result:
    """Forward 1 s and backward 2 s a layer, on two GPUs joined by 1 GB/s."""
    graph, cluster = model(gradients), mesh(2, latency=latency)
    program = copy_program(graph, cluster, [0, 1], costs(graph, 1.0, 2.0), buckets)
    return play(program, cluster, limits, **options)


def sums(result: Result) -> list[tuple[float, float, float]]:
    """(request, start, end) of each all-reduce."""
    moves = np.flatnonzero(result.run.placement == NOWHERE)
    run = result.run
    return [(float(run.request[op]), float(run.start[op]), float(run.end[op])) for op in moves]


# buckets


def limits_of_torch(buckets: Buckets) -> list[int]:
    """What DistributedDataParallel hands over for ``bucket_cap_mb=None``, or a size."""
    is_default = buckets.num_bytes == Buckets().num_bytes
    return [MIB, buckets.num_bytes] if is_default else [buckets.num_bytes]


SIZES = st.lists(st.one_of(st.integers(1, 60 * MIB), st.integers(1, MIB)), min_size=1, max_size=40)


@given(sizes=SIZES, capacity=st.sampled_from([25 * MIB, MIB, 10 * MIB, 100 * MIB, 1]))
@settings(deadline=None, max_examples=100)
def test_buckets_are_filled_as_torch_fills_them(sizes: list[int], capacity: int) -> None:
    import torch

    graph, buckets = model([[size] for size in reversed(sizes)]), Buckets(num_bytes=capacity)
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    ids = list(range(len(sizes)))
    expected, _ = torch_buckets(tensors, limits_of_torch(buckets), [False] * len(sizes), ids)
    found = fill_buckets(graph, graph.at_batch(1).tensor_bytes, buckets)
    place = {tensor: number for number, tensor in enumerate(np.concatenate(found).tolist())}
    assert [[place[tensor] for tensor in bucket.tolist()] for bucket in found] == expected
    names = [graph.tensor_names[tensor] for bucket in found for tensor in bucket]
    assert names == [f"b{layer}:1" for layer in reversed(ids)]  # as the backward makes them


def test_the_first_bucket_is_small_unless_a_size_is_given() -> None:
    graph = model([[2 * MIB]] * 8)
    sizes = graph.at_batch(1).tensor_bytes
    assert [len(bucket) for bucket in fill_buckets(graph, sizes, Buckets())] == [1, 7]
    assert [len(b) for b in fill_buckets(graph, sizes, Buckets(num_bytes=10 * MIB))] == [5, 3]
    assert [len(bucket) for bucket in fill_buckets(graph, sizes, SERIAL)] == [8]
    none = OpGraph.from_edges([("a", 1.0)], [])
    assert fill_buckets(none, none.at_batch(1).tensor_bytes, Buckets()) == []


# what is spelled out


def test_every_copy_has_its_ops_and_a_sum_stands_behind_its_last_gradient() -> None:
    graph, cluster = model([[7, 5], [3]]), mesh(3)
    program = copy_program(graph, cluster, [2, 0, 1], costs(graph, 1.0, 2.0), EACH)
    names = program.graph.op_names
    assert names[:3] == ("f0 (copy 0)", "f0 (copy 1)", "f0 (copy 2)")
    assert program.placement[:3].tolist() == [2, 0, 1]
    behind = [names[op - 1] for op in np.flatnonzero(program.placement == NOWHERE)]
    assert behind == ["b1 (copy 2)", "b0 (copy 2)", "all-reduce of bucket 1"]
    made = [program.collectives[op] for op in sorted(program.collectives)]
    assert [one.num_bytes for one in made] == [3, 7, 5]
    assert all(one.members == (2, 0, 1) for one in made)
    assert (program.base >= 0).sum() == 3 * graph.num_ops


def test_an_update_reads_the_sum_of_its_own_copy_and_no_other_op_does() -> None:
    graph, cluster = model([[7], [3]]), mesh(2)
    program = copy_program(graph, cluster, [0, 1], costs(graph, 1.0, 2.0), EACH)
    spelled, read = program.graph, {}
    for op, name in enumerate(spelled.op_names):
        inputs = spelled.inputs[spelled.first_input[op] : spelled.first_input[op + 1]]
        read[name] = [spelled.tensor_names[tensor] for tensor in inputs]
    assert read["u0 (copy 1)"] == ["w0.0", "b0:1 (copy 1, summed)"]
    assert read["b0 (copy 1)"] == ["w0.0", "b1:0 (copy 1)"]
    token, *made = read["all-reduce of bucket 1"]
    assert made == ["b0:1 (copy 0)", "b0:1 (copy 1)"]
    assert token.startswith("token")  # of the one before: they share a communicator


def test_one_copy_is_the_placement_on_its_device() -> None:
    graph, cluster = model([[7], [3]]), mesh(2)
    cost, placed = costs(graph, 1.0, 2.0, 0.5), Settings()
    problem = Problem.build(graph, cluster, Job(batch=1), placed, cost=cost)
    expected = describe(problem, run_placement(problem, np.full(graph.num_ops, 1)))
    found = play(copy_program(graph, cluster, [1], cost), cluster, host="one")
    assert found.step_time == expected.step_time
    assert found.devices == expected.devices
    assert found.collective_time == 0.0


def random_model(rng: np.random.Generator) -> OpGraph:
    layers = int(rng.integers(1, 6))
    return model([rng.integers(1, 3_000_000, rng.integers(1, 4)).tolist() for _ in range(layers)])


@pytest.mark.parametrize("contention", DISCIPLINES)
def test_copies_equal_the_reference(contention: str) -> None:
    for index in range(25):
        rng = np.random.default_rng([17, index])
        graph, size = random_model(rng), int(rng.integers(2, 5))
        cluster = mesh(size) if index % 2 else star(size, latency=1e-4)
        seconds = rng.uniform(0, 1e-2, (graph.num_ops, 1)).tolist()
        launch = rng.uniform(0, 1e-3, (graph.num_ops, 1)).tolist()
        cost = build_cost(seconds, launch, (V100,), Job(batch=1))
        buckets = Buckets(num_bytes=int(rng.integers(1, 4_000_000)), as_views=bool(index % 3))
        devices = rng.permutation(size).tolist()
        program = copy_program(graph, cluster, devices, cost, buckets)
        found = play(program, cluster, contention=contention)
        problem = ReferenceProblem.build(
            program.graph, cluster, Job(batch=1),
            msgspec.structs.replace(RANKS, contention=contention), cost=program.cost,
            collectives=program.collectives,
        )  # fmt: skip
        expected = simulate_reference(problem, program.placement.tolist())
        assert found.run.allocated.tolist() == expected.allocated
        if contention == "fair":
            assert found.run.end.tolist() == pytest.approx(expected.end, rel=1e-9)
        else:
            assert found.run.end.tolist() == expected.end


# what overlaps, worked by hand


def test_sums_hide_behind_the_backward_but_for_the_last_bucket() -> None:
    result = two_copies([[int(GB)]] * 3, Buckets())
    assert sums(result) == [(5.0, 5.0, 6.0), (7.0, 7.0, 8.0), (9.0, 9.0, 10.0)]
    assert result.step_time == 3 * 1.0 + 3 * 2.0 + 1.0
    assert result.collective_time == 3.0
    assert [use.communication for use in result.devices] == [1.0, 1.0]


def test_where_the_network_is_slow_the_step_is_the_first_gradient_and_all_sums() -> None:
    result = two_copies([[3 * int(GB)]] * 3, Buckets())
    assert [end for *_, end in sums(result)] == [8.0, 11.0, 14.0]
    assert result.step_time == 5.0 + 3 * 3.0
    assert [use.communication for use in result.devices] == [5.0, 5.0]


def test_one_bucket_is_summed_after_the_backward() -> None:
    result = two_copies([[int(GB)]] * 3, SERIAL)
    assert sums(result) == [(9.0, 9.0, 12.0)]
    assert result.step_time == 12.0
    assert [use.communication for use in result.devices] == [3.0, 3.0]


def test_each_bucket_waits_its_latency_and_for_the_one_before() -> None:
    result = two_copies([[int(GB)]] * 2, Buckets(), latency=1.0)  # 2 hops
    assert sums(result) == [(4.0, 6.0, 7.0), (7.0, 9.0, 10.0)]
    serial = two_copies([[int(GB)]] * 2, SERIAL, latency=1.0)
    assert serial.step_time == 6.0 + 2.0 + 2.0


def test_an_update_begins_once_its_own_gradient_is_summed() -> None:
    graph, cluster = model([[int(GB)], [int(GB)]]), mesh(2)
    program = copy_program(graph, cluster, [0, 1], costs(graph, 1.0, 2.0, 0.25), EACH)
    result = play(program, cluster, order="ready")  # u1 does not wait behind u0
    starts = dict(zip(program.graph.op_names, result.run.start.tolist(), strict=True))
    assert (starts["u1 (copy 0)"], starts["u0 (copy 0)"]) == (6.0, 7.0)
    assert result.step_time == 7.25


def test_the_slower_gpu_is_waited_for_bucket_by_bucket() -> None:
    graph = model([[int(GB)]] * 2)
    alike = mesh(2)
    devices = [alike.devices[0], replace(alike.devices[1], kind=T4)]
    cluster = Cluster(name="mixed", devices=devices, links=alike.links)
    by_phase = {Phase.F: (1.0, 2.0), Phase.B: (2.0, 4.0), Phase.U: (0.0, 0.0)}
    seconds = [by_phase[Phase(phase)] for phase in graph.phase]
    cost = build_cost(seconds, np.zeros((6, 2)).tolist(), (V100, T4), Job(batch=1))
    result = play(copy_program(graph, cluster, [0, 1], cost, Buckets()), cluster)
    assert sums(result) == [(8.0, 8.0, 9.0), (12.0, 12.0, 13.0)]
    fast, slow = result.devices
    assert (fast.busy, slow.busy) == (6.0, 12.0)
    assert (fast.communication, slow.communication) == (1.0, 1.0)
    assert (fast.bubble, slow.bubble) == (6.0, 0.0)  # the fast one waits for the slow one


@pytest.mark.parametrize("buckets", [Buckets(), EACH, SERIAL])
def test_sums_alone_on_the_network_take_as_long_in_every_discipline(buckets: Buckets) -> None:
    times = {
        two_copies([[2 * 10**8, 10**8], [10**9]], buckets, latency=0.25, contention=c).step_time
        for c in DISCIPLINES
    }
    assert max(times) - min(times) <= 1e-12


def test_priorities_are_those_of_the_plan() -> None:
    builder = GraphBuilder("two", batch=2)
    weight = builder.parameter("w", 4)
    for name in ("first", "second"):
        builder.op(name, seconds=1.0, kernels=0)
    made = builder.op(
        "b", seconds=0.0, kernels=0, outputs=[Out(4, role=Role.GRADIENT)], phase=Phase.B
    )
    builder.op(
        "u", seconds=0.0, kernels=0, op_class=OpClass.UPDATE, phase=Phase.U,
        inputs=[weight, *builder.outputs(made)], outputs=[Out(4, storage_of=weight)],
    )  # fmt: skip
    graph, cluster = builder.build(measured_on=V100), mesh(2)
    job = Job(batch=2, assume_linear=True)
    ready = Settings(order="ready", host="per_rank")
    plan = Plan.data_parallel(graph, cluster, job, ["d0", "d1"], settings=ready)
    late = msgspec.structs.replace(plan, priorities=(1, 0, 0, 0))
    first = [simulate(graph, cluster, job, p).run.start[0] for p in (plan, late)]
    assert first == [0.0, 0.5]


# memory


@pytest.mark.parametrize("gradients", [[[10**9]], [[97 * 10**6] * 3, [10**6]], [[5, 7], [3]]])
def test_views_of_buckets_save_as_many_bytes_as_there_are_gradients(
    gradients: list[list[int]],
) -> None:
    total = sum(map(sum, gradients))
    for size in (Buckets().num_bytes, 0, 1):
        apart, views = (
            two_copies(gradients, Buckets(num_bytes=size, as_views=as_views))
            for as_views in (False, True)
        )
        assert apart.step_time == views.step_time
        for one, other in zip(apart.devices, views.devices, strict=True):
            assert one.allocated - other.allocated == total
            assert one.reserved - other.reserved == pytest.approx(total, rel=0.1, abs=2)


# overlap is not free


def beside(factor: float) -> Limits:
    """Compute and collectives slow each other by as much."""
    return Limits(
        collective_beside_compute=factor, compute_beside_collective=(factor,) * len(OpClass)
    )


# layer 1 makes 2 GB, layer 0 four gradients of hardly any bytes; a sum waits 2 * 0.1 s
UNEVEN = [[1] * 4, [2 * int(GB)]]


@pytest.mark.parametrize(
    ("factor", "overlapped"),
    [
        (1.0, 4.0 + 2.2 + 4 * 0.2),
        # b0 runs 0.2 s alone and 1.8 s slowed; 0.2 s of the sum are left, at full speed
        (1.8, 4.0 + 0.2 + 1.8 * 1.8 + 0.2 + 4 * 0.2),
    ],
)
def test_overlap_can_be_slower_than_one_after_the_other(factor: float, overlapped: float) -> None:
    limits = beside(factor)
    together = two_copies(UNEVEN, EACH, limits, latency=0.1).step_time
    serial = two_copies(UNEVEN, SERIAL, limits, latency=0.1).step_time
    assert together == pytest.approx(overlapped)
    assert serial == pytest.approx(6.0 + 0.2 + 2.0)
    assert (together > serial) == (factor > 1.0)


@pytest.mark.parametrize(
    ("serial", "overlapped"), [(157.3e-3, 207.1e-3), (262.9e-3, 382.2e-3), (469.7e-3, 682.0e-3)]
)
def test_factors_say_what_an_all_reduce_beside_a_matrix_product_was_measured_to_take(
    serial: float, overlapped: float
) -> None:
    """Eight V100, https://github.com/parasailteam/coconet/issues/6: both take half of `serial`."""
    half = serial / 2
    graph, cluster = model([[1], [int(half * GB)]]), mesh(2)
    program = copy_program(graph, cluster, [0, 1], costs(graph, 0.0, half), EACH)
    slowed = play(program, cluster, beside(overlapped / half)).step_time - half
    assert slowed == pytest.approx(overlapped, rel=1e-6)
    assert play(program, cluster).step_time - half == pytest.approx(half, rel=1e-6)


@given(
    gradients=st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=3), min_size=1,
                       max_size=5),
    factors=st.tuples(st.floats(1, 3), st.floats(1, 3)),
    latency=st.sampled_from([0.0, 0.1]),
    buckets=st.sampled_from([Buckets(), EACH, SERIAL]),
)  # fmt: skip
@quick
def test_a_factor_of_one_never_lengthens_a_step(
    gradients: list[list[int]], factors: tuple[float, float], latency: float, buckets: Buckets
) -> None:
    limits = Limits(
        collective_beside_compute=factors[0],
        compute_beside_collective=(factors[1],) * len(OpClass),
    )
    alone = two_copies(gradients, buckets, latency=latency).step_time
    for changed in (
        limits._replace(collective_beside_compute=1.0),
        limits._replace(compute_beside_collective=(1.0,) * len(OpClass)),
        limits,
    ):
        assert two_copies(gradients, buckets, changed, latency=latency).step_time >= alone


@given(
    gradients=st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=3), min_size=1,
                       max_size=5),
    size=st.sampled_from([0, 1, 10**8, 25 * MIB]),
)  # fmt: skip
@quick
def test_overlap_never_lengthens_a_step_where_messages_wait_for_no_latency(
    gradients: list[list[int]], size: int
) -> None:
    serial = two_copies(gradients, SERIAL).step_time
    overlapped = two_copies(gradients, Buckets(num_bytes=size)).step_time
    assert overlapped <= serial * (1 + 1e-12)


# bounds and words


def test_no_buckets_beat_the_bound_of_copies() -> None:
    for index in range(60):
        rng = np.random.default_rng([23, index])
        builder_graph = random_model(rng)
        size = int(rng.integers(2, 5))
        cluster = mesh(size) if index % 2 else star(size, latency=1e-4)
        graph = with_seconds(builder_graph, rng)
        job = Job(batch=size, assume_linear=True)
        names = [f"d{device}" for device in range(size)]
        options = Settings(host="per_rank", order=("program", "ready")[index % 2])
        plan = Plan.data_parallel(graph, cluster, job, names, settings=options)
        bound = copies_bound(graph, cluster, job, range(size), options)
        for num_bytes in (0, 1, 10**6, Buckets().num_bytes):
            buckets = Buckets(num_bytes=num_bytes)
            result = simulate(graph, cluster, job, msgspec.structs.replace(plan, buckets=buckets))
            assert result.step_time >= bound > 0


def with_seconds(graph: OpGraph, rng: np.random.Generator) -> OpGraph:
    """The same model, measured at one sample."""
    fixed = FixedCosts(
        seconds=rng.uniform(0, 1e-2, graph.num_ops), cpu_seconds=None, measured_on=V100, batch=1
    )
    return replace(graph, fixed=fixed)


def test_the_path_leads_through_the_sums_that_were_waited_for() -> None:
    graph, cluster = model([[int(GB)], [3 * int(GB)]]), mesh(2)
    program = copy_program(graph, cluster, [0, 1], costs(graph, 1.0, 2.0, 0.5), EACH)
    assert [tuple(step) for step in play(program, cluster).critical_path] == [
        ("compute", "f0 (copy 0)", "d0", 0.0, 1.0),
        ("compute", "f1 (copy 0)", "d0", 1.0, 2.0),
        ("compute", "b1 (copy 0)", "d0", 2.0, 4.0),
        ("collective", "all-reduce of bucket 0", "all_reduce", 4.0, 7.0),
        ("collective", "all-reduce of bucket 1", "all_reduce", 7.0, 8.0),
        ("compute", "u0 (copy 0)", "d0", 8.0, 8.5),
        ("compute", "u1 (copy 0)", "d0", 8.5, 9.0),
    ]


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    graph, cluster = model([[4]]), mesh(3)
    cost = costs(graph, 1.0, 1.0)
    with pytest.raises(PlanError, match=r"d1.*twice|twice.*d1"):
        copy_program(graph, cluster, [0, 1, 1], cost)
    inference = OpGraph.from_edges([("a", 1.0)], [], name="inference", measured_on=V100)
    with pytest.raises(PlanError, match="inference: data parallel needs parameters"):
        copy_program(inference, cluster, [0, 1], build_cost([[1]], [[0]], (V100,), Job(batch=1)))
    apart = toy_cluster(["n0"] * 2, [])
    with pytest.raises(PlanError, match="no route from 'd0' to 'd1'"):
        copy_program(graph, apart, [0, 1], cost)
    with pytest.raises(PlanError, match="hierarchical"):
        copy_program(graph, cluster, [0, 1], cost, Buckets(algorithm="hierarchical"))
