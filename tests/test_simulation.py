"""The ways into the simulator: statuses, messages, memory by hand, copies of the model by hand."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.kernel import Status
from simcore.lower import Problem
from simcore.plan import Constraints, Plan, Settings
from simcore.profile_store import load_profile
from simcore.simulation import (
    run_placement,
    simulate,
    simulate_batch,
)
from simcore.units import GB, GiB
from tests.networks import cluster as toy_cluster
from tests.strategies import (
    ALL_SETTINGS,
    Network,
    build_cluster,
    compiled_problem,
    draw_placement,
    random_case,
    seeded,
    toy,
)

V100, T4, CPU = "V100-SXM2-16GB", "T4-16GB", "CPU-2x-Xeon-E5-2698v4"
CLUSTER = Cluster.preset("4xV100-NVLink")  # gpu0 to gpu3, and cpu0
CPU0 = 4
JOB = Job(batch=8)
every_setting = pytest.mark.parametrize(
    "settings", ALL_SETTINGS, ids=lambda s: f"{s.order}-{s.host}-{s.launch}-{s.contention}"
)


def chain(*, num_bytes: int = 10, colocate: dict[str, str] | None = None) -> OpGraph:
    return OpGraph.from_edges(
        [("a", 1.0), ("b", 2.0), ("c", 4.0)],
        [("a", "b", num_bytes), ("b", "c", num_bytes)],
        colocate=colocate,
        measured_on=V100,
        batch=8,
    )


def apart() -> Cluster:
    """Two pairs of V100 without a wire between the pairs."""
    wires = (("d0", "d1", 1.0, 0.0), ("d2", "d3", 1.0, 0.0))
    return build_cluster(Network((V100,) * 4, forwards=True, switches=0, links=wires))


# statuses


@every_setting
def test_every_illegal_placement_has_its_status_and_its_culprit(settings):
    graph = chain(colocate={"a": "one", "c": "one"})
    problem = Problem.build(graph, CLUSTER, JOB, settings)
    placements = {
        (0, 1, 0): (Status.OK, -1),
        (0, 5, 0): (Status.ILLEGAL_DEVICE, 1),
        (0, -1, 0): (Status.ILLEGAL_DEVICE, 1),
        (-(2**31), 0, 0): (Status.ILLEGAL_DEVICE, 0),
        (0, 0, 2**31 - 1): (Status.ILLEGAL_DEVICE, 2),
        (0, CPU0, 0): (Status.ILLEGAL_DEVICE, 1),  # no time was measured there
        (CPU0, 7, CPU0): (Status.ILLEGAL_DEVICE, 0),  # the first of two
        (0, 1, 1): (Status.SPLIT_UNIT, 2),
        (1, 1, 1): (Status.OK, -1),
    }
    batch = simulate_batch(problem, np.array(list(placements)))
    found = list(zip(batch.status.tolist(), batch.culprit.tolist(), strict=True))
    assert found == list(placements.values())
    illegal = batch.status != Status.OK
    assert np.isinf(batch.step_time).tolist() == illegal.tolist()
    assert not batch.allocated[illegal].any()
    assert not batch.reserved[illegal].any()
    assert not batch.overflow.any()


@every_setting
def test_a_reader_that_no_route_leads_to_has_the_producer_as_culprit(settings):
    problem = Problem.build(chain(), apart(), JOB, settings)
    batch = simulate_batch(problem, np.array([[0, 1, 1], [0, 1, 2], [3, 0, 0], [2, 2, 3]]))
    assert batch.status.tolist() == [
        Status.OK,
        Status.UNREACHABLE,
        Status.UNREACHABLE,
        Status.OK,
    ]
    assert batch.culprit.tolist() == [-1, 1, 0, -1]
    assert np.isinf(batch.step_time).tolist() == [False, True, True, False]


@every_setting
def test_what_does_not_fit_is_told_with_its_bytes_and_still_has_a_step_time(settings):
    problem = Problem.build(chain(num_bytes=12 * GiB), CLUSTER, JOB, settings)
    batch = simulate_batch(problem, np.array([[0, 0, 0], [0, 1, 2]]))
    assert batch.status.tolist() == [Status.OUT_OF_MEMORY] * 2
    assert batch.culprit.tolist() == [-1, -1]
    assert np.isfinite(batch.step_time).all()
    profile = load_profile(V100)

    def over(allocated: int) -> int:
        grown = math.ceil(allocated * (1 + profile.fragmentation))
        return max(0, grown + profile.context - CLUSTER.devices[0].memory)

    assert batch.allocated.tolist() == [
        [24 * GiB, 0, 0, 0, 0],  # b reads one tensor and writes the other
        [12 * GiB, 24 * GiB, 12 * GiB, 0, 0],
    ]
    assert batch.overflow.tolist() == [
        over(24 * GiB),
        2 * over(12 * GiB) + over(24 * GiB),
    ]


@every_setting
def test_a_legal_plan_after_an_illegal_one_is_not_disturbed(settings):
    rng = np.random.default_rng(3)
    for _ in range(5):
        case = random_case(rng)._replace(settings=settings)
        problem, num_devices = compiled_problem(case), len(case.network.kinds)
        draws = seeded(rng)
        plans = np.stack([draw_placement(draws, case.graph, num_devices) for _ in range(6)])
        plans[::2, -1] = num_devices
        mixed, alone = simulate_batch(problem, plans), simulate_batch(problem, plans[1::2])
        assert (mixed.status[::2] == Status.ILLEGAL_DEVICE).all()
        assert mixed.step_time[1::2].tolist() == alone.step_time.tolist()
        assert mixed.allocated[1::2].tolist() == alone.allocated.tolist()


@pytest.mark.parametrize(
    ("graph", "cluster", "placement", "message"),
    [
        (chain(), CLUSTER, [0, 9, 0], "op 'b' cannot run on device 'number 9': no such device"),
        (chain(), CLUSTER, [0, 0, 4], "op 'c' cannot run on device 'cpu0': it has no time there"),
        (
            chain(colocate={"a": "one", "c": "one"}),
            CLUSTER,
            [0, 1, 2],
            "op 'c' is on 'gpu2', apart from its placement unit 'a'",
        ),
        (
            chain(),
            apart(),
            [0, 1, 2],
            "op 'b' on 'd1': a reader is on a device that no route leads to",
        ),
    ],
)
def test_an_illegal_placement_names_op_and_device(graph, cluster, placement, message):
    with pytest.raises(PlanError) as error:
        run_placement(Problem.build(graph, cluster, JOB), np.array(placement))
    assert str(error.value) == message


def test_simulate_of_an_illegal_plan_names_op_and_device():
    graph = chain()
    on_cpu = Plan.from_placement(graph, CLUSTER, JOB, [0, 0, CPU0])
    with pytest.raises(PlanError, match="op 'c' cannot run on device 'cpu0'"):
        simulate(graph, CLUSTER, JOB, on_cpu)
    parted = Plan.from_placement(graph, apart(), JOB, [0, 2, 2])
    with pytest.raises(PlanError, match="op 'a' on 'd0': a reader is on a device that no route"):
        simulate(graph, apart(), JOB, parted)


# arrays of placements


def test_any_integer_array_of_placements_gives_the_same():
    problem = Problem.build(chain(), CLUSTER, JOB)
    plans = np.array(list(itertools.product(range(4), repeat=3)), np.int32)
    expected = simulate_batch(problem, plans).step_time.tolist()
    read_only = plans.copy()
    read_only.setflags(write=False)
    wide = np.zeros((len(plans), 6), np.int32)
    wide[:, ::2] = plans
    for other in (
        plans.astype(np.int64),
        plans.astype(np.uint8),
        plans.astype(np.uint64),
        read_only,
        np.asfortranarray(plans),
        wide[:, ::2],
        plans.tolist(),
    ):
        assert simulate_batch(problem, other).step_time.tolist() == expected
    assert read_only.tolist() == plans.tolist()


def test_an_index_beyond_int32_does_not_wrap_round_to_a_legal_one():
    problem = Problem.build(chain(), CLUSTER, JOB)
    for far in (2**32, -(2**32), 2**62 + 1):
        batch = simulate_batch(problem, np.array([[0, far, 0]]))
        assert (batch.status[0], batch.culprit[0]) == (Status.ILLEGAL_DEVICE, 1)
    batch = simulate_batch(problem, np.array([[2**64 - 1, 0, 0]], np.uint64))
    assert (batch.status[0], batch.culprit[0]) == (Status.ILLEGAL_DEVICE, 0)
    with pytest.raises(PlanError, match="op 'b' cannot run"):
        run_placement(problem, np.array([0, 2**32, 0]))


def test_an_empty_batch_has_an_empty_result():
    problem = Problem.build(chain(), CLUSTER, JOB)
    for empty in (np.zeros((0, 3), np.int32), np.zeros((0, 3))):
        batch = simulate_batch(problem, empty)
        assert batch.step_time.shape == batch.status.shape == batch.overflow.shape == (0,)
        assert batch.allocated.shape == batch.reserved.shape == (0, 5)


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        (np.zeros((4, 2), int), r"must be \[plan, 3 ops\], not \(4, 2\)"),
        (np.zeros(3, int), r"not \(3,\)"),
        (np.zeros((1, 3, 1), int), r"not \(1, 3, 1\)"),
        (np.zeros((2, 3)), "must be integers, not float64"),
        (np.zeros((2, 3), bool), "must be integers, not bool"),
    ],
)
def test_placements_of_another_shape_or_type_are_refused(placements, reason):
    with pytest.raises(PlanError, match=reason):
        simulate_batch(Problem.build(chain(), CLUSTER, JOB), placements)


def test_a_placement_of_another_length_is_refused():
    with pytest.raises(PlanError, match="placement of 2 ops, expected 3"):
        run_placement(Problem.build(chain(), CLUSTER, JOB), np.array([0, 1]))


@every_setting
def test_the_number_of_threads_changes_nothing(settings):
    rng = np.random.default_rng(11)
    case = random_case(rng)._replace(settings=settings)
    problem, draws = compiled_problem(case), seeded(rng)
    plans = np.stack(
        [draw_placement(draws, case.graph, len(case.network.kinds)) for _ in range(41)]
    )
    results = [simulate_batch(problem, plans, threads=n) for n in (1, 2, 3, 5, 41, 0, None)]
    for result in results[1:]:
        for field in ("step_time", "allocated", "reserved", "status", "culprit", "overflow"):
            assert getattr(result, field).tobytes() == getattr(results[0], field).tobytes()


@every_setting
def test_a_batch_says_of_each_placement_what_a_single_run_says(settings):
    rng = np.random.default_rng(5)
    for _ in range(8):
        case = random_case(rng)._replace(settings=settings, priorities=None)
        problem = compiled_problem(case)
        batch = simulate_batch(problem, case.placement[None])
        run = run_placement(problem, case.placement)
        assert batch.step_time[0] == run.step_time
        assert batch.allocated[0].tolist() == run.allocated.tolist()


# memory


def training_step() -> OpGraph:
    """One layer of 100 fp32 parameters: forward, backward, update."""
    builder = GraphBuilder("layer")
    weight = builder.parameter("w", 400)
    forward = builder.op("forward", inputs=[weight], outputs=[Out(1000)])
    backward = builder.op(
        "backward",
        phase=Phase.B,
        inputs=[weight, *builder.outputs(forward)],
        outputs=[Out(400, role=Role.GRADIENT)],
        unit_of=forward,
    )
    builder.op(
        "update",
        phase=Phase.U,
        op_class=OpClass.UPDATE,
        inputs=[weight, *builder.outputs(backward)],
        outputs=[Out(400, storage_of=weight)],
        unit_of=forward,
        elements=100,
    )
    return builder.build()


@every_setting
@pytest.mark.parametrize(
    ("optimizer", "state"), [("adam", 800), ("adamw", 800), ("momentum", 400), ("sgd", 0)]
)
def test_memory_is_parameters_gradients_state_and_activations(settings, optimizer, state):
    problem = Problem.build(
        training_step(), CLUSTER, Job(batch=1, optimizer=optimizer, precision="fp32"), settings
    )
    batch = simulate_batch(problem, np.full((1, 3), 2))
    assert batch.allocated.tolist() == [[0, 0, 400 + 400 + state + 1000, 0, 0]]


@every_setting
def test_reserved_memory_is_allocated_with_fragmentation_and_context(settings):
    graph = chain(num_bytes=999_999_937)
    problem = Problem.build(graph, CLUSTER, JOB, settings)
    batch = simulate_batch(problem, np.array([[0, 0, 1]]))
    profile = load_profile(V100)
    expected = [
        math.ceil(allocated * (1 + profile.fragmentation)) + profile.context
        for allocated in (2 * 999_999_937, 999_999_937)
    ]
    assert batch.reserved.tolist() == [[*expected, 0, 0, 0]]  # an idle device has no context


def test_a_plan_fits_to_the_last_byte():
    graph = chain(num_bytes=10**9)
    free = Problem.build(graph, CLUSTER, JOB)
    placement = np.array([[0, 0, 0]])
    slack = int(free.capacity[0] - simulate_batch(free, placement).reserved[0, 0])
    for reserve, status in ((slack, Status.OK), (slack + 1, Status.OUT_OF_MEMORY)):
        problem = Problem.build(graph, CLUSTER, JOB, reserve_memory=reserve)
        batch = simulate_batch(problem, placement)
        assert batch.status[0] == status
        assert batch.overflow[0] == max(0, reserve - slack)
        assert batch.step_time[0] == 7.0


def test_the_reserve_of_a_plan_decides_whether_it_fits_and_not_how_long_it_takes():
    graph = chain(num_bytes=10**9)
    plan = Plan.from_placement(graph, CLUSTER, JOB, [0, 0, 0])
    fits = simulate(graph, CLUSTER, JOB, plan)
    use = fits.devices[0]
    assert fits.feasible
    assert fits.overflow == 0
    tight = Constraints(reserve_memory_bytes=use.capacity - use.reserved + 5)
    result = simulate(graph, CLUSTER, JOB, msgspec.structs.replace(plan, constraints=tight))
    assert not result.feasible
    assert result.overflow == 5
    assert result.step_time == fits.step_time == 7.0


@every_setting
def test_one_result_and_a_batch_agree_on_memory(settings):
    rng = np.random.default_rng(8)
    for _ in range(3):
        placement = rng.integers(0, 4, 3)
        graph = chain(num_bytes=int(rng.integers(0, 2**34)))
        plan = Plan.from_placement(graph, CLUSTER, JOB, placement, settings=settings)
        result = simulate(graph, CLUSTER, JOB, plan)
        batch = simulate_batch(Problem.build(graph, CLUSTER, JOB, settings), placement[None])
        assert [use.reserved for use in result.devices] == batch.reserved[0].tolist()
        assert [use.allocated for use in result.devices] == batch.allocated[0].tolist()
        assert result.feasible == (batch.status[0] == Status.OK)
        assert result.step_time == batch.step_time[0]


# settings


def test_simulate_follows_the_plan_unless_it_is_told_otherwise():
    graph = OpGraph.from_edges(
        [("slow", 5.0), ("late", 1.0), ("free", 1.0)],
        [("slow", "late", 0)],
        measured_on=V100,
        batch=8,
    )
    ready = Settings(order="ready")
    plan = Plan.from_placement(graph, CLUSTER, JOB, [0, 1, 1], settings=ready)
    late_then_free = simulate(graph, CLUSTER, JOB, plan, settings=Settings()).step_time
    free_first = simulate(graph, CLUSTER, JOB, plan).step_time
    assert late_then_free == pytest.approx(7.0, abs=1e-3)
    assert free_first == pytest.approx(6.0, abs=1e-3)


def test_priorities_of_a_plan_order_what_is_ready():
    graph = OpGraph.from_edges([("a", 1.0), ("b", 2.0)], [], measured_on=V100, batch=8)
    plan = Plan.from_placement(graph, CLUSTER, JOB, [0, 0], settings=Settings(order="ready"))
    second_first = msgspec.structs.replace(plan, priorities=(1, 0))
    assert simulate(graph, CLUSTER, JOB, plan).run.start.tolist() == [0.0, 1.0]
    assert simulate(graph, CLUSTER, JOB, second_first).run.start.tolist() == [2.0, 0.0]


@every_setting
def test_one_op_without_bytes_takes_its_seconds(settings):
    graph = OpGraph.from_edges([("only", 0.25)], [], measured_on=V100, batch=8)
    plan = Plan.from_placement(graph, CLUSTER, JOB, [3], settings=settings)
    result = simulate(graph, CLUSTER, JOB, plan)
    assert result.step_time == 0.25
    assert result.throughput == 32.0
    assert [use.allocated for use in result.devices] == [0] * 5
    assert result.run.transfers() == []


@every_setting
def test_ops_that_take_no_time_make_a_step_of_no_time(settings):
    graph = OpGraph.from_edges([("a", 0.0), ("b", 0.0)], [("a", "b", 0)], measured_on=V100, batch=8)
    plan = Plan.from_placement(graph, CLUSTER, JOB, [1, 1], settings=settings)
    result = simulate(graph, CLUSTER, JOB, plan)
    assert result.step_time == 0.0
    assert result.throughput is None


# copies of the model


def learning(seconds: float = 2.0, gradient: int = int(GB)) -> OpGraph:
    """A measured model of one forward and backward, and an update that sums a gradient."""
    builder = GraphBuilder("learning", batch=8)
    weight = builder.parameter("w", gradient)
    backward = builder.op(
        "backward",
        inputs=[weight],
        outputs=[Out(80), Out(gradient, role=Role.GRADIENT)],
        kernels=0,
        seconds=seconds,
    )
    builder.op(
        "update",
        phase=Phase.U,
        op_class=OpClass.UPDATE,
        inputs=[weight, builder.outputs(backward)[1]],
        outputs=[Out(gradient, storage_of=weight)],
        unit_of=backward,
        kernels=0,
        elements=gradient // 4,
        seconds=0.0,
    )
    return builder.build(measured_on=V100)


def mesh(kinds: tuple[str, ...], latency: float = 0.5) -> Cluster:
    """Every pair has a wire of 1 GB/s."""
    wires = tuple(
        (f"d{a}", f"d{b}", 1.0, latency * 1e6)
        for a, b in itertools.combinations(range(len(kinds)), 2)
    )
    return build_cluster(Network(kinds, forwards=False, switches=0, links=wires))


LINEAR = Job(batch=8, assume_linear=True)


@pytest.mark.parametrize(
    ("copies", "latency", "compute", "ring"),
    [
        (2, 0.5, 1.0, 1.0 + 2 * 0.5),  # half of 1 GB there, the other half back
        (4, 0.0, 0.5, 0.5),  # 2 * 3/4 of 1 GB, over three rings
    ],
)
def test_copies_take_their_share_of_the_batch_and_sum_their_gradients(
    copies, latency, compute, ring
):
    graph, cluster = learning(), mesh((V100,) * copies, latency)
    names = [device.name for device in cluster.devices]
    plan = Plan.data_parallel(graph, cluster, LINEAR, names)
    result = simulate(graph, cluster, LINEAR, plan)
    assert result.collective_time == pytest.approx(ring)
    assert result.step_time == pytest.approx(compute + ring)
    assert result.throughput == pytest.approx(8 / (compute + ring))
    assert result.batch_per_copy == 8 // copies
    assert all(use.communication == pytest.approx(ring) for use in result.devices)


def test_the_narrowest_wire_sets_the_pace_whatever_the_order_of_the_copies():
    wires = [(f"d{device}", "hub", 0.25 if device == 2 else 1.0, 0.0) for device in range(4)]
    graph, cluster = learning(), toy_cluster(["n0"] * 4, wires)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        plan = Plan.data_parallel(graph, cluster, LINEAR, [f"d{device}" for device in order])
        result = simulate(graph, cluster, LINEAR, plan)
        assert result.collective_time == pytest.approx(1.0 / 0.25)  # d2 is a leaf of both trees


def test_the_slowest_gpu_makes_the_others_wait():
    graph, cluster = learning(), mesh((V100, T4), latency=0.0)
    plan = Plan.data_parallel(graph, cluster, LINEAR, ["d0", "d1"])
    result = simulate(graph, cluster, LINEAR, plan)
    slow = load_profile(V100).peak("fp32") / load_profile(T4).peak("fp32")  # of 1 s
    fast_use, slow_use = result.devices
    assert slow > 1
    assert result.step_time == pytest.approx(slow + 1.0)
    assert (fast_use.busy, slow_use.busy) == pytest.approx((1.0, slow))
    assert (fast_use.bubble, slow_use.bubble) == pytest.approx((slow - 1.0, 0.0))


def test_copies_need_their_own_memory_each_and_devices_without_one_need_none():
    graph, cluster = learning(gradient=400), mesh((V100, V100, T4))
    plan = Plan.data_parallel(graph, cluster, LINEAR, ["d0", "d2"])
    result = simulate(graph, cluster, LINEAR, plan)
    held = 400 + 100 * 8  # the parameter and Adam's state
    made = 40 + 400 + 400  # activations, the gradient and its bucket
    assert [use.allocated for use in result.devices] == [held + made, 0, held + made]
    assert [use.num_ops for use in result.devices] == [2, 0, 2]
    assert result.devices[1].reserved == 0
    assert result.devices[1].bubble == result.step_time


def test_copies_that_do_not_fit_are_told():
    graph, cluster = learning(gradient=4 * GiB), mesh((V100,) * 2)
    plan = Plan.data_parallel(graph, cluster, LINEAR, ["d0", "d1"])
    result = simulate(graph, cluster, LINEAR, plan)
    assert not result.feasible
    assert result.overflow > 0


def test_one_copy_is_the_placement_on_one_device():
    graph, cluster = learning(), mesh((V100,) * 2)
    alone = Plan.data_parallel(graph, cluster, JOB, ["d1"])
    placed = Plan.from_placement(graph, cluster, JOB, [1])
    one, other = (simulate(graph, cluster, JOB, plan) for plan in (alone, placed))
    assert one.step_time == other.step_time
    assert one.collective_time == 0.0


def test_copies_of_a_measured_graph_are_refused_unless_its_times_may_be_scaled():
    graph, cluster = learning(), mesh((V100,) * 2)
    plan = Plan.data_parallel(graph, cluster, JOB, ["d0", "d1"])
    with pytest.raises(PlanError, match=r"learning: measured at one batch.*--assume-linear"):
        simulate(graph, cluster, JOB, plan)


def test_copies_that_do_not_divide_the_batch_are_refused():
    graph, cluster = learning(), mesh((V100,) * 3)
    plan = Plan.data_parallel(graph, cluster, LINEAR, ["d0", "d1", "d2"])
    with pytest.raises(PlanError, match="a batch of 8 does not divide by 3 copies"):
        simulate(graph, cluster, LINEAR, plan)


def test_a_sum_without_a_route_is_refused_by_the_names_of_its_ends():
    graph = learning()
    plan = Plan.data_parallel(graph, apart(), LINEAR, ["d0", "d2"])
    with pytest.raises(PlanError, match="no route from 'd0' to 'd2'"):
        simulate(graph, apart(), LINEAR, plan)


def test_a_copy_on_a_cpu_without_measured_times_is_refused():
    graph = learning()
    plan = Plan.data_parallel(graph, CLUSTER, LINEAR, ["gpu0", "cpu0"])
    message = r"op 'backward \(copy 1\)' cannot run on device 'cpu0'"
    with pytest.raises(PlanError, match=message):
        simulate(graph, CLUSTER, LINEAR, plan)


def test_a_toy_worked_by_hand_is_the_same_through_every_way_in():
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)])
    problem = compiled_problem(case)
    assert run_placement(problem, case.placement).step_time == 6.5
    assert simulate_batch(problem, case.placement[None]).step_time.tolist() == [6.5]
