"""The model zoo: published parameter counts, a scalar loss, a gradient for every parameter."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simcore.errors import GraphError, JobError
from simcore.job import Job
from simcore.models import build, model_names, model_spec

PUBLISHED = {
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "gnmt-4": 160_671_297,  # the MLPerf reference
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "inception-v3": 27_161_264,
    "nasnet-large": 88_753_150,
    "nasnet-mobile": 5_289_978,
    "resnet-50": 25_557_032,
    "t5-base": 222_903_552,
    "two-tower": 151_277_313,  # CLIP ViT-B/32
    "vgg-16": 138_357_544,
    "vgg-19": 143_667_240,
}
FAMILIES = [
    "bert-base", "gnmt-4", "gpt2", "inception-v3", "moe", "moe-stacked", "multi-modal",
    "nasnet-mobile", "resnet-50", "t5-base", "transformer-base", "two-tower", "vgg-16",
]  # fmt: skip


def small(name: str) -> Job:
    """A job with a short sequence; images keep their size."""
    return Job(sequence_length=16) if model_spec(name).unit == "tokens" else Job()


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fake(module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Moves a module from meta to the ambient fake mode."""
    module._apply(
        lambda t: torch.empty(t.shape, dtype=dtype if dtype and t.is_floating_point() else t.dtype)
    )


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_the_parameters_its_spec_says(name):
    module, _ = build(name, Job())
    assert count(module) == model_spec(name).parameters
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_specs_say_the_published_counts(name):
    assert model_spec(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "parameters"), [("bert-base", 109_482_240), ("bert-large", 335_141_888)]
)
def test_the_trunk_of_bert_has_the_published_count(name, parameters):
    module, _ = build(name, Job())
    assert count(module.bert) == parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_two_batch_sizes_give_a_scalar_loss_and_all_gradients(name):
    module, inputs = build(name, small(name))
    with FakeTensorMode():
        fake(module)
        loss = module(**inputs(3))
        loss.backward()
        with torch.no_grad():
            other = module(**inputs(2))
    assert loss.shape == other.shape == ()
    assert [key for key, tensor in module.named_parameters() if tensor.grad is None] == []


@pytest.mark.parametrize("name", ["gpt2", "moe", "transformer-base"])
def test_a_model_runs_in_bf16(name):
    module, inputs = build(name, small(name))
    with FakeTensorMode():
        fake(module, torch.bfloat16)
        loss = module(**inputs(2))
        loss.backward()
    assert {tensor.grad.dtype for tensor in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["gpt2", "vgg-16"])
def test_a_model_runs_on_the_meta_device(name):
    module, inputs = build(name, small(name))
    with torch.device("meta"):
        module(**inputs(2)).backward()
    assert all(tensor.grad is not None for tensor in module.parameters())


@pytest.mark.parametrize("name", model_names())
def test_no_tensor_of_the_inputs_grows_faster_than_the_batch(name):
    _, inputs = build(name, Job())
    with torch.device("meta"):
        sizes = [[tensor.numel() for tensor in inputs(batch).values()] for batch in (2, 4)]
    assert sizes[1] == [2 * size for size in sizes[0]]


def test_the_sequence_length_of_the_job_decides():
    _, inputs = build("gpt2", Job(sequence_length=128))
    assert inputs(2)["input_ids"].shape == (2, 128)
    _, inputs = build("gpt2", Job())
    assert inputs(2)["input_ids"].shape == (2, 1024)


def test_the_image_size_of_the_job_decides():
    _, inputs = build("resnet-50", Job(sequence_length=64))
    assert inputs(2)["images"].shape == (2, 3, 64, 64)


@pytest.mark.parametrize(("name", "size"), [("gpt2", 1025), ("inception-v3", 298), ("vgg-16", 16)])
def test_a_size_the_model_cannot_have_is_refused(name, size):
    with pytest.raises(JobError, match=rf"model {name}: sequence_length must be .*, not {size}"):
        build(name, Job(sequence_length=size))


def test_an_unknown_model_is_refused_with_what_is_meant_and_what_there_is():
    with pytest.raises(
        GraphError, match=r"'Inception_V3' .*mean inception-v3\? \(models: amoebanet-d, "
    ):
        model_spec("Inception_V3")
    with pytest.raises(GraphError, match=r"model 'zzz' is unknown \(models"):
        build("zzz", Job())


@pytest.mark.parametrize("name", model_names())
def test_every_default_job_can_be_split_over_eight_devices(name):
    spec = model_spec(name)
    assert spec.default_job.batch % 8 == 0
    assert spec.sizes[0] <= spec.default_job.sequence_length <= spec.sizes[1]
    assert "\n" not in spec.summary
    assert spec.reason


def test_a_mixture_sends_each_token_to_two_slots_of_two_experts():
    from simcore.models.moe import EXPERTS, Router

    torch.manual_seed(0)
    combine, balance = Router(8)(torch.randn(2, 4, 8))
    assert combine.shape == (2, 4, EXPERTS, 2)  # 2 choices * 4 tokens * 1.25 / 8 experts, up
    assert (combine.sum(dim=(2, 3)) <= 1 + 1e-6).all()
    assert ((combine > 0).sum(dim=1) <= 1).all()  # no slot is taken twice
    assert ((combine > 0).sum(dim=(2, 3)) <= 2).all()
    assert balance > 0


def test_a_mixture_drops_tokens_over_the_capacity():
    from simcore.models.moe import Router

    combine, _ = Router(8)(torch.ones(1, 16, 8))  # all tokens choose the same two experts
    used = (combine > 0).sum(dim=(0, 1, 3))
    assert sorted(used.tolist()) == [0, 0, 0, 0, 0, 0, 5, 5]  # 2 * 16 * 1.25 / 8


def test_relative_positions_of_t5_fall_in_the_published_buckets():
    from simcore.models.t5 import relative_buckets

    both = relative_buckets(200, bidirectional=True)
    assert [both[100, key].item() for key in (100, 99, 93, 92, 0)] == [0, 1, 7, 8, 15]
    assert [both[100, key].item() for key in (101, 107, 199)] == [17, 23, 31]
    past = relative_buckets(200, bidirectional=False)
    assert [past[199, key].item() for key in (199, 184, 183, 0)] == [0, 15, 16, 31]
    assert past[0, 199] == 0


def test_cells_of_nasnet_fit_together_on_an_odd_image():
    from simcore.models.nasnet import NASNet, Shape

    tiny = Shape(cells=1, penultimate=192, stem=8, skip_reduction=True, dropout=0.0)
    loss = NASNet(tiny)(torch.randn(2, 3, 33, 33), torch.tensor([0, 1]))
    loss.backward()
    assert torch.isfinite(loss)


def test_attention_of_gnmt_averages_its_keys():
    from simcore.models.gnmt import WIDTH, BahdanauAttention

    keys = torch.ones(2, 5, WIDTH)
    context = BahdanauAttention()(torch.randn(2, 3, WIDTH), keys)
    torch.testing.assert_close(context, torch.ones(2, 3, WIDTH))


def test_importing_the_models_does_not_import_torch():
    code = "import sys, simcore.models as m; m.model_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
