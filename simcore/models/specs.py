"""The table of named models. Importing it does not import torch.

Every default batch divides by 2, 4 and 8, and every default job is chosen so that there is
something to decide on a machine with four 16 GB GPUs: unless its reason says otherwise, training on
one of them does not fit, on four it does. The GiB in the reasons are what autograd saves for the
whole batch, with fused attention; parameters, gradients and optimizer state come on top: 16 bytes a
parameter with Adam, 12 with momentum.
"""

from dataclasses import dataclass
from typing import Literal

from simcore.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One named model.

    Attributes:
        name: what a user types.
        summary: one line.
        factory: "file:function" in this package; the function takes the size.
        default_job: its `sequence_length` is the size where a job gives none.
        reason: why the default job is what it is.
        parameters: trainable elements, tied ones once.
        sizes: least and greatest size.
        unit: what the size counts: tokens of a sequence or pixels of an image's side.
    """

    name: str
    summary: str
    factory: str
    default_job: Job
    reason: str
    parameters: int
    sizes: tuple[int, int]
    unit: Literal["tokens", "pixels"] = "tokens"


_LANGUAGE = (
    ModelSpec(
        name="bert-base",
        summary="BERT-base with its pre-training heads: 12 layers, width 768",
        factory="bert:bert_base",
        default_job=Job(batch=48, sequence_length=512, optimizer="adam"),
        reason="full published length; the least batch of 16 x n that one GPU cannot hold (15 GiB)",
        parameters=110_106_428,
        sizes=(2, 512),
    ),
    ModelSpec(
        name="bert-large",
        summary="BERT-large with its pre-training heads: 24 layers, width 1024",
        factory="bert:bert_large",
        default_job=Job(batch=16, sequence_length=512, optimizer="adam"),
        reason="full published length; the least batch of 8 x n that one GPU cannot hold (13 GiB)",
        parameters=336_226_108,
        sizes=(2, 512),
    ),
    ModelSpec(
        name="gpt2",
        summary="GPT-2 small: 12 layers, width 768",
        factory="gpt:gpt2",
        default_job=Job(batch=16, sequence_length=1024, optimizer="adam"),
        reason="published length; 13 GiB, and 3 GiB for each copy of the logits",
        parameters=124_439_808,
        sizes=(2, 1024),
    ),
    ModelSpec(
        name="gpt2-medium",
        summary="GPT-2 medium: 24 layers, width 1024",
        factory="gpt:gpt2_medium",
        default_job=Job(batch=8, sequence_length=1024, optimizer="adam"),
        reason="published length; 14 GiB",
        parameters=354_823_168,
        sizes=(2, 1024),
    ),
    ModelSpec(
        name="gpt2-large",
        summary="GPT-2 large: 36 layers, width 1280",
        factory="gpt:gpt2_large",
        default_job=Job(batch=8, sequence_length=1024, optimizer="adam"),
        reason="published length; 25 GiB; a whole replica with two samples is over 16 GB too",
        parameters=774_030_080,
        sizes=(2, 1024),
    ),
    ModelSpec(
        name="gpt2-xl",
        summary="GPT-2 XL: 48 layers, width 1600",
        factory="gpt:gpt2_xl",
        default_job=Job(batch=8, sequence_length=1024, optimizer="adam"),
        reason="published length; 41 GiB and 23 GiB of state: wants eight 16 GB GPUs",
        parameters=1_557_611_200,
        sizes=(2, 1024),
    ),
    ModelSpec(
        name="gpt3-2.7b",
        summary="GPT-3 2.7B with dense attention: 32 layers, width 2560",
        factory="gpt:gpt3_2_7b",
        default_job=Job(batch=512, sequence_length=2048, optimizer="adam", precision="bf16"),
        reason="published batch of 1 M tokens: a cluster's job, in micro-batches",
        parameters=2_651_553_280,
        sizes=(2, 2048),
    ),
    ModelSpec(
        name="gpt3-6.7b",
        summary="GPT-3 6.7B with dense attention: 32 layers, width 4096",
        factory="gpt:gpt3_6_7b",
        default_job=Job(batch=1024, sequence_length=2048, optimizer="adam", precision="bf16"),
        reason="published batch of 2 M tokens: a cluster's job, in micro-batches",
        parameters=6_658_404_352,
        sizes=(2, 2048),
    ),
    ModelSpec(
        name="gpt3-175b",
        summary="GPT-3 175B with dense attention: 96 layers, width 12288",
        factory="gpt:gpt3_175b",
        default_job=Job(batch=1536, sequence_length=2048, optimizer="adam", precision="bf16"),
        reason="published batch of 3.2 M tokens: a large cluster's job, in micro-batches",
        parameters=174_604_259_328,
        sizes=(2, 2048),
    ),
    ModelSpec(
        name="gnmt-4",
        summary="GNMT v2: 4 encoder and 4 decoder LSTM layers of 1024, attention",
        factory="gnmt:gnmt_4",
        default_job=Job(batch=256, sequence_length=50, optimizer="adam"),
        reason="usual length cut and batch; 8 GiB: fits one 16 GB GPU",
        parameters=160_671_297,
        sizes=(2, 512),
    ),
    ModelSpec(
        name="gnmt-8",
        summary="GNMT: 8 encoder and 8 decoder LSTM layers of 1024, attention",
        factory="gnmt:gnmt_8",
        default_job=Job(batch=256, sequence_length=50, optimizer="adam"),
        reason="as gnmt-4, at the published depth; 12 GiB, and 2 GiB for each copy of the logits",
        parameters=244_622_913,
        sizes=(2, 512),
    ),
    ModelSpec(
        name="transformer-base",
        summary="Encoder-decoder Transformer: 6 + 6 layers, width 512",
        factory="transformer:transformer_base",
        default_job=Job(batch=384, sequence_length=64, optimizer="adam"),
        reason="published batch of 25,000 tokens; 13 GiB, and 3 GiB for each copy of the logits",
        parameters=63_082_496,
        sizes=(2, 2048),
    ),
    ModelSpec(
        name="transformer-big",
        summary="Encoder-decoder Transformer: 6 + 6 layers, width 1024",
        factory="transformer:transformer_big",
        default_job=Job(batch=384, sequence_length=64, optimizer="adam"),
        reason="published batch of 25,000 tokens; 22 GiB",
        parameters=214_245_376,
        sizes=(2, 2048),
    ),
    ModelSpec(
        name="t5-base",
        summary="T5-base: 12 + 12 layers, width 768, relative positions",
        factory="t5:t5_base",
        default_job=Job(batch=16, sequence_length=512, optimizer="adam"),
        reason="published length on both sides; 15 GiB",
        parameters=222_903_552,
        sizes=(2, 2048),
    ),
)

_IMAGE = (
    ModelSpec(
        name="inception-v3",
        summary="Inception-V3 with auxiliary classifier, 1000 classes",
        factory="inception:inception_v3",
        default_job=Job(batch=256, sequence_length=299, optimizer="momentum"),
        reason="published image size; 23 GiB (a batch of 32 is 3 GiB)",
        parameters=27_161_264,
        sizes=(299, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="resnet-50",
        summary="ResNet-50 v1.5, 1000 classes",
        factory="resnet:resnet_50",
        default_job=Job(batch=256, sequence_length=224, optimizer="momentum"),
        reason="published batch and image size; 20 GiB",
        parameters=25_557_032,
        sizes=(32, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="vgg-16",
        summary="VGG-16, 1000 classes",
        factory="vgg:vgg_16",
        default_job=Job(batch=256, sequence_length=224, optimizer="momentum"),
        reason="published batch and image size; 17 GiB",
        parameters=138_357_544,
        sizes=(32, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="vgg-19",
        summary="VGG-19, 1000 classes",
        factory="vgg:vgg_19",
        default_job=Job(batch=256, sequence_length=224, optimizer="momentum"),
        reason="published batch and image size; 19 GiB",
        parameters=143_667_240,
        sizes=(32, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="nasnet-mobile",
        summary="NASNet-A 4 @ 1056, 1000 classes: cells with many small branches",
        factory="nasnet:nasnet_mobile",
        default_job=Job(batch=256, sequence_length=224, optimizer="momentum"),
        reason="published image size; 18 GiB",
        parameters=5_289_978,
        sizes=(32, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="nasnet-large",
        summary="NASNet-A 6 @ 4032, 1000 classes: cells with many small branches",
        factory="nasnet:nasnet_large",
        default_job=Job(batch=32, sequence_length=331, optimizer="momentum"),
        reason="published image size; 25 GiB",
        parameters=88_753_150,
        sizes=(32, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="unet",
        summary="U-Net (5, 64): a chain with long skip connections, one mark a pixel",
        factory="unet:unet",
        default_job=Job(batch=64, sequence_length=192, optimizer="sgd"),
        reason="published image size; 29 GiB",
        parameters=232_687_328,
        sizes=(64, 1024),
        unit="pixels",
    ),
    ModelSpec(
        name="amoebanet-d",
        summary="AmoebaNet-D (18, 256), 1000 classes: cells with many branches",
        factory="amoebanet:amoebanet_d",
        default_job=Job(batch=128, sequence_length=224, optimizer="sgd"),
        reason="published image size; 45 GiB",
        parameters=122_470_120,
        sizes=(32, 1024),
        unit="pixels",
    ),
)

_BRANCHED = (
    ModelSpec(
        name="two-tower",
        summary="CLIP ViT-B/32: an image and a text tower, contrastive loss",
        factory="two_tower:two_tower",
        default_job=Job(batch=256, sequence_length=77, optimizer="adam"),
        reason="published caption length; 18 GiB",
        parameters=151_277_313,
        sizes=(2, 77),
    ),
    ModelSpec(
        name="multi-modal",
        summary="Three branches (ResNet-50, text and sound transformers) and a joint transformer",
        factory="multi_modal:multi_modal",
        default_job=Job(batch=64, sequence_length=128, optimizer="adam"),
        reason="a picture, a paragraph and five seconds of sound a sample; 18 GiB",
        parameters=162_956_405,
        sizes=(2, 512),
    ),
    ModelSpec(
        name="moe",
        summary="GPT-2 small with 8 experts in every second layer, top-2 routing, fixed capacity",
        factory="moe:moe",
        default_job=Job(batch=32, sequence_length=512, optimizer="adam"),
        reason="half of GPT-2's length, as dispatch grows with its square; 19 GiB",
        parameters=322_818_816,
        sizes=(2, 1024),
    ),
    ModelSpec(
        name="moe-stacked",
        summary="moe with the experts of a layer in one batched product, to be split by expert",
        factory="moe:moe_stacked",
        default_job=Job(batch=32, sequence_length=512, optimizer="adam"),
        reason="as moe",
        parameters=322_818_816,
        sizes=(2, 1024),
    ),
)

SPECS = {spec.name: spec for spec in (*_LANGUAGE, *_IMAGE, *_BRANCHED)}
