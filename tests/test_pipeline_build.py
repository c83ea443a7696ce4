"""Plans of stages and microbatches: what is built of them, and what is refused."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from simcore.cluster import Cluster
from simcore.errors import DeadlockError, PlanError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.pipeline_build import build_pipeline, semantics_of, task_cost
from simcore.plan import RANK_HOSTS, Buckets, Plan, Ref, Settings, Stage
from simcore.simulation import simulate
from simcore.steady_state import SEMANTICS_ASYNC
from tests.pipelines import V100, chain_of

GB = 10**9
JOB = Job(batch=8, assume_linear=True)


def layers(count: int, seconds: float = 1.0, target: str = "") -> OpGraph:
    """A chain of layers, each with a parameter; measured at a batch of 8; no launch."""
    builder = GraphBuilder("layers", batch=8)
    weights = [builder.parameter(f"w{i}", 4000) for i in range(count)]
    flow: list[int] = []
    forward = []
    for i in range(count):
        op = builder.op(
            f"f{i}", module=f"layer.{i}", target=target, inputs=[weights[i], *flow[-1:]],
            outputs=[Out((0, 1000))], seconds=seconds, kernels=0,
        )  # fmt: skip
        forward.append(op)
        flow += builder.outputs(op)
    back: list[int] = []
    gradients = []
    for i in reversed(range(count)):
        op = builder.op(
            f"b{i}", phase=Phase.B, inputs=[weights[i], flow[i], *back[-1:]], unit_of=forward[i],
            outputs=[Out(4000, role=Role.GRADIENT), Out((0, 1000))], seconds=2 * seconds,
            kernels=0,
        )  # fmt: skip
        gradients.append((i, builder.outputs(op)[0]))
        back.append(builder.outputs(op)[1])
    for i, gradient in gradients:
        builder.op(
            f"u{i}", phase=Phase.U, op_class=OpClass.UPDATE, inputs=[weights[i], gradient],
            outputs=[Out(4000, storage_of=weights[i])], unit_of=forward[i], elements=1000,
            seconds=0.0, kernels=0,
        )  # fmt: skip
    return builder.build(measured_on=V100)


def plan_of(
    graph: OpGraph,
    cluster: Cluster,
    stages: Sequence[Sequence[str]],
    devices: Sequence[Sequence[str]],
    **fields: object,
) -> Plan:
    made = tuple(
        Stage(name=f"s{i}", ops=tuple(ops), devices=tuple(names), mesh={"dp": len(names)})
        for i, (ops, names) in enumerate(zip(stages, devices, strict=True))
    )
    given: dict[str, object] = {"schedule": "1f1b", "microbatches": 4} | fields
    return Plan(
        graph=Ref(name=graph.name, hash=graph.content_hash()),
        cluster=Ref(name=cluster.name, hash=cluster.content_hash()),
        job=JOB,
        stages=made,
        settings=RANK_HOSTS,
        **given,
    )


def halves(cluster: Cluster, graph: OpGraph, **fields: object) -> Plan:
    return plan_of(graph, cluster, [["f0", "f1"], ["f2", "f3"]], [["d0"], ["d1"]], **fields)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_takes_its_share_of_the_work_and_its_bubble(schedule: str) -> None:
    graph, cluster = layers(4), chain_of(2, bandwidth=1e15)
    result = simulate(graph, cluster, JOB, halves(cluster, graph, schedule=schedule))
    # per microbatch of 2 of 8 samples 0.5 s forward and 1 s backward a stage; no op makes weight
    # gradients alone, so that a split backward has nothing to fill the bubble with
    assert result.step_time == pytest.approx((4 + 1) * 1.5, rel=1e-6)
    assert result.samples == 8
    assert [use.busy for use in result.devices] == pytest.approx([6.0, 6.0], rel=1e-6)


def test_memory_is_broken_down_by_class_and_adds_up() -> None:
    graph, cluster = layers(4), chain_of(2)
    for use in simulate(graph, cluster, JOB, halves(cluster, graph)).devices:
        assert sum(use.memory.values()) == use.allocated
        assert use.memory["parameters"] == 8000
        assert use.memory["optimizer state"] == 2000 * 8
        assert use.memory["gradients"] == 8000


def test_parameters_of_an_uneven_plan_are_the_sum_over_its_modules() -> None:
    graph, cluster = layers(8), chain_of(4)
    cuts = [["f0"], ["f1", "f2"], ["f3", "f4"], ["f5", "f6", "f7"]]
    plan = plan_of(graph, cluster, cuts, [[f"d{i}"] for i in range(4)])
    held = [use.memory["parameters"] for use in simulate(graph, cluster, JOB, plan).devices]
    assert held == [4000, 8000, 8000, 12000]


def test_copies_of_stages_share_microbatches() -> None:
    graph, cluster = layers(4), chain_of(4, bandwidth=1e15)
    plan = plan_of(
        graph, cluster, [["f0", "f1"], ["f2", "f3"]], [["d0", "d1"], ["d2", "d3"]],
        microbatches=2,
    )  # fmt: skip
    result = simulate(graph, cluster, JOB, plan)
    assert result.step_time == pytest.approx((2 + 1) * 1.5, rel=1e-6)
    assert all(use.busy == pytest.approx(3.0, rel=1e-6) for use in result.devices)


def test_one_stage_with_microbatches_accumulates_gradients() -> None:
    graph, cluster = layers(2), chain_of(2, bandwidth=1e15)
    plan = plan_of(graph, cluster, [["f0", "f1"]], [["d0", "d1"]], microbatches=4)
    assert simulate(graph, cluster, JOB, plan).step_time == pytest.approx(3.0, rel=1e-6)


def test_an_asynchronous_plan_says_so_and_takes_its_slowest_stage() -> None:
    graph, cluster = layers(4), chain_of(2, bandwidth=1e15)
    plan = halves(cluster, graph, schedule="pipedream")
    with pytest.raises(PlanError, match="asynchronous updates"):
        simulate(graph, cluster, JOB, plan)
    plan = msgspec.structs.replace(plan, semantics=(SEMANTICS_ASYNC,))
    result = simulate(graph, cluster, JOB, plan)
    assert result.step_time == pytest.approx(6.0, rel=1e-6)  # a minibatch of 8 on half the layers
    assert result.devices[0].busy == pytest.approx(6.0, rel=1e-6)
    assert result.devices[0].memory["parameters"] == 2 * 8000  # two versions in flight
    assert result.devices[1].memory["parameters"] == 8000


def test_batch_norm_per_microbatch_changes_the_mathematics() -> None:
    graph = layers(2, target="aten.native_batch_norm")
    cluster = chain_of(2)
    plan = plan_of(graph, cluster, [["f0"], ["f1"]], [["d0"], ["d1"]])
    assert semantics_of(plan, graph) == ("batch norm per microbatch",)
    with pytest.raises(PlanError, match="batch norm per microbatch"):
        build_pipeline(graph, cluster, JOB, plan)


def test_custom_action_lists_run() -> None:
    graph, cluster = layers(4), chain_of(2, bandwidth=1e15)
    rows = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    plan = halves(cluster, graph, schedule="custom", actions=rows, microbatches=2)
    assert simulate(graph, cluster, JOB, plan).step_time == pytest.approx(9.0, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"schedule": "2f2b"}, PlanError, "no schedule '2f2b'; known: gpipe"),
        ({"microbatches": 3}, PlanError, "a batch of 8 does not divide by 3 microbatches"),
        ({"schedule": "none"}, PlanError, "2 stages, but no schedule"),
        ({"optimizer_sharding": 4}, PlanError, "optimizer_sharding 4"),
        ({"actions": (("0F0",),)}, PlanError, "actions if, and only if"),
        ({"schedule": "custom", "actions": (("0F0", "0B0"), ("1B0", "1F0")), "microbatches": 1},
         PlanError, "1B0"),
        ({"schedule": "custom", "actions": (("0B0", "0F0"), ("1F0", "1B0")), "microbatches": 1},
         PlanError, "0B0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(
    fields: dict[str, object], error: type[PlanError], match: str
) -> None:
    graph, cluster = layers(4), chain_of(2)
    with pytest.raises(error, match=match) as caught:
        simulate(graph, cluster, JOB, halves(cluster, graph, **fields))
    assert "\n" not in str(caught.value)


def test_ranks_that_wait_for_each_other_are_shown_as_a_grid() -> None:
    graph, cluster = layers(4), chain_of(2)
    rows = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1B1", "1F0", "1B0"))
    plan = halves(cluster, graph, schedule="custom", actions=rows, microbatches=2)
    with pytest.raises(DeadlockError) as caught:
        simulate(graph, cluster, JOB, plan)
    assert any("*" in line or ">" in line for line in caught.value.grid)


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([["f0", "f1"], ["f2"]], "op 'f3' is in no stage"),
        ([["f0", "f1", "f2"], ["f2", "f3"]], "op 'f2' is in stages 's0' and 's1'"),
        ([["f0", "f1", "f9"], ["f2", "f3"]], "stage 's0': no op 'f9' in the graph"),
        ([["f0", "f2"], ["f1", "f3"]], "stage"),
    ],
)
def test_stages_must_cover_the_graph_once_without_circles(
    stages: list[list[str]], match: str
) -> None:
    graph, cluster = layers(4), chain_of(2)
    with pytest.raises(PlanError, match=match):
        simulate(graph, cluster, JOB, plan_of(graph, cluster, stages, [["d0"], ["d1"]]))


def test_a_plan_of_stages_is_the_same_after_a_file(tmp_path: object) -> None:
    graph, cluster = layers(4), chain_of(2)
    plan = halves(cluster, graph, buckets=Buckets(num_bytes=0), optimizer_sharding=1)
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_task_costs_what_its_ops_do_with_their_host() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        count = int(rng.integers(1, 8))
        seconds, launch = rng.random((count, 1)), rng.random((count, 1))
        cost = task_cost(seconds, launch)
        for free, host in rng.random((5, 2)) * 4:
            end, issue = free, host
            for op in range(count):
                issue += launch[op, 0]
                end = max(end, issue) + seconds[op, 0]
            issued = host + cost.ahead[0]
            assert max(free, issued) + cost.seconds[0] == pytest.approx(end)
            assert issued + cost.trail[0] == pytest.approx(issue)


def test_settings_change_what_a_pipeline_takes() -> None:
    graph, cluster = layers(4), chain_of(2, bandwidth=4000.0)
    plan = halves(cluster, graph)
    times = {
        p2p: simulate(
            graph, cluster, JOB, plan, settings=Settings(host="per_rank", p2p=p2p)
        ).step_time
        for p2p in ("copy", "inline", "rendezvous")
    }
    assert times["inline"] > times["copy"]
    assert times["rendezvous"] >= times["copy"]


# what a hostile reader found


def lonely(outputs: Sequence[Out] = ()) -> OpGraph:
    """One op that nothing updates."""
    builder = GraphBuilder("lonely", batch=8)
    builder.op("x", seconds=1.0, kernels=0, outputs=outputs)
    return builder.build(measured_on=V100)


@pytest.mark.parametrize("granularity", ["task", "op"])
def test_a_pipeline_without_any_tensor_runs(granularity: str) -> None:
    graph, cluster = lonely(), chain_of(1)
    plan = plan_of(graph, cluster, [["x"]], [["d0"]], microbatches=1)
    settings = Settings(host="per_rank", granularity=granularity)
    assert simulate(graph, cluster, JOB, plan, settings=settings).step_time == 1.0


@pytest.mark.parametrize("granularity", ["task", "op"])
def test_an_asynchronous_pipeline_without_updates_takes_its_busy_time(granularity: str) -> None:
    graph, cluster = lonely([Out(8)]), chain_of(1)
    plan = plan_of(
        graph, cluster, [["x"]], [["d0"]], schedule="pipedream", semantics=(SEMANTICS_ASYNC,)
    )
    settings = Settings(host="per_rank", granularity=granularity)
    assert simulate(graph, cluster, JOB, plan, settings=settings).step_time == 1.0


def test_the_parts_of_an_asynchronous_step_add_up() -> None:
    graph, cluster = layers(4), chain_of(2, bandwidth=4000.0)
    plan = halves(cluster, graph, schedule="pipedream", semantics=(SEMANTICS_ASYNC,))
    result = simulate(graph, cluster, JOB, plan)
    for use in result.devices:
        parts = (use.busy, use.communication, use.launch, use.bubble)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(result.step_time)


def test_ranks_share_all_their_devices_or_none() -> None:
    graph, cluster = layers(4), chain_of(3)
    plan = plan_of(graph, cluster, [["f0", "f1"], ["f2", "f3"]], [["d0", "d1"], ["d1", "d2"]])
    with pytest.raises(PlanError, match="device 'd1' is in two ranks"):
        simulate(graph, cluster, JOB, plan)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"ops": ("f0",)}, "has ops, but the plan has no schedule"),
        ({"recompute": "full"}, "has recompute, but the plan has no schedule"),
    ],
)
def test_fields_that_nothing_would_read_are_refused(fields: dict[str, object], match: str) -> None:
    graph, cluster = layers(2), chain_of(2)
    stage = Stage(devices=("d0", "d1"), mesh={"dp": 2}, **fields)
    plan = plan_of(graph, cluster, [["f0", "f1"]], [["d0"]], microbatches=1)
    plan = msgspec.structs.replace(plan, stages=(stage,), schedule="none")
    with pytest.raises(PlanError, match=match):
        simulate(graph, cluster, JOB, plan)


def test_a_stage_without_ops_is_named() -> None:
    graph, cluster = layers(2), chain_of(2)
    plan = plan_of(graph, cluster, [["f0", "f1"], []], [["d0"], ["d1"]])
    with pytest.raises(PlanError, match=r"stage 's1' \(number 1\) has no ops"):
        simulate(graph, cluster, JOB, plan)


def test_a_graph_with_collectives_is_no_copy_to_cut() -> None:
    builder = GraphBuilder("reduce", batch=8)
    builder.op("all", op_class=OpClass.COLLECTIVE)
    cluster = chain_of(1)
    plan = plan_of(builder.build(), cluster, [["all"]], [["d0"]])
    with pytest.raises(PlanError, match="'all' is a collective; stages are cut from one copy"):
        build_pipeline(builder.build(), cluster, JOB, plan)
