"""Rows of NVIDIA's DeepLearningExamples: rates become steps; models, machines and plans."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from calibration.importers.source import Row
from calibration.published.clusters import machine_of
from calibration.published.deep_learning_examples import read_examples
from calibration.published.described import Described, NotExpressible
from calibration.published.models import FamilySize, graph_of
from calibration.published.plans import plan_of
from calibration.published.prediction import known_cluster, published_run
from calibration.published.rates import Stated, stated_by
from calibration.published.reading import describe_run
from calibration.published.rows import Run, read_runs
from simcore.cluster import Cluster
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass
from simcore.job import Job
from simcore.models.bert_products import pre_training, tagger
from simcore.models.inputs import on_meta
from simcore.signature import Phase

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
SOURCE = "NVIDIA/DeepLearningExamples"
TORCH_BERT = "PyTorch/LanguageModeling/BERT"
TF_BERT = "TensorFlow/LanguageModeling/BERT"
RESNET = "TensorFlow/Classification/ConvNets/resnet50v1.5"
TINY = "TensorFlow/Segmentation/UNet_Industrial"
RUN = Run(
    id="e2e-1", source=SOURCE, part="bert-pytorch", task="train", model=TORCH_BERT,
    parameters=0.0, layers=0, hidden=0, heads=0, length=128, gpu="A100-80GB", num_gpus=8,
    per_node=8, precision="mixed", global_batch=4096, micro_batch=256, tp=1, pp=1, dp=8, vpp=0,
    cp=0, ep=0, sharding="", recompute="", schedule="", placement="", seconds=1.0,
    notes="Pre-training NVIDIA DGX A100",
)  # fmt: skip
LEAST = {  # part -> least share of rows that are predicted
    "bert-pytorch": 0.58,  # all but the second phase, in bins
    "bert-tensorflow": 1.0,
    "biobert": 1.0,
    "transformer": 1.0,
    "convnets": 1.0,
    "unets": 1.0,
}


def row(**changes: str) -> Row:
    fields = {
        "source_repo": SOURCE, "model": TORCH_BERT, "gpu": "A100-80GB", "n_gpus": "8",
        "seq_len": "128", "micro_batch_per_gpu": "256", "grad_accum": "32", "value": "4591.0",
        "step_time_ms": "", "notes": "Pre-training NVIDIA DGX A100 (8x A100 80GB)",
    }  # fmt: skip
    return Row(fields | changes)


def described(**changes: object) -> Described:
    found = read_examples(changed(**changes))
    assert isinstance(found, Described)
    return found


def changed(**changes: object) -> Run:
    return dataclasses.replace(RUN, **changes)


def cluster_of(run: Run) -> Cluster:
    cluster = known_cluster(run)
    assert cluster is not None
    return cluster


def test_a_step_of_pre_training_takes_all_its_microbatches() -> None:
    assert stated_by(row()) == Stated(65_536, 256, 128, 65_536 / 4591)


def test_the_table_for_v100_gives_the_batch_of_a_whole_step() -> None:
    stated = stated_by(row(gpu="V100-32GB", micro_batch_per_gpu="4096", grad_accum="64"))
    assert stated is not None
    assert (stated.micro_batch, stated.global_batch) == (64, 4096 * 8)


@pytest.mark.parametrize(
    ("length", "micro", "gpus", "batch"),
    [("128", "64", "8", 65_536), ("512", "8", "8", 32_768), ("128", "128", "1024", 131_072)],
)
def test_biobert_accumulates_up_to_the_batch_of_its_script(
    length: str, micro: str, gpus: str, batch: int
) -> None:
    stated = stated_by(
        row(model=f"{TF_BERT}/biobert", seq_len=length, micro_batch_per_gpu=micro, n_gpus=gpus)
    )
    assert stated is not None
    assert stated.global_batch == batch


def test_fine_tuning_takes_one_batch_of_questions_a_step() -> None:
    stated = stated_by(row(notes="Fine-tuning", seq_len="12", micro_batch_per_gpu="32"))
    assert stated == Stated(256, 32, 384, 256 / 4591)


@pytest.mark.parametrize(("precision", "tokens"), [("mixed", 5120), ("fp32", 2560)])
def test_a_batch_in_tokens_is_one_of_full_sentences(precision: str, tokens: int) -> None:
    stated = stated_by(
        row(
            model="PyTorch/Translation/Transformer", precision=precision, micro_batch_per_gpu="",
            value="32942", n_gpus="4", notes='DGX-1 (8x V100 16GB); batch cell "5120/2560"',
        )
    )  # fmt: skip
    assert stated == Stated(tokens // 8, tokens // 32, 32, 4 * tokens / 32942)


def test_rows_that_say_their_step_themselves_are_left_as_they_are() -> None:
    assert stated_by(row(model=RESNET, step_time_ms="107.8")) is None
    assert stated_by(row(micro_batch_per_gpu="")) is None


@pytest.mark.parametrize(
    ("precision", "dtype", "products"),
    [("fp32", "fp32", "as measured"), ("tf32", "fp32", "tf32"), ("mixed", "fp16", "sustained")],
)
def test_precision_decides_the_graph_and_its_products(
    precision: str, dtype: str, products: str
) -> None:
    found = described(precision=precision)
    assert (found.job.precision, found.products) == (dtype, products)
    assert found.job.loss_scaling == (precision == "mixed")


def test_gradients_of_one_batch_are_summed_beside_the_backward_those_of_several_after_it() -> None:
    assert not described().layout.overlap
    assert described(global_batch=256 * 8).layout.overlap


def test_only_workers_with_uneven_sentences_wait_for_each_other() -> None:
    assert described().waiting == 1.0
    two = described(model="PyTorch/Translation/Transformer", num_gpus=2, length=32)
    assert two.waiting == pytest.approx(1 + 0.13 * np.pi**-0.5, abs=1e-4)


def test_images_are_fused_by_xla_and_torch_fuses_nothing() -> None:
    assert described(model=RESNET).kernels.compiled
    assert not described().kernels.compiled


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"length": 512}, "sequences in bins, their mean length not stated"),
        ({"model": "PyTorch/Forecasting/TFT"}, "no model family for this model"),
        ({"micro_batch": 0}, "batch of a GPU or precision not stated"),
        ({"precision": "int8"}, "batch of a GPU or precision not stated"),
    ],
)
def test_what_is_not_stated_is_refused_with_a_reason(
    changes: dict[str, object], reason: str
) -> None:
    assert read_examples(changed(**changes)) == NotExpressible(reason)


@pytest.mark.parametrize(
    ("factory", "size", "parameters"),
    [
        ("bert_products:bert_large_words", 128, 336_226_108),
        ("bert_products:bert_large_answers", 384, 334_094_338),
        ("resnext:resnext_101", 224, 44_177_704),
        ("resnext:se_resnext_101", 224, 48_955_416),
        ("unet_segment:unet_tiny", 512, 1_850_305),
        ("unet_segment:unet_volume", 128, 31_196_196),
    ],
)
def test_a_model_has_as_many_parameters_as_its_layers_add_up_to(
    factory: str, size: int, parameters: int
) -> None:
    module = FamilySize(factory=factory, length=size).build().module
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize(
    ("factory", "size"),
    [
        ("unet_segment:unet_tiny", 32),
        ("unet_segment:unet_volume", 64),
    ],
)
def test_a_model_is_captured_with_a_gradient_for_every_parameter(factory: str, size: int) -> None:
    built = FamilySize(factory=factory, length=size).build()
    graph = capture(built.module, built.inputs, Job(batch=4, optimizer="sgd"), name=factory)
    wanted = sum(parameter.numel() for parameter in built.module.parameters())
    assert int(graph.elements[graph.op_class == OpClass.UPDATE].sum()) == wanted


def test_only_masked_words_reach_the_vocabulary() -> None:
    built = on_meta(lambda length: pre_training(length, layers=2, width=64, heads=4), 40)
    graph = capture(built.module, built.inputs, Job(batch=4), name="bert")
    products = np.isin(graph.op_class, (OpClass.MATMUL, OpClass.BATCHED_MATMUL))
    forward = float(graph.at_batch(1).flops[products & (graph.phase == Phase.F)].sum())
    blocks = 2 * (12 * 64**2 * 40 + 2 * 40**2 * 64)  # products of weights, then of attention
    masked = 6 * (64**2 + 64 * 30_522)  # 15 % of 40 words
    first = 64**2 + 2 * 64  # pooler, and the order of two sentences
    assert forward == 2 * (blocks + masked + first)


def test_a_tagger_has_a_gradient_for_every_parameter() -> None:
    built = on_meta(lambda length: tagger(length, layers=2, width=64, heads=4, classes=3), 16)
    graph = capture(built.module, built.inputs, Job(batch=4, optimizer="sgd"), name="bert")
    wanted = sum(parameter.numel() for parameter in built.module.parameters())
    assert int(graph.elements[graph.op_class == OpClass.UPDATE].sum()) == wanted


def test_a_row_becomes_graph_cluster_plan_and_seconds() -> None:
    run = changed(
        model=TINY, part="unets", gpu="A100-40GB", num_gpus=4, per_node=4, dp=4, global_batch=16,
        micro_batch=4, length=0, notes="",
    )  # fmt: skip
    found = describe_run(run)
    assert isinstance(found, Described)
    cluster = cluster_of(run)
    graph = graph_of(found.size, found.job.precision)
    plan = plan_of(graph, cluster, found.job, found.layout)
    assert len(plan.stages[0].devices) == 4
    said = published_run(run)
    assert not isinstance(said, NotExpressible)
    assert 0.001 < said.seconds < 0.1


def test_the_parts_that_are_read_are_covered() -> None:
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    found: dict[str, list[bool]] = {}
    for run in read_runs(DATA / "e2e"):
        if run.source == SOURCE:
            said = isinstance(describe_run(run), Described) and machine_of(run) is not None
            found.setdefault(run.part, []).append(said)
    shares = {part: sum(found[part]) / len(found[part]) for part in LEAST}
    assert {part: share for part, share in shares.items() if share < LEAST[part]} == {}


@pytest.mark.parametrize("field", ["value", "n_gpus"])
def test_a_rate_or_a_number_of_gpus_of_nothing_gives_no_step(field: str) -> None:
    stated = stated_by(row(**{field: "0"}))
    assert stated is None or stated.seconds == 0.0


def test_a_step_of_no_microbatches_is_not_stated() -> None:
    assert stated_by(row(grad_accum="0")) is None
    assert stated_by(row(model=f"{TF_BERT}/biobert", seq_len="77")) is None
