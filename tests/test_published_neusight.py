"""Rows of NeuSight: Hugging Face's models op by op, what is dropped, and what is refused."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from calibration.importers import IMPORTERS
from calibration.published.described import Described, NotExpressible
from calibration.published.models import EagerFamily, EagerSize, GPTSize
from calibration.published.prediction import Prediction, published_run
from calibration.published.reading import describe_run
from calibration.published.rows import Run, read_runs
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.models.eager_transformers import EagerTransformer, sized
from simcore.models.megatron import MegatronShape
from simcore.profile_store import load_profile
from simcore.signature import Phase

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
RUN = Run(
    id="e2e-1", source="sitar-lab/NeuSight", part="single-gpu", task="inference",
    model="gpt2_large", parameters=0.0, layers=36, hidden=1280, heads=20, length=1024,
    gpu="Tesla V100-PCIE-32GB", num_gpus=1, per_node=1, precision="fp32", global_batch=4,
    micro_batch=0, tp=1, pp=1, dp=1, vpp=0, cp=0, ep=0, sharding="", recompute="", schedule="",
    placement="", framework="PyTorch 2.1 eager", seconds=0.7288, notes="forward only",
)  # fmt: skip
FAMILIES: tuple[EagerFamily, ...] = ("gpt2", "opt", "bert-words", "bert-classes")


def changed(**changes: object) -> Run:
    return dataclasses.replace(RUN, **changes)  # type: ignore[arg-type]


def shape(dropout: float = 0.0) -> MegatronShape:
    return MegatronShape(layers=2, width=64, heads=4, length=16, vocabulary=96, dropout=dropout)


def captured(family: EagerFamily, dropout: float = 0.0) -> OpGraph:
    built = sized(shape(dropout), family)
    job = Job(batch=4, sequence_length=16)
    return capture(built.module, built.inputs, job, name=family)


def forward_ops(graph: OpGraph, module: str) -> Counter[str]:
    """Returns how often the forward of a module runs each op, views left out."""
    names = [
        name.rpartition(".")[2] if not name.rpartition(".")[2].isdigit() else name.split(".")[-2]
        for name, phase in zip(graph.op_names, graph.phase, strict=True)
        if name.startswith(module) and phase == Phase.F
    ]
    return Counter(name for name in names if name != "view")


def test_a_layer_of_gpt2_has_the_ops_that_the_traced_graph_lists() -> None:
    expected = {
        "native_layer_norm": 2, "addmm": 4, "bmm": 2, "clone": 4, "div": 1, "where": 1,
        "_softmax": 1, "pow": 1, "mul": 4, "tanh": 1, "add": 4, "full": 1,
    }  # fmt: skip
    assert forward_ops(captured("gpt2"), "layers.1.") == expected


def test_a_layer_of_opt_has_the_ops_that_the_traced_graph_lists() -> None:
    expected = {
        "native_layer_norm": 2, "addmm": 6, "bmm": 2, "clone": 4, "mul": 1, "add": 3,
        "maximum": 1, "_softmax": 1, "relu": 1, "full": 1,
    }  # fmt: skip
    assert forward_ops(captured("opt"), "layers.1.") == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_trained_drops(family: EagerFamily) -> None:
    kept, dropped = captured(family), captured(family, 0.1)
    assert forward_ops(kept, "")["native_dropout"] == 0
    assert forward_ops(dropped, "layers.1.")["native_dropout"] == (2 if family == "opt" else 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_compute_on_real_numbers(family: EagerFamily) -> None:
    torch.manual_seed(0)
    model = EagerTransformer(shape(), family)
    ids = torch.randint(0, 96, (3, 16))
    loss = model(ids, ids)
    loss.backward()
    assert torch.isfinite(loss)
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == []


def test_a_position_of_gpt2_does_not_see_those_after_it() -> None:
    torch.manual_seed(0)
    model = EagerTransformer(shape(), "gpt2").eval()
    ids = torch.randint(0, 96, (1, 16))
    other = ids.clone()
    other[0, 9] = (ids[0, 9] + 1) % 96
    first, second = (model.layers(model.embedding(each)) for each in (ids, other))
    assert torch.equal(first[0, :9], second[0, :9])
    assert not torch.allclose(first[0, 9:], second[0, 9:])


def test_what_is_inferred_is_timed_forward_and_drops_nothing() -> None:
    found = describe_run(RUN)
    assert isinstance(found, Described)
    assert isinstance(found.size, EagerSize)
    assert (found.size.family, found.size.dropout, found.only) == ("gpt2", 0.0, "forward")
    trained = describe_run(changed(task="train"))
    assert isinstance(trained, Described)
    assert (trained.size.dropout, trained.only) == (0.1, "forward and backward")  # type: ignore[union-attr]


def test_bert_predicts_words_where_it_is_trained_and_classes_where_not() -> None:
    for task, family in (("train", "bert-words"), ("inference", "bert-classes")):
        found = describe_run(changed(model="bert_large", task=task))
        assert isinstance(found, Described)
        assert isinstance(found.size, EagerSize)
        assert (found.size.family, found.size.vocabulary) == (family, 30_522)


def test_four_gpus_run_megatrons_model() -> None:
    found = describe_run(changed(num_gpus=4, per_node=4, tp=4, task="train"))
    assert isinstance(found, Described)
    assert type(found.size) is GPTSize


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "PyTorch 2.1 (torch.compile fusion)"}, "kernels fused by torch.compile"),
        ({"model": "switchxl4"}, "no model family for this model"),
    ],
)
def test_what_is_not_priced_is_refused_with_a_reason(
    changes: dict[str, object], reason: str
) -> None:
    assert describe_run(changed(**changes)) == NotExpressible(reason)


def test_products_of_amds_gpus_run_on_matrix_cores() -> None:
    """Op for op the traced graphs say so: above the peak of the vector units, which is half."""
    place = IMPORTERS["neusight_graphs"].place(DATA)
    if not place.is_dir():
        pytest.skip("the public data sets are not at ../shared/data")
    for kind in ("MI100-32GB", "MI250-64GB"):
        rates = [
            2 * r.dims["m"] * r.dims["n"] * r.dims["k"] * (r.factor or 1) / r.seconds
            for r in IMPORTERS["neusight_graphs"].read(place).records
            if r.device == kind and r.op_class == "matmul"
        ]
        peak = load_profile(kind).peak("fp32")
        assert 0.55 * peak < max(rates) < peak


@pytest.mark.slow
def test_runs_of_a_v100_are_predicted_to_a_twentieth_with_nothing_fitted_on_them() -> None:
    if not (DATA / "e2e").is_dir():
        pytest.skip("the public data sets are not at ../shared/data")
    off = []
    for run in read_runs(DATA / "e2e"):
        if run.key == "e2e/sitar-lab/NeuSight/single-gpu" and "V100" in run.gpu:
            said = published_run(run)
            if isinstance(said, Prediction):
                off.append(abs(said.seconds / run.seconds - 1))
    assert len(off) == 11
    assert sum(off) / len(off) < 0.05
