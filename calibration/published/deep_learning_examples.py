"""Rows of NVIDIA's DeepLearningExamples: V100 and A100, in fp32, TF32 and mixed precision.

What is read, and what is assumed where the rows do not say it:

- BERT of PyTorch and TensorFlow, pre-training and questions (large), and BioBERT, pre-training and
  names (base). Attention is two products and a softmax, as in both programs; only masked words
  reach the vocabulary. LAMB is priced as Adam, with one norm of all gradients.
- Transformer (big) of PyTorch; one batch a step. Workers wait for the one with the most padding as
  much as Gavel's Transformers do (`UNEVEN`, fitted there; that it holds here too was decided by
  how these rows scale).
- ResNet-50 v1.5, ResNeXt-101 (32x4d), plain and with squeeze and excitation, of TensorFlow: 224 x
  224 pixels, momentum. The small U-Net of `UNet_Industrial` at 512 x 512 pixels, and 3D U-Net at
  128 x 128 x 128 voxels; RMSProp with momentum is priced as Adam.
- Mixed precision: graphs in fp16 with fp32 masters and loss scaling; gradients are summed in 16
  bits. TF32: products on tensor cores, convolutions as profiles have them (cuDNN uses TF32 unless
  told otherwise). Long 16-bit products keep up what those of llm-foundry do.
- Several GPUs: plain data parallel; gradients in buckets beside the backward, but after the last
  microbatch where several are summed.
- The input pipeline costs nothing; APEX's fused kernels are not known.
- XLA is on in all of TensorFlow's scripts. Of the image models it fuses what `cause_compiler` says;
  BERT is priced as if it fused nothing, which was chosen looking at these rows: TensorFlow's BERT
  is slower than its ops one by one, and fused it would be predicted another sixth too fast.

PyTorch's second phase of pre-training is refused: its training script by default sorts sequences
into bins of 64 tokens (`phase2_bin_size`), and how long they are on average is not stated. That was
looked up because full sequences were predicted to take 1.4 to 2.2 times as long as measured.

The rest has no family here (FastSpeech, SE(3), MoFlow, TFT, HiFi-GAN, GPUNet, recommenders), or
states no length (Jasper, QuartzNet, FastPitch), or no size of a step (V-Net).
"""

from typing import NamedTuple

from calibration.published.cause_kernels import COMPILED, TORCH
from calibration.published.described import Described, NotExpressible, Products
from calibration.published.models import FamilySize
from calibration.published.other_sources import UNEVEN, largest_of
from calibration.published.plans import Layout
from calibration.published.rows import Run
from simcore.job import Job, Optimizer, Precision

CLIP_NORM = 1.0
_BINNED, _BINNED_LENGTH = "PyTorch/LanguageModeling/BERT", 512
_PRECISIONS: dict[str, tuple[Precision, Products]] = {
    "fp32": ("fp32", "as measured"),
    "tf32": ("fp32", "tf32"),
    "mixed": ("fp16", "sustained"),
}


class _Model(NamedTuple):
    factory: str
    optimizer: Optimizer
    length: int = 0  # 0 = the row's
    clips: bool = False


_BERT_LARGE = {
    True: _Model("bert_products:bert_large_words", "adamw", clips=True),
    False: _Model("bert_products:bert_large_answers", "adamw", clips=True),
}
_BERT_BASE = {
    True: _Model("bert_products:bert_base_words", "adamw", clips=True),
    False: _Model("bert_products:bert_base_entities", "adamw", clips=True),
}
_BERTS = {  # name -> model by whether it trains words
    "PyTorch/LanguageModeling/BERT": _BERT_LARGE,
    "TensorFlow/LanguageModeling/BERT": _BERT_LARGE,
    "TensorFlow/LanguageModeling/BERT/biobert": _BERT_BASE,
}
_TRANSFORMER = {
    "PyTorch/Translation/Transformer": _Model("transformer:transformer_big", "adam"),
}
_IMAGES = {
    "TensorFlow/Classification/ConvNets/resnet50v1.5": _Model("resnet:resnet_50", "momentum", 224),
    "TensorFlow/Classification/ConvNets/resnext101-32x4d": _Model(
        "resnext:resnext_101", "momentum", 224
    ),
    "TensorFlow/Classification/ConvNets/se-resnext101-32x4d": _Model(
        "resnext:se_resnext_101", "momentum", 224
    ),
    "TensorFlow/Segmentation/UNet_Industrial": _Model("unet_segment:unet_tiny", "adam", 512),
    "TensorFlow/Segmentation/UNet_3D_Medical": _Model("unet_segment:unet_volume", "adam", 128),
}


def read_examples(run: Run) -> Described | NotExpressible:
    """Returns a run of NVIDIA's examples."""
    model = _model(run)
    if model is None:
        return NotExpressible("no model family for this model")
    if run.micro_batch < 1 or run.precision not in _PRECISIONS:
        return NotExpressible("batch of a GPU or precision not stated")
    if run.model == _BINNED and run.length == _BINNED_LENGTH:
        return NotExpressible("sequences in bins, their mean length not stated")
    precision, products = _PRECISIONS[run.precision]
    length = model.length or run.length
    job = Job(
        batch=run.global_batch,
        sequence_length=length,
        optimizer=model.optimizer,
        precision=precision,
        clip_norm=CLIP_NORM if model.clips else None,
        loss_scaling=precision == "fp16",
    )
    layout = Layout(
        dp=run.num_gpus,
        microbatch=run.micro_batch,
        overlap=run.micro_batch * run.num_gpus == run.global_batch,
    )
    size = FamilySize(factory=model.factory, length=length)
    kernels = COMPILED if run.model in _IMAGES else TORCH
    uneven = UNEVEN if run.model in _TRANSFORMER else 0.0
    return Described(
        size, job, layout, waits=False, products=products, kernels=kernels,
        waiting=1 + uneven * largest_of(run.num_gpus),
    )  # fmt: skip


def _model(run: Run) -> _Model | None:
    if run.model in _BERTS:
        return _BERTS[run.model]["pre-training" in run.notes.lower()]
    return (_IMAGES | _TRANSFORMER).get(run.model)
