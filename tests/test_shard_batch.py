"""Sharded plans in batches: the numbers of the exact simulation, folding, what is refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from simcore import simulate
from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.kernel import Status
from simcore.plan import Buckets, Settings
from simcore.shard_batch import FoldedSpace, simulate_folded, simulate_shardings
from simcore.shard_fold import KEPT, find_repeats, fold
from simcore.shard_space import STREAM, WHOLE, ShardSpace
from tests.sharded_models import GPUS, JOB, SWITCH, exact, images, mixture, transformer

NONE = Settings(host="per_rank", contention="none", slow_down=False)
GRAPH = Settings(host="per_rank", contention="none", launch="graph", slow_down=False)
ORDERED = Settings(host="per_rank", contention="ordered", launch="graph", slow_down=False)
FAIR = Settings(host="per_rank", contention="fair", launch="graph", slow_down=False)
MESHES = ({"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2})
# what reading the times of collectives from a curve of 16 points a doubling may cost
CURVE = 2e-5

MODELS: dict[str, Callable[[], OpGraph]] = {
    "transformer": transformer,
    "mixture": mixture,
    "images": images,
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, OpGraph]:
    return {name: make() for name, make in MODELS.items()}


def space_of(graph: OpGraph, mesh: dict[str, int], settings: Settings = GRAPH) -> ShardSpace:
    devices = GPUS[: math.prod(mesh.values())]
    return ShardSpace.build(graph, SWITCH, JOB, devices, mesh, settings=settings)


def random_plans(space: ShardSpace, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (count, space.num_decisions)
    return rng.integers(WHOLE, len(space.axes), shape).astype(np.int8)


def differences(
    space: ShardSpace, rows: np.ndarray, settings: Settings | None = None
) -> np.ndarray:
    """Returns how far step times are from the exact ones; memory must be the same."""
    found = simulate_shardings(space, rows)
    errors = []
    for number, row in enumerate(rows):
        result = exact(space, row, settings)
        first = result.devices[0]
        assert found.allocated[number] == first.allocated
        assert found.reserved[number] == first.reserved
        assert {use.allocated for use in result.devices[: len(space.devices)]} == {first.allocated}
        errors.append(found.step_time[number] / result.step_time - 1)
    return np.array(errors)


# the exact simulation


@pytest.mark.parametrize("settings", [NONE, GRAPH])
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_take_as_long_and_hold_as_much_as_simulated_one_by_one(
    graphs: dict[str, OpGraph], name: str, settings: Settings
) -> None:
    space = space_of(graphs[name], MESHES[-1], settings)
    assert np.abs(differences(space, random_plans(space, 2))).max() < CURVE


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_hundreds_of_random_plans_do(
    graphs: dict[str, OpGraph], name: str, mesh: dict[str, int]
) -> None:
    space = space_of(graphs[name], mesh)
    assert np.abs(differences(space, random_plans(space, 40, seed=1))).max() < CURVE


STYLES = (
    ("transformer", {"tp": "tensor"}),
    ("transformer", {"tp": "sequence"}),
    ("transformer", {"tp": "context"}),
    ("transformer", {"cp": "context", "tp": "tensor"}),
    ("mixture", {"tp": "tensor"}),
    ("mixture", {"ep": "expert"}),
    ("mixture", {"ep": "expert", "tp": "tensor"}),
    ("images", {"tp": "tensor"}),
)


@pytest.mark.parametrize(("name", "styles"), STYLES)
def test_named_styles_are_points_of_the_space(
    graphs: dict[str, OpGraph], name: str, styles: dict[str, str]
) -> None:
    space = space_of(graphs[name], {"dp": 2} | dict.fromkeys(styles, 2))
    row = space.styled(styles)
    found = simulate_shardings(space, row[None])
    result = simulate(space.graph, SWITCH, JOB, space.plan(row))
    assert found.step_time[0] == pytest.approx(result.step_time, rel=CURVE)
    assert found.reserved[0] == result.devices[0].reserved


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_one_stream_for_communication_is_that_of_ordered_channels(
    graphs: dict[str, OpGraph], mesh: dict[str, int]
) -> None:
    for graph in graphs.values():
        space = space_of(graph, mesh, ORDERED)
        assert np.abs(differences(space, random_plans(space, 3))).max() < CURVE


def test_with_two_axes_the_exact_order_of_channels_costs_a_few_percent_more(
    graphs: dict[str, OpGraph],
) -> None:
    # there the groups of two collectives of one producer take turns; here one follows the other
    for graph in graphs.values():
        space = space_of(graph, {"tp": 2, "cp": 2}, ORDERED)
        errors = differences(space, random_plans(space, 6))
        assert errors.min() > -0.05
        assert errors.max() < CURVE


@pytest.mark.slow
def test_fair_sharing_is_approximated_by_one_stream(graphs: dict[str, OpGraph]) -> None:
    for graph in graphs.values():
        for mesh in MESHES:
            space = space_of(graph, mesh, ORDERED)
            errors = differences(space, random_plans(space, 6), FAIR)
            assert np.abs(errors).max() < 0.25


def test_gradients_in_buckets_of_any_size_are_summed_where_they_are_full(
    graphs: dict[str, OpGraph],
) -> None:
    for buckets in (Buckets(num_bytes=0), Buckets(num_bytes=40_000, as_views=True)):
        space = ShardSpace.build(
            graphs["transformer"], SWITCH, JOB, GPUS[:4], {"dp": 2, "tp": 2}, settings=GRAPH,
            buckets=buckets,
        )  # fmt: skip
        assert np.abs(differences(space, random_plans(space, 3))).max() < CURVE


def test_a_plan_does_not_depend_on_the_batch_it_is_in(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["mixture"], {"dp": 2, "cp": 2, "tp": 2})
    rows = random_plans(space, 2000)
    together = simulate_shardings(space, rows, threads=2)
    for number in (0, 999, 1999):
        alone = simulate_shardings(space, rows[number : number + 1])
        assert alone.step_time[0] == together.step_time[number]
        assert alone.allocated[0] == together.allocated[number]


# what does not fit, what is refused


def test_a_batch_that_does_not_divide_and_memory_that_is_short_are_statuses(
    graphs: dict[str, OpGraph],
) -> None:
    job = Job(batch=6)
    graph = graphs["transformer"]
    space = ShardSpace.build(graph, SWITCH, job, GPUS[:8], {"dp": 2, "tp": 4}, settings=GRAPH)
    rows = np.full((2, space.num_decisions), WHOLE, np.int8)
    rows[1, [group.name for group in space.linkage.groups].index("batch")] = 0
    found = simulate_shardings(space, rows)
    assert found.status.tolist() == [Status.OK, Status.ILLEGAL_DEVICE]
    assert np.isinf(found.step_time[1])
    short = simulate_shardings(space, rows, reserve_memory=2**60)
    assert short.status[0] == Status.OUT_OF_MEMORY
    assert short.overflow[0] == short.reserved[0]


def test_a_plan_of_the_space_is_a_valid_plan_unless_an_axis_is_idle(
    graphs: dict[str, OpGraph],
) -> None:
    space = space_of(graphs["mixture"], {"dp": 2, "ep": 2, "tp": 2})
    row = space.styled({"ep": "expert", "tp": "tensor"})
    assert space.plan(row).validate(space.graph, SWITCH, JOB) == []
    with pytest.raises(PlanError, match="axis 'ep' splits nothing"):
        space.plan(np.full(space.num_decisions, WHOLE, np.int8))


REFUSED = (
    ({"mesh": {"tp": 4, "dp": 2}}, "4 devices for a mesh of 8"),
    ({"mesh": {"a": 1, "b": 2, "c": 2}}, "3 axes beside dp"),
    ({"settings": Settings(host="per_rank", contention="fair")}, "contention none or ordered"),
    ({"settings": Settings(contention="none")}, "a host per rank"),
    ({"cluster": Cluster.preset("2xA100+4xT4")}, "of one kind"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_batches_do_not_know_is_refused(
    graphs: dict[str, OpGraph], changes: dict[str, object], message: str
) -> None:
    given = {"cluster": SWITCH, "mesh": {"tp": 4}, "settings": STREAM} | changes
    names = [d.name for d in given["cluster"].devices if not d.kind.startswith("CPU")]
    with pytest.raises(PlanError, match=message):
        ShardSpace.build(
            graphs["transformer"], given["cluster"], JOB, names[:4], given["mesh"],
            settings=given["settings"],
        )  # fmt: skip


def test_plans_of_another_shape_or_axis_are_refused(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["images"], {"tp": 2})
    for bad, message in (
        (np.zeros(space.num_decisions, np.int8), "whole numbers"),
        (np.zeros((1, space.num_decisions + 1), np.int8), "whole numbers"),
        (np.zeros((1, space.num_decisions)), "whole numbers"),
        (np.ones((1, space.num_decisions), np.int8), "-1 to 0"),
    ):
        with pytest.raises(PlanError, match=message):
            simulate_shardings(space, bad)


# folding


@pytest.fixture(scope="module")
def tall() -> OpGraph:
    return transformer(layers=8)


def folded_of(graph: OpGraph, mesh: dict[str, int], settings: Settings) -> FoldedSpace:
    devices = GPUS[: math.prod(mesh.values())]
    return FoldedSpace.build(graph, SWITCH, JOB, devices, mesh, settings=settings)


def test_a_fold_of_equal_layers_is_the_model_with_fewer_of_them(tall: OpGraph) -> None:
    repeats = find_repeats(tall)
    assert [(repeat.stack, len(repeat.ops)) for repeat in repeats] == [("layers", 6)]
    left = fold(tall, repeats, {"layers": KEPT}).graph
    small = transformer(layers=4)
    assert left.num_ops == small.num_ops
    assert sorted(left.op_class.tolist()) == sorted(small.op_class.tolist())
    assert left.tensor_bytes.sum(axis=0).tolist() == small.tensor_bytes.sum(axis=0).tolist()


@pytest.mark.parametrize("settings", [GRAPH, ORDERED, STREAM])
def test_one_copy_folded_is_exact(tall: OpGraph, settings: Settings) -> None:
    for mesh in ({"tp": 4}, {"cp": 2, "tp": 2}):
        folded = folded_of(tall, mesh, settings)
        assert folded.num_decisions < len(folded.unfolded().linkage.groups) / 3
        rows = random_plans(folded.spaces[0], 200)
        few, all_layers = simulate_folded(folded, rows), simulate_shardings(folded.unfolded(), rows)
        np.testing.assert_allclose(few.step_time, all_layers.step_time, rtol=1e-9)
        np.testing.assert_array_equal(few.reserved, all_layers.reserved)


def test_copies_folded_hold_the_same_and_take_nearly_as_long(tall: OpGraph) -> None:
    folded = folded_of(tall, {"dp": 2, "tp": 2}, ORDERED)
    rows = random_plans(folded.spaces[0], 200)
    few, all_layers = simulate_folded(folded, rows), simulate_shardings(folded.unfolded(), rows)
    np.testing.assert_array_equal(few.reserved, all_layers.reserved)
    np.testing.assert_allclose(few.step_time, all_layers.step_time, rtol=0.05)


def test_a_model_without_equal_layers_is_left_as_it_is(graphs: dict[str, OpGraph]) -> None:
    graph = graphs["images"]
    folded = folded_of(graph, {"tp": 2}, GRAPH)
    assert folded.num_ops == graph.num_ops
    rows = random_plans(folded.spaces[0], 10)
    np.testing.assert_array_equal(
        simulate_folded(folded, rows).step_time,
        simulate_shardings(folded.unfolded(), rows).step_time,
    )
