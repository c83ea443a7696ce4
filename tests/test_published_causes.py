"""What frameworks do that kernels timed alone do not show: fused, hidden, blocking, in fp32."""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.published.assumptions import FITTED
from calibration.published.cause_host import Host, with_host
from calibration.published.cause_kernels import (
    BLOOM,
    MEGATRON,
    MEGATRON_3,
    TORCH,
    TRACED,
    Kernels,
    kernel_counts,
    unaligned_steps,
    with_kernels,
)
from calibration.published.cause_overlap import with_overlap
from calibration.published.clusters import cluster_of, machine_of
from calibration.published.described import Described, NotExpressible
from calibration.published.messages import with_sending
from calibration.published.models import graph_of
from calibration.published.plans import Layout, plan_of
from calibration.published.prediction import Prediction, Step, published_run
from calibration.published.reading import describe_run
from calibration.published.rows import Run, read_runs
from simcore.cost import CostTable, cost_table, kinds_of
from simcore.pipeline_build import stage_of_units
from simcore.profile_store import home_at
from simcore.shards import OneDevice, one_device, with_collectives
from simcore.signature import Phase

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
RUN = Run(
    id="e2e-1", source="VIA-Research/vTrain", part="multi", task="train", model="GPT",
    parameters=0.0, layers=4, hidden=1024, heads=4, length=128, gpu="A100", num_gpus=4, per_node=4,
    precision="", global_batch=8, micro_batch=4, tp=2, pp=2, dp=1, vpp=0, cp=0, ep=0, sharding="",
    recompute="", schedule="", placement="", seconds=0.1, notes="",
)  # fmt: skip
TUNING = dataclasses.replace(
    RUN, source="bigscience-workshop/bigscience", part="a100", gpu="A100-SXM4-80GB", pp=1, dp=2
)


@pytest.fixture(autouse=True, scope="module")
def _graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps captured graphs out of the user's folder."""
    with home_at(tmp_path_factory.mktemp("home")):
        yield


def seconds(run: Run, **more: Any) -> float:
    found = published_run(run, factors=FITTED._replace(**more))
    assert isinstance(found, Prediction)
    return found.seconds


def described(run: Run) -> Described:
    found = describe_run(run)
    assert isinstance(found, Described)
    return found


def step(run: Run, kernels: Kernels, floor: float = 0.0) -> Step:
    machine = machine_of(run)
    assert machine is not None
    return Step(cluster_of(run, machine), described(run)._replace(kernels=kernels), floor)


def one(layout: Layout, batch: int) -> tuple[CostTable, OneDevice, CostTable]:
    """Returns costs of the ops of one device, what it does, and costs with collectives."""
    run = dataclasses.replace(
        RUN, num_gpus=layout.num_devices, pp=1, global_batch=batch, micro_batch=batch
    )
    machine, said = machine_of(run), described(run)
    assert machine is not None
    cluster = cluster_of(run, machine)
    graph = graph_of(said.size, "fp16")
    plan = plan_of(graph, cluster, said.job, layout)
    device = one_device(graph, plan, stage_of_units(plan, graph))
    cost = cost_table(device.graph, said.job, kinds_of(cluster), (batch,))
    return cost, device, with_collectives(cost, device, plan, cluster, [batch])


def test_rows_of_two_bytes_are_slow_and_those_of_four_no_slower_than_those_of_eight() -> None:
    sizes = (0, 100_512, 100_520, 100_500, 100_514)
    assert [unaligned_steps(size) for size in sizes] == [0, 0, 1, 1, 3]


def test_a_vocabulary_of_odd_length_makes_the_head_slower() -> None:
    alone = dataclasses.replace(RUN, part="single", tp=1, pp=1, num_gpus=1, micro_batch=8)
    fast = seconds(alone, unaligned=1.0, floor=0.0)
    assert seconds(alone, unaligned=2.0, floor=0.0) > 1.2 * fast
    two = dataclasses.replace(alone, tp=2, num_gpus=2)  # 25,128 words each
    assert seconds(two, unaligned=2.0) == seconds(two, unaligned=1.0)


def test_a_traced_host_launches_no_collectives() -> None:
    cost, device, alone = one(Layout(tp=2), 4)
    counts = kernel_counts(device.graph, TRACED, 4)
    host = Host(1e-2, runs_ahead=True)
    runs, traces = (
        with_host(cost, device, each, counts, alone.seconds).seconds.sum()
        for each in (host, host._replace(traces=True))
    )
    calls = [op for op in device.communication if device.graph.phase[op] != Phase.U]
    hidden = alone.seconds[calls].sum()
    assert runs - traces == pytest.approx(1e-2 * len(calls) - hidden, rel=1e-6)


def test_traced_work_waits_between_kernels() -> None:
    run = dataclasses.replace(RUN, part="single")
    assert seconds(run, floor=0.0, gap=1e-5) > seconds(run, floor=0.0, gap=0.0)
    assert seconds(RUN, floor=0.0, gap=1.0) == seconds(RUN, floor=0.0)


def test_a_traced_step_adds_no_gradients_and_updates_without_an_fp32_copy() -> None:
    run = dataclasses.replace(RUN, part="single")
    assert described(run).kernels == TRACED
    assert not step(run, TRACED).pipeline().tables[0].accumulate.any()
    cost, device, _ = one(Layout(tp=2), 4)
    slow, fast = (
        with_kernels(cost, device.graph, kernels, row_bytes=0, unaligned=1.0)
        for kernels in (TORCH, TRACED)
    )
    updates = device.graph.phase == Phase.U
    ratio = fast.seconds[updates].sum() / slow.seconds[updates].sum()
    assert ratio == pytest.approx(22 / 28)


def test_a_message_that_takes_its_sender_is_not_on_its_way_as_well() -> None:
    tables = step(RUN, TORCH).pipeline().tables
    sent = with_sending(tables, 1e9)
    for before, after in zip(tables, sent, strict=True):
        assert not after.forward_bytes.any()
        assert not after.backward_bytes.any()
        more = (after.seconds - before.seconds)[:, :, 0]
        assert (more >= 0).all()
    assert (sent[0].seconds - tables[0].seconds)[0, Phase.F, 0] == pytest.approx(
        tables[0].forward_bytes.sum() / 1e9
    )
    assert (sent[1].seconds - tables[1].seconds)[1, Phase.B, 0] == pytest.approx(
        tables[1].backward_bytes.sum() / 1e9
    )


def test_copies_add_to_rows_of_one_node_what_the_table_of_the_source_says() -> None:
    if not (DATA / "e2e").exists():
        pytest.skip(f"no published runs in {DATA}")
    times: dict[tuple[int, ...], float] = {}
    for run in read_runs(DATA / "e2e"):
        if run.source == RUN.source and run.part == "single" and run.pp == 1 and run.tp > 1:
            samples = run.global_batch // run.dp
            times[(run.hidden, run.layers, run.tp, run.micro_batch, samples, run.dp)] = run.seconds
    checked = 0
    for (*model, copies), took in times.items():
        size = round(gradient_bytes(*model[:3]) / 2**20)
        if copies > 1 and size <= 1024:  # the table goes to 1 GiB
            more = took - times[(*model, 1)]
            assert more == pytest.approx(table(copies)[size], abs=1e-9)
            checked += 1
    assert checked > 100


def gradient_bytes(hidden: int, layers: int, tp: int) -> int:
    """Returns the bytes of gradients of one device in the source's model: two vocabularies."""
    split = 12 * hidden**2 + 7 * hidden  # products and their split biases
    ends = 2 * (50_257 // tp) * hidden + 1024 * hidden
    return 2 * (ends + layers * (split // tp + 6 * hidden))


def table(copies: int) -> dict[int, float]:
    """Returns MiB -> seconds of an all-reduce in place."""
    with (DATA / "vtrain" / f"allreduce_a100_{copies}gpu.csv").open() as lines:
        found = list(csv.DictReader(lines))
    return {int(row["size_bytes"]) // 2**20: int(row["in_place_ns"]) / 1e9 for row in found}


def test_fused_kernels_are_faster_and_split_messages() -> None:
    assert described(RUN).kernels == MEGATRON
    fused, plain = step(RUN, MEGATRON), step(RUN, TORCH)
    assert fused.seconds() < plain.seconds()
    sent = [each.pipeline().tables[0].forward_bytes.sum() for each in (fused, plain)]
    assert sent[0] * RUN.tp == sent[1]


def test_a_host_that_runs_ahead_is_hidden_by_a_busy_device_only() -> None:
    assert seconds(RUN, floor=1e-6) == seconds(RUN, floor=0.0)
    assert seconds(RUN, floor=1e-3) > 2 * seconds(RUN, floor=0.0)


def test_a_host_that_blocks_is_never_hidden() -> None:
    blocking = MEGATRON._replace(runs_ahead=False, blocks=True)
    free, some, more = (step(RUN, blocking, floor).seconds() for floor in (0.0, 1e-4, 2e-4))
    assert some > 1.1 * free
    assert more - some == pytest.approx(some - free, rel=0.05)


def test_softmax_is_several_kernels_unless_samples_times_heads_are_a_multiple_of_four() -> None:
    cost, device, alone = one(Layout(tp=2), 1)
    counts = {n: kernel_counts(device.graph, MEGATRON, n) for n in (2, 4)}
    assert (counts[4] == 1).all()
    several = [name for name, n in zip(device.graph.op_names, counts[2], strict=True) if n > 1]
    assert len(several) == 2 * RUN.layers
    assert all("softmax" in name for name in several)
    slow, fast = (
        with_kernels(cost, device.graph, MEGATRON, row_bytes=0, unaligned=1.0, attentions=n)
        for n in (2, 4)
    )
    assert slow.seconds.sum() > fast.seconds.sum()
    host = Host(1e-4, runs_ahead=True)
    hosted = [with_host(cost, device, host, counts[n], alone.seconds).seconds.sum() for n in (2, 4)]
    assert hosted[0] - hosted[1] == pytest.approx(2 * 4 * RUN.layers * 1e-4, rel=0.01)


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_beside_products_take_no_time_of_their_own(sequence: bool) -> None:
    cost, device, alone = one(Layout(tp=2, sequence=sequence), 4)
    hidden = with_overlap(cost, device, alone.seconds)
    saved = (cost.seconds - hidden.seconds)[:, 0, 0]
    names = np.array(device.graph.op_names)
    assert (saved >= 0).all()
    assert all(".addmm.backward.mm" in name for name in names[saved > 0])
    calls = [op for op in device.communication if ".backward" in names[op] or ".1" in names[op]]
    assert 0 < saved.sum() < alone.seconds[calls].sum()
    assert (hidden.seconds >= 0).all()


def test_megatron_of_2022_hides_collectives_and_adds_gradients_inside_products() -> None:
    run = dataclasses.replace(
        RUN, source="calculon-ai/calculon", part="all", gpu="A100-SXM4-80GB", vpp=1,
        recompute="selective attention + sequence parallel",
    )  # fmt: skip
    assert described(run).kernels == MEGATRON_3
    later, before = step(run, MEGATRON_3), step(run, MEGATRON)
    assert later.seconds() < before.seconds()
    assert not later.pipeline().tables[0].accumulate.any()


def test_gradients_in_fp32_are_four_times_the_bytes_of_a_reduce_scatter_in_bf16() -> None:
    assert described(TUNING).kernels == BLOOM
    assert described(TUNING).job.precision == "bf16"
    wide, narrow = step(TUNING, BLOOM).pipeline(), step(TUNING, MEGATRON).pipeline()
    (many,), (few,) = ([sum(part.num_bytes for part in stage) for stage in each.parts]
                       for each in (wide, narrow))  # fmt: skip
    assert many == 4 * few > 0
    assert (wide.tables[0].accumulate > narrow.tables[0].accumulate).all()


def test_a_row_that_its_source_doubts_is_not_predicted() -> None:
    found = describe_run(dataclasses.replace(TUNING, notes="WARNING: TFLOPs column inconsistent"))
    assert found == NotExpressible("the source says that its figures contradict each other")
