"""Published runs of torchgpipe's chains and of Megatron-LM's mixtures of experts."""

import dataclasses

import numpy as np
import pytest
import torch

from calibration.published import megatron_ci, mixtures
from calibration.published.blocking import message_times, with_stops
from calibration.published.cause_kernels import MEGATRON
from calibration.published.described import Described, NotExpressible
from calibration.published.models import MixtureSize
from calibration.published.plans import stage_ops
from calibration.published.prediction import Prediction, Step, known_cluster, published_run
from calibration.published.reading import describe_run
from calibration.published.rows import Run
from simcore.cost import cost_table
from simcore.errors import PlanError
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass
from simcore.job import Job
from simcore.models.amoebanet import AmoebaNet
from simcore.models.megatron_rotary import PlainTurn, angles
from simcore.models.unet import UNet, unet
from simcore.signature import Phase

RUN = Run(
    id="e2e-1", source="kakaobrain/torchgpipe", part="all", task="train", model="U-Net (5, 64)",
    parameters=0.0, layers=0, hidden=0, heads=0, length=0, gpu="Tesla P40", num_gpus=2, per_node=8,
    precision="fp32", global_batch=32, micro_batch=8, tp=1, pp=2, dp=1, vpp=0, cp=0, ep=0,
    sharding="", recompute="except_last (default)", schedule="GPipe", seconds=1.0, notes="",
    placement="layers per stage [104, 137]",
)  # fmt: skip
MOE = {
    "source": "NVIDIA/Megatron-LM", "model": "moe:gpt3_tp2_pp1_te_8experts_etp1_ep4", "gpu": "H100",
    "num_gpus": 8, "tp": 2, "pp": 1, "dp": 4, "ep": 4, "cp": 1, "layers": 2, "hidden": 64,
    "heads": 2, "length": 16, "micro_batch": 4, "precision": "bf16", "recompute": "",
    "notes": 'args {"num-experts":"8","moe-router-topk":"2"}', "placement": "",
}  # fmt: skip


def changed(**fields: object) -> Run:
    return dataclasses.replace(RUN, **fields)


@pytest.mark.parametrize(
    ("model", "sizes", "millions"),  # torchgpipe's tables, and GPipe's for AmoebaNet-D
    [
        (UNet, (6, 72), 362.2),
        (UNet, (11, 128), 2_210),
        (UNet, (24, 160), 7_800),
        (AmoebaNet, (18, 208), 81.5),
        (AmoebaNet, (18, 416), 319.0),
        (AmoebaNet, (18, 544), 542.7),
        (AmoebaNet, (36, 544), 1_060),
        (AmoebaNet, (72, 512), 1_840),
    ],
)
def test_chains_of_torchgpipe_have_the_published_parameters(
    model: type[torch.nn.Module], sizes: tuple[int, int], millions: float
) -> None:
    with torch.device("meta"):
        module = model(*sizes)
    found = sum(parameter.numel() for parameter in module.parameters())
    assert found / 1e6 == pytest.approx(millions, rel=5e-3)
    assert found / 1e6 == pytest.approx(millions, abs=0.05 if millions < 1000 else 5)


@pytest.mark.parametrize("side", [33, 65, 100])
def test_amoebanet_takes_images_whose_side_is_odd_somewhere(side: int) -> None:
    with torch.device("meta"):
        loss = AmoebaNet(3, 16)(torch.empty(2, 3, side, side), torch.zeros(2, dtype=torch.int64))
    assert loss.shape == ()


def test_a_chain_of_modules_is_cut_where_the_row_says() -> None:
    with torch.device("meta"):
        module, inputs = UNet(1, 2), unet(64).inputs
    graph = capture(module, inputs, Job(batch=4, optimizer="sgd"), name="chain")
    parts = stage_ops(graph, 3, (4, 60, 1))
    numbers = [
        {int(unit.split(".")[1].removeprefix("part")) for unit in part if unit[:7] == "layers."}
        for part in parts
    ]
    first_and_last = [(min(found), max(found)) for found in numbers]
    assert first_and_last == [(0, 3), (5, 63), (64, 64)]  # 4 keeps a tensor: it has no ops
    with pytest.raises(PlanError, match="for a model of 65"):
        stage_ops(graph, 2, (1, 1))


def test_a_row_of_torchgpipe_says_stages_and_what_runs_again() -> None:
    described = describe_run(changed())
    assert isinstance(described, Described)
    layout = described.layout
    assert (layout.stage_layers, layout.schedule_name, layout.spares) == ((104, 137), "gpipe", True)
    assert describe_run(changed(placement="")) == NotExpressible("modules of each stage not stated")
    assert describe_run(changed(model="VGG")) == NotExpressible("no model family for this model")


@pytest.mark.slow
def test_the_microbatch_that_is_spared_takes_less_than_where_all_run_again() -> None:
    seconds = []
    for recompute in ("", "except_last", "always"):
        said = published_run(changed(recompute=recompute))
        assert isinstance(said, Prediction)
        seconds.append(said.seconds)
    none, spared, full = seconds
    assert none < spared < full
    assert 0.5 < (spared - none) / (full - none) < 0.9  # three of four microbatches run again


def test_a_device_has_its_share_of_the_experts() -> None:
    described = describe_run(changed(**MOE))
    assert isinstance(described, Described)
    size = described.size
    assert isinstance(size, MixtureSize)
    assert (size.count, size.local, size.choices, size.inner) == (8, 2, 2, 256)
    assert size.is_grouped
    assert described.floor == megatron_ci.host_floor(changed(gpu="H100")) < megatron_ci.HOST_FLOOR


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "moe:ep8_muon"}, "optimizer Muon"),
        ({"model": "moe:ep8"}, "width of experts not stated"),
        ({"ep": 3}, "experts do not divide among devices"),
        ({"notes": 'args {"num-experts":"many"}'}, "number of experts not stated"),
        ({"notes": 'args {"num-experts":"8","fp8-format":"hybrid"}'}, "products in 8 bits"),
        ({"notes": ""}, "expert parallel"),
    ],
)
def test_experts_that_cannot_be_expressed_have_a_reason(
    fields: dict[str, object], reason: str
) -> None:
    assert describe_run(changed(**(MOE | fields))) == NotExpressible(reason)


SMALL = MOE | {
    "model": "gpt:gpt3", "gpu": "GB200", "tp": 1, "dp": 4, "num_gpus": 4, "per_node": 4, "ep": 1,
    "notes": "",
}  # fmt: skip


def test_on_one_node_a_step_takes_what_its_samples_take_to_load() -> None:
    loading, alone = megatron_ci.SAMPLE_SECONDS, published_run(changed(**SMALL))
    assert isinstance(alone, Prediction)
    assert alone.seconds == pytest.approx(loading * 32 / 4)
    two = SMALL | {"num_gpus": 8, "dp": 8}
    several = published_run(changed(**two))
    assert isinstance(several, Prediction)
    assert megatron_ci.STEP_SECONDS < several.seconds < loading * 32 / 8
    assert megatron_ci.loading_seconds(changed(**(SMALL | {"gpu": "H100"}))) == 0.0


def test_what_a_step_takes_beside_its_microbatches_does_not_grow_with_them() -> None:
    seconds = []
    for batch in (64, 128, 192):
        said = published_run(changed(**(SMALL | {"gpu": "H100", "global_batch": batch})))
        assert isinstance(said, Prediction)
        seconds.append(said.seconds)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-2)
    rest = seconds[0] - (seconds[1] - seconds[0])
    assert megatron_ci.STEP_SECONDS * 0.9 < rest < megatron_ci.STEP_SECONDS * 1.5


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_mixture_is_captured_with_a_gradient_for_every_parameter(
    choices: int, is_grouped: bool
) -> None:
    size = MixtureSize(
        layers=1, width=32, heads=2, length=16, vocabulary=64, count=4, local=2, choices=choices,
        inner=64, shared=32, is_grouped=is_grouped,
    )  # fmt: skip
    built = size.build()
    graph = capture(built.module, built.inputs, Job(batch=4, precision="bf16"), name="mixture")
    wanted = sum(parameter.numel() for parameter in built.module.parameters())
    assert int(graph.elements[graph.op_class == OpClass.UPDATE].sum()) == wanted
    cost = cost_table(graph, Job(batch=4, precision="bf16"), ("H100-SXM5-80GB",), (4,))
    hosted = dataclasses.replace(cost, seconds=cost.seconds + 1.0)
    launched = np.maximum(cost.seconds, cost.launch[:, :, None])
    plain = mixtures.with_plain_ops(hosted, cost, graph).seconds == launched
    names = np.array(graph.op_names)[plain.all(axis=(1, 2))]
    assert len(names) > 5
    assert all(".router.order." in name or ".router.sinkhorn." in name for name in names)


def test_microbatches_of_interleaved_stages_come_in_rounds_of_equal_size() -> None:
    fields = MOE | {
        "model": "gpt:gpt3", "tp": 1, "pp": 4, "dp": 2, "ep": 1, "layers": 12, "vpp": 1, "notes": ""
    }  # fmt: skip
    assert isinstance(describe_run(changed(**(fields | {"global_batch": 40}))), Described)
    uneven = describe_run(changed(**(fields | {"global_batch": 72})))
    assert uneven == NotExpressible("interleaved stages need microbatches in rounds of equal size")


def test_rows_of_rotary_positions_turn_queries_and_keys() -> None:
    fields = MOE | {
        "model": "gpt:gpt3_rope_embeddings", "tp": 1, "dp": 8, "ep": 1, "num_gpus": 8,
        "notes": 'args {"position-embedding-type":"rope"}',
    }  # fmt: skip
    sizes = []
    for name in ("gpt:gpt3_rope_embeddings", "gpt:gpt3_rope_embeddings_interleaved_no_fusion"):
        described = describe_run(changed(**(fields | {"model": name})))
        assert isinstance(described, Described)
        sizes.append(described.size)
    fused, plain = (
        capture(built.module, built.inputs, Job(batch=4, precision="bf16"), name="rotary")
        for built in (size.build() for size in sizes)
    )
    turns = [sum(".turn." in name for name in graph.op_names) for graph in (fused, plain)]
    assert turns[0] == 2 * 2 * 2  # layers, queries and keys, there and back
    assert turns[1] > 5 * turns[0]
    assert not any("position_embeddings" in name for name in fused.op_names)


@pytest.mark.parametrize(
    ("notes", "is_fused"),
    [
        ('{"transformer-impl":"transformer_engine"}', True),
        ('{"transformer-impl":"transformer_engine","attention-backend":"flash"}', True),
        ('{"transformer-impl":"transformer_engine","attention-backend":"unfused"}', False),
        ('{"transformer-impl":"local"}', False),
        ("{}", False),
    ],
)
def test_attention_is_one_kernel_where_the_engine_may_choose(notes: str, is_fused: bool) -> None:
    stated = megatron_ci.arguments(changed(notes=f"args {notes}"))
    assert megatron_ci.has_fused_attention(stated) == is_fused


def test_turning_by_angles_keeps_lengths_and_is_what_complex_numbers_do() -> None:
    states = torch.randn(6, 2, 3, 8, dtype=torch.float64)
    turned = PlainTurn(6, 8)(states)
    assert torch.allclose(turned.norm(dim=-1), states.norm(dim=-1), rtol=1e-6)
    angle = angles(6, 8)[..., ::2].double()
    wanted = torch.view_as_complex(states.unflatten(-1, (4, 2))) * torch.polar(
        torch.ones_like(angle), angle
    )
    assert torch.allclose(turned, torch.view_as_real(wanted).flatten(-2), rtol=1e-6, atol=1e-6)


def test_stages_that_block_spend_the_time_of_their_messages() -> None:
    bloom = {
        "source": "bigscience-workshop/bigscience", "part": "a100", "gpu": "A100-SXM4-80GB",
        "num_gpus": 16, "tp": 4, "pp": 2, "dp": 2, "layers": 2, "hidden": 64, "heads": 4,
        "length": 16, "micro_batch": 2, "cp": 1,
    }  # fmt: skip
    described = describe_run(changed(**bloom))
    assert isinstance(described, Described)
    cluster = known_cluster(changed(**bloom))
    assert cluster is not None
    tables = Step(cluster, described, 0.0).pipeline().tables
    assert not any(table.forward_bytes.any() or table.backward_bytes.any() for table in tables)
    free = Step(cluster, described._replace(kernels=MEGATRON), 0.0).pipeline()
    flows = list(zip(*free.devices, strict=True))
    took = max(message_times(cluster, flows, int(free.tables[0].forward_bytes.sum())))
    stopped = with_stops(free.tables, cluster, free.devices)
    for stage, (before, after) in enumerate(zip(free.tables, stopped, strict=True)):
        more = (after.seconds - before.seconds)[stage, :, 0]
        assert more[Phase.F] == more[Phase.B] == pytest.approx(took)
        assert took > 0
