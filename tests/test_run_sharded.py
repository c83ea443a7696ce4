"""Sharded plans run on gloo processes as the local graph says: loss and gradients of one device."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from calibration.run.layouts import NEVER, Layout, LayoutError, strides_of
from calibration.run.recording import Ref
from calibration.run.shard_compile import shard_program
from calibration.run.shard_program import ChangeState, RunOp, SumBucket
from calibration.run.sharded import ShardWork
from simcore.cli import main
from simcore.cluster import Cluster
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.loops import LoopKind
from simcore.plan import Buckets, Plan
from simcore.shards import linkage_of, sharded_plan
from tests.pipelines import chain_of
from tests.run_faults import BrokenWork
from tests.running import SEED, check, graph_of, mean_loss


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    with Fleet(["cpu"] * 2, backend="gloo", timeout=60) as fleet:
        yield fleet


def bordering(graph: OpGraph) -> set[int]:
    """Groups along which neighbours would exchange borders, or samples have common statistics."""
    linkage = linkage_of(graph)
    return {
        group
        for loops, groups in zip(linkage.factors.loops, linkage.loop_group, strict=True)
        for loop, group in zip(loops, groups, strict=True)
        if loop.kind in {LoopKind.HALO, LoopKind.SEMANTIC}
    }


def searched_plan(
    graph: OpGraph, cluster: Cluster, job: Job, mesh: Mapping[str, int], seed: int
) -> Plan:
    """A plan as a search may find it: any groups in any order along each axis."""
    rng = np.random.default_rng(seed)
    names = [
        group.name
        for number, group in enumerate(linkage_of(graph).groups)
        if number not in bordering(graph)
    ]
    sharding = {
        axis: tuple(rng.permutation(names)[: rng.integers(1, len(names) + 1)].tolist())
        for axis, size in mesh.items()
        if axis != "dp" and size > 1
    }
    plan = Plan.data_parallel(graph, cluster, job, cluster.device_names)
    return replace(plan, stages=(replace(plan.stages[0], mesh=mesh, sharding=sharding),))


STYLED = [
    ("tiny_bert", "tensor"),
    ("tiny_gpt", "tensor"),
    ("tiny_gpt", "sequence"),
    ("tiny_gpt", "context"),
    ("mixture", "tensor"),
    ("mixture", "expert"),
    ("small_vgg", "tensor"),
    ("two_branch", "tensor"),
    ("recurrent", "tensor"),
]


@pytest.mark.parametrize(("factory", "style"), STYLED)
def test_a_model_sharded_by_a_style_trains_as_one_device_does(
    pair: Fleet, factory: str, style: str
) -> None:
    graph, job = graph_of(factory)
    cluster = chain_of(2)
    plan = sharded_plan(graph, cluster, job, cluster.device_names, {"tp": (style, 2)})
    check(pair, plan, graph, cluster, 1)


@pytest.mark.parametrize("factory", ["tiny_gpt", "mixture", "small_vgg", "skip"])
@pytest.mark.parametrize("seed", range(5))
def test_any_groups_in_any_order_train_as_one_device_does(
    pair: Fleet, factory: str, seed: int
) -> None:
    graph, job = graph_of(factory)
    cluster = chain_of(2)
    plan = searched_plan(graph, cluster, job, {"dp": 1, "tp": 2}, seed)
    check(pair, plan, graph, cluster, 1)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_update_parts_of_parameters(pair: Fleet, optimizer: str) -> None:
    graph, job = graph_of("tiny_gpt", optimizer)
    cluster = chain_of(2)
    losses = []
    for axes in ({"tp": ("sequence", 2)}, {}):
        plan = sharded_plan(graph, cluster, job, cluster.device_names, axes)
        ranks = ranks_of(plan, graph, cluster, graph.name, Launch(device="cpu", seed=SEED))
        number = pair.load(ranks.works)
        losses.append([mean_loss(pair.step(number)) for _ in range(4)])
        pair.ask("drop", number=number)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_four_ranks_share_and_copy_as_one_device_trains() -> None:
    cluster = chain_of(4)
    meshes: tuple[dict[str, int], ...] = (
        {"dp": 2, "tp": 2}, {"dp": 1, "tp": 2, "cp": 2}, {"dp": 1, "tp": 4},
    )  # fmt: skip
    with Fleet(["cpu"] * 4, backend="gloo", timeout=120) as fleet:
        for factory in ("tiny_gpt", "mixture", "small_vgg", "skip"):
            graph, job = graph_of(factory)
            for mesh in meshes:
                for seed in range(5):
                    plan = searched_plan(graph, cluster, job, mesh, seed)
                    check(fleet, plan, graph, cluster, 1)
        for size in (0, 1024):
            graph, job = graph_of("tiny_bert")
            styles = {"tp": ("sequence", 2)}
            plan = sharded_plan(graph, cluster, job, cluster.device_names, styles)
            plan = replace(plan, buckets=Buckets(num_bytes=size))
            check(fleet, plan, graph, cluster, 1, repeats=5)


def test_what_runs_is_what_the_local_graph_says() -> None:
    """Megatron-LM: two all-reduces a layer and direction, and one bucket between the copies."""
    graph, job = graph_of("tiny_gpt")
    cluster = chain_of(4)
    plan = sharded_plan(graph, cluster, job, cluster.device_names, {"tp": ("tensor", 2)})
    program = shard_program(plan, graph, graph.name)
    changes = [each for each in program.instructions if isinstance(each, ChangeState)]
    in_blocks = [each.name for each in changes if each.name.startswith("blocks.")]
    assert len(in_blocks) == 2 * 4
    assert {each.kind for each in changes} == {"all_reduce", "slice"} or (
        {each.kind for each in changes} == {"all_reduce"}
    )
    assert sum(isinstance(each, SumBucket) for each in program.instructions) == 1
    inside = [e for e in program.instructions if isinstance(e, RunOp) and e.share.inner]
    assert {str(e.function) for e in inside} == {
        "aten._log_softmax.default", "aten._log_softmax_backward_data.default",
    }  # fmt: skip


def test_what_is_not_run_in_parts_is_refused_before_a_process_starts() -> None:
    graph, job = graph_of("two_branch")
    cluster = chain_of(2)
    linkage = linkage_of(graph)
    rows = next(
        linkage.groups[group].name
        for loops, groups in zip(linkage.factors.loops, linkage.loop_group, strict=True)
        for loop, group in zip(loops, groups, strict=True)
        if loop.kind == LoopKind.HALO
    )
    plan = Plan.data_parallel(graph, cluster, job, cluster.device_names)
    stage = replace(plan.stages[0], mesh={"dp": 1, "tp": 2}, sharding={"tp": (rows,)})
    with pytest.raises(RunError, match=r"left\.0\.convolution is split along its loop 'out"):
        ranks_of(replace(plan, stages=(stage,)), graph, cluster, graph.name, Launch(device="cpu"))


def test_a_rank_that_raises_between_collectives_ends_the_run() -> None:
    graph, job = graph_of("tiny_gpt")
    cluster = chain_of(2)
    plan = sharded_plan(graph, cluster, job, cluster.device_names, {"tp": ("tensor", 2)})
    program = shard_program(plan, graph, graph.name)
    work = ShardWork(program=program, source=graph.name, job=job, seed=SEED)
    first = next(n for n, e in enumerate(program.instructions) if isinstance(e, ChangeState))
    fleet = Fleet(["cpu", "cpu"], backend="gloo", timeout=20)
    with fleet:
        number = fleet.load([BrokenWork(work, 1, first)] * 2)
        with pytest.raises(RunError, match=r"rank 1 \(cpu\) raised ValueError: it breaks"):
            fleet.step(number)
    assert fleet.process_ids == []


def test_run_takes_a_sharded_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, job = graph_of("tiny_gpt")
    cluster = Cluster.preset("4xV100-NVLink")
    names = cluster.device_names[:2]
    path = tmp_path / "plan.json"
    sharded_plan(graph, cluster, job, names, {"tp": ("sequence", 2)}).save(path)
    command = ["run", str(path), "--graph", graph.name, "--steps", "4", "--warmup", "1", "--json"]
    trace = tmp_path / "trace.json"
    assert main([*command, "--allow-noise", "--trace", str(trace)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schedule"] == "sharded"
    assert printed["last_loss"] < printed["first_loss"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"run", "update", "communicate"} <= {event.get("cat") for event in events}


# where a part lies


@given(
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_tensor_lies_in_a_part_where_its_elements_are(
    sizes: list[int], data: st.DataObject
) -> None:
    """Any dimensions joined, any one of them split: the part has the elements of the whole."""
    dim = data.draw(st.integers(0, len(sizes) - 1))
    joins = data.draw(st.lists(st.booleans(), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    order = data.draw(st.randoms(use_true_random=False))
    axes = tuple(1 if n == dim else NEVER for n in range(len(sizes)))
    layout = Layout(tuple(sizes), axes, tuple(range(len(sizes))))
    below = strides_of(sizes)
    dims: list[list[int]] = [[0]]
    for n, joined in enumerate(joins, start=1):
        dims = [*dims[:-1], [*dims[-1], n]] if joined else [*dims, [n]]
    order.shuffle(dims)
    size = tuple(int(np.prod([sizes[n] for n in each])) for each in dims)
    ref = Ref(0, torch.int64, size, tuple(below[each[-1]] for each in dims), 0)
    local = layout.place(ref, (dim,), ())
    whole = torch.arange(int(np.prod(sizes)))
    tensor = whole.as_strided(ref.size, ref.stride, ref.offset)
    at = next(n for n, each in enumerate(dims) if dim in each)
    for place in range(sizes[dim]):
        part = whole.view(sizes).narrow(dim, place, 1).flatten().clone()
        found = part.as_strided(local.size, local.stride, local.offset)
        spread = layout.spread(ref, at, (dim,))
        mine = torch.from_numpy(spread.places((0, place)))
        assert torch.equal(found, tensor.index_select(at, mine))


def test_a_slice_of_what_is_split_has_no_place_in_a_part() -> None:
    layout = Layout((4, 3), (1, NEVER), (0, 1))
    ref = Ref(0, torch.float32, (2, 3), (3, 1), 6)
    assert layout.place(ref, (-1,), ()) == ref
    with pytest.raises(LayoutError, match="a slice of what is split"):
        layout.place(ref, (0,), ())
