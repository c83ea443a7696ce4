"""Plans whose meshes shard: what is communicated under each known name, and that they simulate."""

from collections import Counter
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from agents.planners.recorder import Budget
from agents.planners.sharding import Shardings
from agents.planners.space import PlacementSpace
from simcore.cluster import Cluster, Device, Link
from simcore.errors import GraphError, PlanError
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph, Phase
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import RANK_HOSTS, Plan, Settings, Stage
from simcore.plan_summary import explain
from simcore.shard_summary import explain_sharding, layout_name
from simcore.sharding.groups import find_linkage
from simcore.sharding.named import STYLES, find_roles, style_groups, style_of
from simcore.shards import linkage_of, make_axis, one_device, sharded_plan
from simcore.simulation import simulate
from simcore.sources import load_graph
from tests.networks import star
from tests.sharded_models import JOB, Language

V100 = "V100-SXM2-16GB"
LAYERS = 12  # of gpt2
TOKENS = torch.zeros(JOB.batch or 1, 32, dtype=torch.long)


class Case(NamedTuple):
    """A model and the job it is for."""

    graph: OpGraph
    job: Job


@cache
def case(name: str) -> Case:
    graph, job, _ = load_graph(name, {"batch": 8, "sequence_length": 64})
    return Case(graph, job)


def cluster_of(count: int) -> Cluster:
    devices = tuple(Device.of_kind(f"g{i}", V100) for i in range(count))
    links = tuple(Link(f"g{i}", "switch", "", 100e9, 1e-6) for i in range(count))
    return Cluster(name=f"star-{count}", devices=devices, switches=("switch",), links=links)


def plan_of(name: str, count: int, axes: dict[str, tuple[str, int]]) -> tuple[Plan, Cluster]:
    graph, job = case(name)
    cluster = cluster_of(count)
    return sharded_plan(graph, cluster, job, cluster.device_names, axes), cluster


def communicated(name: str, axes: dict[str, tuple[str, int]]) -> dict[Phase, Counter[str]]:
    """Returns how many collectives of each kind one device takes part in, by phase."""
    size = next(iter(axes.values()))[1]
    plan, _ = plan_of(name, size, axes)
    graph = case(name).graph
    device = one_device(graph, plan, np.zeros(graph.num_units, np.int32))
    found: dict[Phase, Counter[str]] = {phase: Counter() for phase in Phase}
    for op, what in device.communication.items():
        found[Phase(device.graph.phase[op])][what.kind] += 1
    return found


def test_tensor_parallel_sums_twice_a_layer_and_direction():
    found = communicated("gpt2", {"tp": ("tensor", 2)})
    assert found[Phase.F] == {"all_reduce": 2 * LAYERS}
    assert found[Phase.B]["all_reduce"] == 2 * LAYERS


def test_sequence_parallel_gathers_and_scatters_where_tensor_parallel_sums():
    found = communicated("gpt2", {"tp": ("sequence", 2)})
    assert found[Phase.F]["all_gather"] == found[Phase.F]["reduce_scatter"] == 2 * LAYERS
    # in the backward what is gathered for the products' weights is gathered again
    assert found[Phase.B]["all_gather"] == 4 * LAYERS
    assert found[Phase.B]["reduce_scatter"] == 2 * LAYERS


def test_context_parallel_gathers_keys_and_values():
    found = communicated("gpt2", {"cp": ("context", 2)})
    assert found[Phase.F]["all_gather"] == 2 * LAYERS
    assert found[Phase.B]["all_gather"] == found[Phase.B]["reduce_scatter"] == 2 * LAYERS


def test_expert_parallel_exchanges_tokens_twice_a_layer():
    found = communicated("moe-stacked", {"ep": ("expert", 4)})
    assert found[Phase.F]["all_to_all"] == 2 * LAYERS // 2
    assert not found[Phase.F]["all_gather"]
    assert not found[Phase.U]


@pytest.mark.parametrize("style", ["tensor", "sequence"])
def test_each_device_keeps_its_part_of_what_is_split(style):
    graph = case("gpt2").graph
    plan, _ = plan_of("gpt2", 4, {"tp": (style, 4)})
    device = one_device(graph, plan, np.zeros(graph.num_units, np.int32))
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    split = {place for group in (*roles.heads, *roles.widths) for place in
             linkage.groups[group].places}  # fmt: skip
    held = int(graph.first_output[0])
    storages = {storage for storage, _ in split}
    wanted = [
        size // 4 if storage in storages else size
        for storage, size in zip(
            graph.tensor_storage[:held].tolist(), graph.tensor_bytes[:held, 0].tolist(), strict=True
        )
    ]
    assert device.graph.tensor_bytes[:held, 0].tolist() == wanted


@pytest.mark.parametrize("style", STYLES)
def test_styles_are_known_by_what_they_split(style):
    graph = case("moe-stacked").graph
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    assert style_of(style_groups(style, roles), roles) == style
    assert style_of((), roles) == style_of(roles.batch, roles) == ""


def test_an_unknown_style_and_a_model_without_experts_are_refused():
    roles = find_roles(case("gpt2").graph, linkage_of(case("gpt2").graph))
    with pytest.raises(PlanError, match="no way to shard called 'row'"):
        style_groups("row", roles)
    with pytest.raises(PlanError, match="nothing that expert parallelism splits"):
        style_groups("expert", roles)


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"tp": ("tensor", 2)}, "dp 2 x tp 2 (tensor)"),
        ({"tp": ("sequence", 4)}, "tp 4 (sequence)"),
        ({"cp": ("context", 2), "tp": ("sequence", 2)}, "cp 2 (context) x tp 2 (sequence)"),
        ({}, "dp 4"),
    ],
)
def test_a_plan_simulates_and_has_a_name(axes, name):
    graph, job = case("gpt2")
    plan, cluster = plan_of("gpt2", 4, axes)
    assert layout_name(graph, plan) == name
    result = simulate(graph, cluster, job, plan)
    assert result.feasible
    busy = [use.busy for use in result.devices]
    assert busy == pytest.approx([busy[0]] * 4)
    assert name in explain_sharding(graph, plan, result)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert simulate(graph, cluster, job, again).step_time == result.step_time


def test_slower_links_and_more_work_show():
    graph, job = case("gpt2")
    plan, cluster = plan_of("gpt2", 4, {"tp": ("sequence", 4)})
    fast = simulate(graph, cluster, job, plan)
    devices = cluster.devices
    links = tuple(Link(f"g{i}", "switch", "", 10e9, 1e-6) for i in range(4))
    slow = Cluster(name="star-4", devices=devices, switches=("switch",), links=links)
    plan = sharded_plan(graph, slow, job, slow.device_names, {"tp": ("sequence", 4)})
    later = simulate(graph, slow, job, plan)
    assert later.step_time > fast.step_time
    assert later.collective_time > 3 * fast.collective_time
    single = Plan.from_placement(graph, cluster, job, np.zeros(graph.num_units, int))
    assert fast.devices[0].busy < simulate(graph, cluster, job, single).devices[0].busy


def _stages(shards: int, style: str, recompute: str = "none") -> tuple[Plan, Cluster]:
    graph, job = case("gpt2")
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    cluster = cluster_of(2 * 2 * shards)
    sharding = {"tp": tuple(linkage.groups[g].name for g in style_groups(style, roles))}
    names = graph.unit_names
    ends = ("ln_f", "lm_head", "sub", "nll", "log")
    second = [
        name.startswith((*(f"h.{layer}" for layer in range(6, 12)), *ends)) or "softmax" in name
        for name in names
    ]
    stages = []
    for number in range(2):
        ops = tuple(name for name, late in zip(names, second, strict=True) if late == number)
        devices = cluster.device_names[number * 2 * shards : (number + 1) * 2 * shards]
        stages.append(
            Stage(
                name=f"s{number}",
                devices=devices,
                ops=ops,
                mesh={"dp": 2, "tp": shards},
                sharding=sharding if shards > 1 else {},
                recompute=recompute,
            )
        )
    plan = Plan.data_parallel(graph, cluster, job, cluster.device_names)
    plan = msgspec.structs.replace(
        plan, stages=tuple(stages), microbatches=2, schedule="1f1b", settings=RANK_HOSTS
    )
    return plan, cluster


@pytest.mark.parametrize("style", ["tensor", "sequence"])
def test_stages_with_shards_make_a_pipeline(style):
    graph, job = case("gpt2")
    one, small = _stages(1, style)
    two, large = _stages(2, style)
    whole, split = (
        simulate(graph, cluster, job, plan) for plan, cluster in ((one, small), (two, large))
    )
    assert layout_name(graph, two) == f"dp 2 x tp 2 ({style}) x pp 2"
    text = explain(graph, two, split, {}, {})
    assert text.startswith(f"dp 2 x tp 2 ({style}) x pp 2. 2 stages, 2 copies of each")
    assert len({use.allocated for use in split.devices[:4]}) == 1
    assert split.devices[0].memory["parameters"] < whole.devices[0].memory["parameters"]
    assert split.devices[0].busy > 0.5 * whole.devices[0].busy  # collectives count as busy


def test_granularity_op_refuses_stages_with_shards():
    graph, job = case("gpt2")
    plan, cluster = _stages(2, "tensor")
    plan = msgspec.structs.replace(plan, settings=Settings(host="per_rank", granularity="op"))
    with pytest.raises(PlanError, match="granularity 'op' knows no stages whose copies"):
        simulate(graph, cluster, job, plan)


def test_groups_that_do_not_exist_are_named():
    graph, job = case("gpt2")
    plan, cluster = plan_of("gpt2", 2, {"tp": ("tensor", 2)})
    stage = msgspec.structs.replace(plan.stages[0], sharding={"tp": ("nobody:0",)})
    plan = msgspec.structs.replace(plan, stages=(stage,))
    with pytest.raises(PlanError, match="no linkage group 'nobody:0'"):
        simulate(graph, cluster, job, plan)


def test_an_axis_whose_devices_would_all_do_the_same_is_refused():
    graph, job = case("gpt2")
    plan, cluster = plan_of("gpt2", 5, {"tp": ("tensor", 5)})  # 12 heads, widths of 3072
    with pytest.raises(PlanError, match=r"'stage0': axis 'tp' of 5 devices divides none"):
        simulate(graph, cluster, job, plan)


def _with_stage(plan: Plan, number: int, **changes: object) -> Plan:
    stages = list(plan.stages)
    stages[number] = msgspec.structs.replace(stages[number], **changes)
    return msgspec.structs.replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("number", [0, 1])
def test_stages_that_share_a_parameter_need_equal_meshes(number):
    model = Language(2)
    model.head.weight = model.table.weight
    graph = capture(model, {"ids": TOKENS, "target": TOKENS}, JOB, name="tied")
    cluster = cluster_of(4)
    early = [unit < graph.num_units // 2 for unit in range(graph.num_units)]
    linkage = linkage_of(graph)
    groups = style_groups("tensor", find_roles(graph, linkage))
    split = Stage(devices=(), mesh={"dp": 1, "tp": 2},
                  sharding={"tp": tuple(linkage.groups[g].name for g in groups)})  # fmt: skip
    stages = tuple(
        msgspec.structs.replace(
            split if part == number else Stage(devices=(), mesh={"dp": 2}),
            name=f"s{part}",
            devices=cluster.device_names[2 * part : 2 * part + 2],
            ops=tuple(n for n, e in zip(graph.unit_names, early, strict=True) if e == (part == 0)),
        )
        for part in range(2)
    )
    plan = Plan.data_parallel(graph, cluster, JOB, cluster.device_names)
    plan = msgspec.structs.replace(plan, stages=stages, microbatches=2, schedule="1f1b")
    with pytest.raises(PlanError, match=r"'table.weight' is used by stages 0 and 1, which split"):
        simulate(graph, cluster, JOB, plan)


def test_stages_of_one_rank_have_one_mesh():
    graph, job = case("gpt2")
    plan, cluster = _stages(2, "tensor")
    plan = _with_stage(plan, 1, devices=plan.stages[0].devices, mesh={"dp": 4}, sharding={})
    with pytest.raises(PlanError, match=r"stages 's0' and 's1' share their devices, but have the"):
        simulate(graph, cluster, job, plan)


def test_a_search_without_budget_says_so():
    graph, job = case("gpt2")
    space = PlacementSpace.build(Problem.build(graph, cluster_of(2), job))
    shardings = Shardings(space=space)
    shardings.run(Budget(evaluations=0))
    assert shardings.note == "the budget ended before anything was tried"


def test_a_graph_of_measured_seconds_cannot_be_sharded():
    graph = OpGraph.from_edges({"a": 1.0, "b": 1.0}, [("a", "b", 8)])
    with pytest.raises(GraphError, match="only captured models tell"):
        find_linkage(graph)


def test_axes_are_made_from_names():
    linkage = linkage_of(case("moe-stacked").graph)
    roles = find_roles(case("moe-stacked").graph, linkage)
    name = linkage.groups[roles.experts[0]].name
    axis = make_axis(linkage, "ep", 4, (f"weights of {name}", "batch"))
    assert axis.groups == (roles.experts[0], *roles.batch)
    assert axis.own == {roles.experts[0]}


def test_devices_must_divide_by_the_axes():
    graph, job = case("gpt2")
    cluster = star(3)
    with pytest.raises(PlanError, match="3 devices do not divide by a mesh of 2"):
        sharded_plan(graph, cluster, job, cluster.device_names, {"tp": ("tensor", 2)})
