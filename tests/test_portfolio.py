"""The portfolio: its promises about the plan, the baselines beside it and the bound below it."""

import msgspec
import numpy as np
import pytest
import torch

from agents import portfolio
from agents.portfolio import PortfolioResult, Progress
from simcore import Cluster, GraphBuilder, Job, OpGraph, Plan, Settings, simulate
from simcore.cluster import Device, Link
from simcore.errors import InfeasibleError, PlanError, UsageError
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass, Out, Phase, Role
from simcore.plan_summary import plan_record
from simcore.units import GiB
from tests.test_planners import CPU, GPU, OTHER, chain, mesh, random_graph

SGD = Job(optimizer="sgd")


def find(
    graph: OpGraph, cluster: Cluster, job: Job = SGD, *, evaluations: int = 600, **options: object
) -> PortfolioResult:
    return portfolio.plan(graph, cluster, job, evaluations=evaluations, **options)  # type: ignore[arg-type]


def step(
    layers: int = 2,
    *,
    batch: int | None = 4,
    gradient: int = 3_000_000,
    measured_on: str | None = None,
) -> OpGraph:
    """A measured training step: 1 ms forward, 2 ms backward and no time to update, per layer."""
    builder = GraphBuilder("step", batch=batch)
    size = gradient
    parameters = [builder.parameter(f"w{k}", size) for k in range(layers)]
    data: tuple[int, ...] = ()
    ops, grads = [], []
    for k in range(layers):
        ops.append(
            builder.op(
                f"f{k}", inputs=[*data, parameters[k]], outputs=[Out(1000)], kernels=0, seconds=1e-3
            )
        )
        data = builder.outputs(ops[-1])
    for k in reversed(range(layers)):
        back = builder.op(
            f"b{k}",
            phase=Phase.B,
            inputs=[*data, parameters[k]],
            outputs=[Out(1000), Out(size, role=Role.GRADIENT)],
            unit_of=ops[k],
            kernels=0,
            seconds=2e-3,
        )
        data, grads = builder.outputs(back)[:1], [builder.outputs(back)[1], *grads]
    for k in range(layers):
        builder.op(
            f"u{k}",
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            inputs=[parameters[k], grads[k]],
            outputs=[Out(size, storage_of=parameters[k], role=Role.PARAMETER)],
            unit_of=ops[k],
            kernels=0,
            seconds=0.0,
            elements=size // 4,
        )
    return builder.build(measured_on=measured_on)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [Settings(), Settings(order="ready", contention="none")])
def test_the_plan_is_never_worse_than_a_baseline_and_never_beats_the_bound(
    seed: int, settings: Settings
) -> None:
    graph = random_graph(np.random.default_rng(seed), 40)
    cluster = mesh(*[GPU] * 3)
    found = find(graph, cluster, settings=settings, seed=seed)
    times = [time for time in found.baselines.values() if time is not None]
    assert found.result.step_time <= min(times)
    assert found.lower_bound <= found.result.step_time
    again = simulate(graph, cluster, SGD, found.plan)
    assert again.step_time == found.result.step_time
    assert found.plan.predicted is not None
    assert found.plan.predicted.step_time_s == again.step_time
    assert found.plan.validate(graph, cluster, SGD) == []


def test_the_same_seed_and_evaluations_give_the_same_file(tmp_path: pytest.TempPathFactory) -> None:
    graph, cluster = random_graph(np.random.default_rng(4), 30), mesh(*[GPU] * 3)

    def content(seed: int) -> bytes:
        plan = find(graph, cluster, seed=seed).plan
        assert plan.provenance is not None
        provenance = msgspec.structs.replace(plan.provenance, seconds=0.0)
        return msgspec.json.encode(msgspec.structs.replace(plan, provenance=provenance))

    assert content(1) == content(1)
    assert content(1) != content(2)


def test_one_gpu_wins_a_chain_with_costly_cuts() -> None:
    found = find(step(6), mesh(GPU, GPU, latency=1e-3))
    assert found.plan.provenance is not None
    assert found.plan.provenance.strategy == "single_device"
    assert found.plan.stages[0].devices == ("d0",)
    assert found.lower_bound == pytest.approx(found.result.step_time)
    record = plan_record(
        step(6), mesh(GPU, GPU, latency=1e-3), SGD, found.plan, found.result, found.lower_bound
    )
    assert record["explanation"].startswith("One GPU is best")
    assert record["gap"] == pytest.approx(0.0, abs=1e-9)


def test_a_search_ends_when_nothing_can_be_better() -> None:
    found = find(step(6), mesh(GPU, GPU, latency=1e-3), evaluations=10**9)
    assert found.recorder.evaluations < 200


def test_only_a_split_fits_and_it_says_that_it_is_no_faster() -> None:
    graph, cluster = chain([2.0] * 6), mesh(GPU, GPU, latency=1e-4)
    found = find(graph, cluster)
    assert found.feasible
    assert found.baselines["single_device"] is None
    assert found.notes["single_device"].startswith("needs 25.")
    record = plan_record(graph, cluster, SGD, found.plan, found.result, found.lower_bound)
    assert "no faster than one GPU; use it only to fit" in record["explanation"]


# data parallel


def test_data_parallel_is_the_slowest_copy_and_what_is_left_of_the_sums() -> None:
    graph, cluster = step(2), mesh(GPU, GPU, bandwidth=1e9, latency=1e-5)
    job = Job(batch=4, optimizer="sgd", assume_linear=True)
    found = find(graph, cluster, job)
    first_gradient = 1e-3 + 1e-3  # half the batch: two forwards, the backward of the last layer
    one_bucket = 2 * 1 * (3_000_000 / 2 / 1e9 + 1e-5)  # a layer's gradient fills a bucket
    expected = first_gradient + 2 * one_bucket
    assert found.baselines["data_parallel"] == pytest.approx(expected, rel=1e-12)
    assert found.baselines["single_device"] == pytest.approx(6e-3)


def test_data_parallel_wins_where_gradients_are_small() -> None:
    graph, cluster = step(2, gradient=400), mesh(*[GPU] * 4)
    job = Job(batch=4, optimizer="sgd", assume_linear=True)
    found = find(graph, cluster, job)
    assert found.plan.provenance is not None
    assert found.plan.provenance.strategy == "data_parallel"
    assert found.plan.stages[0].mesh == {"dp": 4}
    assert found.plan.settings.host == "per_rank"
    assert found.lower_bound == pytest.approx(found.result.step_time, rel=1e-3)
    placed = find(graph, cluster, job, strategy="placement")
    assert placed.plan.stages[0].placement is not None
    assert placed.baselines["data_parallel"] == found.result.step_time
    assert placed.lower_bound > found.lower_bound


def test_a_batch_that_does_not_divide_uses_fewer_gpus_and_says_so() -> None:
    job = Job(batch=6, optimizer="sgd", assume_linear=True)
    found = find(step(2, batch=6, gradient=400), mesh(*[GPU] * 4), job)
    assert found.plan.stages[0].mesh == {"dp": 3}
    assert found.notes["data_parallel"] == "a batch of 6 does not divide by 4 GPUs: 3 are used"
    prime = Job(batch=7, optimizer="sgd", assume_linear=True)
    found = find(step(2, batch=7), mesh(*[GPU] * 4), prime)
    assert found.baselines["data_parallel"] is None
    assert found.notes["data_parallel"] == "a batch of 7 does not divide by 2 to 4 GPUs"


def test_fewer_gpus_are_used_where_that_is_faster() -> None:
    """Two fast and two slow GPUs: copies on the slow ones hold the fast ones up."""
    job = Job(batch=4, optimizer="sgd", assume_linear=True)
    fast = "A100-PCIE-40GB"
    graph = step(2, gradient=400, measured_on=fast)
    found = find(graph, mesh(fast, fast, OTHER, OTHER), job)
    assert found.plan.stages[0].devices == ("d0", "d1")
    assert "; 2 GPUs: 3" in "; " + found.notes["data_parallel"]
    times = found.baselines["data_parallel"]
    assert times is not None
    assert times > found.result.step_time


@pytest.mark.parametrize(
    ("graph", "job", "options", "reason"),
    [
        (step(2), Job(batch=4), {}, "measured at one batch"),
        (step(2, batch=None), Job(assume_linear=True), {}, "batch is unknown"),
        (
            step(2),
            Job(batch=4, assume_linear=True),
            {"pins": {"f0": "d0"}},
            "nothing can be pinned",
        ),
        (step(2), Job(batch=4, assume_linear=True), {"exclude": ["d1"]}, "needs two GPUs"),
    ],
)
def test_where_data_parallel_is_not_possible_the_reason_is_given(
    graph: OpGraph, job: Job, options: dict[str, object], reason: str
) -> None:
    found = find(graph, mesh(GPU, GPU), job, **options)
    assert found.baselines["data_parallel"] is None
    assert reason in found.notes["data_parallel"]


def test_gradients_are_summed_at_once_where_many_sums_would_take_longer() -> None:
    """Each sum waits 2 ms; the backward of a layer takes 1 ms."""
    graph, job = step(6, gradient=2**25), Job(batch=4, optimizer="sgd", assume_linear=True)
    found = find(graph, mesh(GPU, GPU, bandwidth=1e11, latency=1e-3), job)
    once = 6 * 1.5e-3 + 2e-3 + 6 * 2**25 / 1e11
    assert found.result.step_time == pytest.approx(once, rel=1e-9)
    assert found.plan.buckets.num_bytes == 0
    assert found.result.step_time >= found.lower_bound


def test_gradients_are_views_of_their_buckets_where_it_would_not_fit_otherwise() -> None:
    graph, job = step(2, gradient=3 * GiB), Job(batch=4, optimizer="sgd", assume_linear=True)
    found = find(graph, mesh(GPU, GPU, bandwidth=1e14), job)  # 6 GiB of parameters and gradients
    assert found.plan.stages[0].mesh == {"dp": 2}
    assert found.plan.buckets.as_views
    record = plan_record(
        graph, mesh(GPU, GPU, bandwidth=1e14), job, found.plan, found.result, found.lower_bound
    )
    assert "gradient_as_bucket_view=True" in record["explanation"]


def test_copies_that_do_not_fit_are_null_with_the_bytes() -> None:
    graph, job = step(2, gradient=5 * GiB), Job(batch=4, optimizer="sgd", assume_linear=True)
    found = find(graph, mesh(GPU, GPU), job)
    assert found.baselines["data_parallel"] is None
    least = "needs 21.59 GiB on d0, which has 16.00 GiB"  # gradients as views of their buckets
    assert found.notes["data_parallel"] == least
    assert found.feasible  # as a placement


# demands


def test_pins_and_exclusions_hold_and_are_in_the_plan() -> None:
    graph = chain([0.1] * 6)
    found = find(graph, mesh(*[GPU] * 3), pins={"net.2": "d2", "layer0": "d1"}, exclude=["d0"])
    placement = found.plan.stages[0].placement
    assert placement is not None
    assert (placement["layer4"], placement["layer5"], placement["layer0"]) == ("d2", "d2", "d1")
    assert "d0" not in placement.values()
    assert found.plan.constraints.pins == {"net.2": "d2", "layer0": "d1"}
    assert found.plan.constraints.exclude == ("d0",)
    assert found.notes["single_device"] == "the pins keep the model from being on one GPU alone"


def test_reserved_memory_is_left_free() -> None:
    graph, cluster = chain([2.0] * 3), mesh(GPU, GPU)  # 12.7 GiB on one
    assert len(find(graph, cluster).plan.stages[0].devices) == 1
    tight = find(graph, cluster, reserve_memory=6 * GiB)
    assert len(tight.plan.stages[0].devices) == 2
    assert {use.capacity for use in tight.result.devices} == {10 * GiB}
    assert tight.plan.constraints.reserve_memory_bytes == 6 * GiB
    assert simulate(graph, cluster, SGD, tight.plan).feasible


def test_demands_are_checked_before_the_search() -> None:
    with pytest.raises(UsageError, match="no module or op"):
        find(step(2), mesh(GPU, GPU), pins={"nothing": "d0"})


def test_a_pin_to_a_device_that_cannot_run_the_op_is_refused() -> None:
    with pytest.raises(PlanError, match="'f0' can run on d0 only"):
        find(step(2), mesh(GPU, CPU), pins={"f0": "d1"})


# nothing fits


def test_nothing_fits_names_the_device_and_the_bytes() -> None:
    graph, cluster = chain([9.0] * 3), mesh(GPU, GPU)
    found = find(graph, cluster)
    assert not found.feasible
    assert found.reason is not None
    worst = max(found.result.devices, key=lambda use: use.reserved - use.capacity)
    assert worst.name in found.reason
    assert f"({worst.reserved - worst.capacity} bytes) too much" in found.reason
    assert "alone take" not in found.reason  # 27 GiB of parameters would fit in 32
    assert set(found.baselines.values()) == {None}


def test_parameters_beyond_all_memory_are_said_to_be() -> None:
    found = find(chain([9.0] * 4), mesh(GPU, GPU))
    assert found.reason is not None
    assert found.reason.endswith(
        "parameters and optimizer state alone take 36.00 GiB, and all devices together have "
        "32.00 GiB"
    )


def test_the_cpu_is_tried_before_nothing_fits_whatever_the_budget() -> None:
    graph = capture(torch.nn.Linear(4096, 4096), torch.zeros(4, 4096), name="wide")
    devices = (Device("gpu", GPU, "n", 500 * 2**20), Device("cpu", CPU, "n", 64 * GiB))
    cluster = Cluster(name="small", devices=devices, links=(Link("gpu", "cpu", "", 1e9, 0.0),))
    found = find(graph, cluster, Job(batch=4), evaluations=1)
    assert found.feasible
    assert found.plan.stages[0].devices == ("cpu",)


def test_no_legal_placement_is_an_error() -> None:
    apart = Cluster(name="apart", devices=(Device("a", GPU, "n", GiB), Device("b", GPU, "n", GiB)))
    with pytest.raises(InfeasibleError, match="no route"):
        find(step(2), apart, pins={"f0": "a", "f1": "b"})


def test_devices_that_are_apart_are_used_one_at_a_time() -> None:
    devices = tuple(Device(name, GPU, "n", 16 * GiB) for name in "abc")
    islands = Cluster(name="islands", devices=devices, links=(Link("b", "c", "", 1e9, 0.0),))
    assert find(step(2), islands).feasible


# interruption and progress


@pytest.mark.parametrize("stage", ["round_robin", "chain_split", "heft", "anneal"])
def test_an_interruption_keeps_the_best_so_far(stage: str) -> None:
    graph, cluster = random_graph(np.random.default_rng(0), 40), mesh(*[GPU] * 3)

    def press(progress: Progress) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    found = find(graph, cluster, progress=press)
    assert found.interrupted
    assert found.feasible
    assert found.recorder.best is not None
    assert found.result.step_time == found.recorder.best.step_time
    assert found.notes.get("m_etf", "not run: interrupted") == "not run: interrupted"


def test_an_interruption_before_anything_is_found_is_passed_on() -> None:
    def press(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(step(2), mesh(GPU, GPU), progress=press)


def test_progress_names_the_stages_and_only_improves() -> None:
    seen: list[Progress] = []
    graph = random_graph(np.random.default_rng(0), 40)
    found = find(graph, mesh(*[GPU] * 3), progress=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages[:3] == ["compile", "single_device", "data_parallel"]
    assert stages[-2:] == ["anneal", "tidy"]
    best = [progress.best for progress in seen if progress.best is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == found.result.step_time
    assert [progress.spent for progress in seen] == sorted(progress.spent for progress in seen)


def test_a_budget_in_seconds_is_kept() -> None:
    graph = random_graph(np.random.default_rng(0), 60)
    found = portfolio.plan(graph, mesh(*[GPU] * 3), SGD, budget_seconds=0.5)
    assert found.plan.provenance is not None
    assert found.plan.provenance.seconds < 2.0
    assert found.plan.provenance.budget_s == 0.5


def test_with_no_budget_the_baselines_still_run() -> None:
    graph = random_graph(np.random.default_rng(0), 60)
    found = portfolio.plan(graph, mesh(*[GPU] * 3), SGD, budget_seconds=0.0)
    assert found.baselines["round_robin"] is not None
    assert found.baselines["heft"] is None
    assert found.notes["heft"] == "not run: the budget is spent"


def test_a_plan_round_trips_through_its_file(tmp_path: pytest.TempPathFactory) -> None:
    graph, cluster = random_graph(np.random.default_rng(0), 20), mesh(GPU, GPU)
    plan = find(graph, cluster).plan
    plan.save(f"{tmp_path}/plan.json")
    assert Plan.load(f"{tmp_path}/plan.json") == plan


def test_copies_of_the_model_are_no_runner_up_to_themselves() -> None:
    """So few evaluations are left to ways to shard that samples only are tried."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Flatten(1))
    graph = capture(net, torch.zeros(64, 3, 64, 64), name="convolution")
    found = find(graph, Cluster.preset("4xV100-NVLink"), Job(batch=64), evaluations=48)
    assert found.plan.provenance is not None
    assert found.plan.provenance.strategy == "data_parallel"
    assert found.notes["sharding"] == "dp 4"
    assert found.why is not None
    assert found.why.runner_up is not None
    assert found.why.runner_up.strategy != "sharding"
    assert "1 device computes" in found.why.words()


def test_nothing_is_said_of_one_gpu_where_the_plan_does_not_say() -> None:
    graph, cluster = chain([1.0] * 3), mesh(GPU, GPU)
    plan = Plan.from_placement(graph, cluster, SGD, [0, 0, 1])
    result = simulate(graph, cluster, SGD, plan)
    record = plan_record(graph, cluster, SGD, plan, result, 0.0)
    assert "One GPU alone" not in record["explanation"]
    assert "if it had the memory" not in record["explanation"]
    assert record["baseline_notes"]["single_device"] == "not known: the plan file does not say"
