"""Rows of torchtitan: what a rate means, what is refused, and how blocks run again."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from calibration.importers.source import Row
from calibration.published.described import Described, NotExpressible
from calibration.published.plans import Layout, plan_of
from calibration.published.prediction import known_cluster
from calibration.published.rates import TITAN_LENGTH, stated_by
from calibration.published.reading import describe_run
from calibration.published.rows import Run, read_runs
from calibration.published.torchtitan import UNITS, read_titan
from simcore.cluster import Cluster, Device, Link
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass, OpGraph
from simcore.job import Job
from simcore.models.inputs import next_tokens
from simcore.models.llama import Llama, LlamaShape, llama_3_8b
from simcore.pipeline_build import stage_of_units
from simcore.shards import one_device
from simcore.signature import Phase

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
SOURCE = "pytorch/torchtitan"
RUN = Run(
    id="e2e-1", source=SOURCE, part="all", task="train", model="Llama-3.1-8B", parameters=0.0,
    layers=0, hidden=0, heads=0, length=8192, gpu="H100 96GB HBM2e 500W", num_gpus=8, per_node=8,
    precision="bf16", global_batch=16, micro_batch=2, tp=1, pp=1, dp=8, vpp=0, cp=0, ep=0,
    sharding="FSDP 8", recompute="selective", schedule="", placement="", seconds=2.84,
    notes="FSDP; sequence length not stated in the table",
)  # fmt: skip
SMALL = LlamaShape(layers=4, width=32, heads=4, groups=2, inner=48, length=16, vocabulary=96)
PEAK = 989e12  # FLOP/s of an H100, that the source divides by


def changed(**changes: object) -> Run:
    return dataclasses.replace(RUN, **changes)


def test_a_rate_per_gpu_becomes_the_seconds_of_a_step() -> None:
    fields = {
        "source_repo": SOURCE, "model": "Llama-3.1-8B", "n_gpus": "8", "seq_len": "",
        "global_batch": "16", "micro_batch_per_gpu": "2", "value": "5762", "step_time_ms": "",
    }  # fmt: skip
    stated = stated_by(Row(fields))
    assert stated is not None
    assert stated.length == TITAN_LENGTH
    assert stated.seconds == pytest.approx(2 * 8192 / 5762)


@pytest.mark.parametrize(("rate", "share"), [(5762, 0.33), (6667, 0.39)])
def test_only_that_length_gives_the_share_of_peak_that_the_text_states(
    rate: float, share: float
) -> None:
    with torch.device("meta"):
        module = llama_3_8b(TITAN_LENGTH).module
    parameters = sum(p.numel() for p in module.parameters())
    assert parameters == 8_030_261_248
    inside = parameters - 128_256 * 4096  # embeddings multiply nothing

    def reached(length: int) -> float:
        return rate * (6 * inside + 12 * 32 * 32 * 128 * length) / PEAK

    assert reached(TITAN_LENGTH) == pytest.approx(share, abs=0.01)
    assert abs(reached(TITAN_LENGTH // 2) - share) > 0.02


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "float8 rowwise"}, "products in 8 bits"),
        ({"notes": "async TP"}, "products in pieces beside their collectives"),
        ({"pp": 8, "dp": 1}, "pipelines of FSDP's units"),
        ({"model": "Llama-3.1-405B"}, "no model family for this model"),
    ],
)
def test_what_is_not_priced_is_refused_with_a_reason(
    changes: dict[str, object], reason: str
) -> None:
    assert read_titan(changed(**changes)) == NotExpressible(reason)


def test_blocks_are_the_units_that_parameters_are_fetched_for() -> None:
    found = read_titan(RUN)
    assert isinstance(found, Described)
    assert (found.layout.blocks, found.layout.optimizer_sharding) == (UNITS, 3)
    assert found.layout.num_devices == RUN.num_gpus
    full = read_titan(changed(recompute="full"))
    assert isinstance(full, Described)
    assert (found.layout.recompute_every, full.layout.recompute_every) == (2, 1)


def cluster_of(count: int) -> Cluster:
    names = [f"gpu{number}" for number in range(count)]
    return Cluster(
        name="pairs",
        devices=tuple(Device.of_kind(name, "H100-SXM5-80GB", node="node0") for name in names),
        links=tuple(Link(a, b, "", 1e11, 1e-6) for a, b in itertools.combinations(names, 2)),
    )


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    with torch.device("meta"):
        module = Llama(SMALL)
    return capture(module, next_tokens(SMALL.length), Job(batch=4, optimizer="sgd"), name="llama")


def test_every_second_stage_runs_again(graph: OpGraph) -> None:
    layout = Layout(dp=2, blocks=4, recompute="full", recompute_every=2)
    plan = plan_of(graph, cluster_of(2), Job(batch=4), layout)
    assert [stage.recompute for stage in plan.stages] == ["full", "none", "full", "none"]


def test_tensor_parallel_devices_split_heads_features_words_and_positions(graph: OpGraph) -> None:
    job = Job(batch=4)
    layout = Layout(tp=2, dp=2, microbatch=2, optimizer_sharding=3, sequence=True)
    plan = plan_of(graph, cluster_of(4), job, layout)
    device = one_device(graph, plan, stage_of_units(plan, graph))
    products = np.isin(device.graph.op_class, (OpClass.MATMUL, OpClass.ATTENTION))
    mine = device.graph.at_batch(2).flops[products].sum()
    whole = graph.at_batch(2).flops[np.isin(graph.op_class, (OpClass.MATMUL, OpClass.ATTENTION))]
    assert mine == whole.sum() / 2
    names = [device.graph.op_names[op] for op in device.communication]
    forward = [name for name in names if "backward" not in name and name.startswith("layers.0")]
    assert (
        sum("reduce-scatter" in name for name in forward) == 2
    )  # after attention, and after the rest


def test_a_llama_has_a_gradient_for_every_parameter_and_its_products(graph: OpGraph) -> None:
    with torch.device("meta"):
        wanted = sum(p.numel() for p in Llama(SMALL).parameters())
    assert int(graph.elements[graph.op_class == OpClass.UPDATE].sum()) == wanted
    products = (graph.op_class == OpClass.MATMUL) & (graph.phase == Phase.F)
    weights = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 96
    assert float(graph.at_batch(1).flops[products].sum()) == 2 * 16 * weights
    attention = (graph.op_class == OpClass.ATTENTION) & (graph.phase == Phase.F)
    assert int(np.count_nonzero(attention)) == SMALL.layers


def test_rows_in_bf16_without_more_are_read() -> None:
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    runs = [run for run in read_runs(DATA / "e2e") if run.source == SOURCE]
    read = [run for run in runs if isinstance(describe_run(run), Described)]
    assert len(read) >= 2
    assert all(known_cluster(run) is not None for run in read)


def test_key_heads_have_to_divide_among_the_tensor_parallel_devices() -> None:
    refused = read_titan(changed(tp=7, dp=1, num_gpus=7))
    assert isinstance(refused, NotExpressible)
    assert "heads do not divide" in refused.reason


@pytest.mark.parametrize("field", ["num_gpus", "layers", "hidden"])
def test_numbers_beyond_any_model_are_refused_before_a_cluster_is_built(field: str) -> None:
    refused = describe_run(changed(**{field: 10**9}))
    assert isinstance(refused, NotExpressible)
    assert "than any model" in refused.reason
