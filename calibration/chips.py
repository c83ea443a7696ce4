"""GPU kinds that have a chip, a dtype or a property in common: what curves may be lent between.

An SM that has a lane for each of its 128 threads issued a cycle (Ampere's GA10x, Ada, Hopper,
Blackwell) spends issue slots on loads and addresses that a product in fp32 would need for itself;
one of 64 lanes (Pascal's P100, Volta, Turing, Ampere's GA100) takes two cycles for an instruction
and has every other slot left. No product in fp32 of the former is in the public data.
"""

import msgspec

from simcore.op_forms import OpCurve

TWINS = {"fp16": ("bf16",), "bf16": ("fp16",), "tf32": ("fp16", "bf16"), "fp8": ("bf16", "fp16")}
_CHIPS = (
    ("V100-SXM2-16GB", "V100-SXM2-32GB", "V100-PCIe-32GB", "V100-PCIe-16GB"),
    ("A100-SXM4-80GB", "A100-SXM4-40GB", "A100-PCIE-40GB", "A100-PCIE-80GB"),
    ("H100-SXM5-80GB", "GH200-96GB", "H200-SXM-141GB", "H100-NVL-94GB", "H100-PCIE-80GB"),
    ("RTX-2080Ti-11GB", "Titan-RTX-24GB", "RTX-2080-8GB", "T4-16GB"),
    ("M40-12GB", "TitanX-12GB"),
    ("MI210-64GB", "MI250-64GB"),
    ("B200-SXM-180GB", "GB200-186GB"),
)
_NO_TENSOR_CORES = ("K80", "M40", "P100", "P4", "TitanX")
# What a dimension that is no multiple of 8 costs a 16-bit product: on Volta and Turing it leaves
# the tensor cores (a third or more, as users saw who padded a vocabulary), later ones lose less.
_MISALIGNED_OLD, _MISALIGNED_NEW, _MISALIGNED_NONE = 0.5, 0.15, 0.01
_FIRST_TENSOR_CORES = ("V100", "T4", "RTX-2080", "Titan-RTX")
_ALL_SLOTS = (
    "A40", "L4", "RTX-3090", "RTX-PRO-6000", "H100", "H200", "GH200", "B200", "GB200",
)  # fmt: skip
# Of its peak, cuBLAS gets 29.17 of 35.48 TFLOP/s on an RTX 4070 Ti and 18.88 of 19.49 on an A100
# (5120 x 4096 x 4096 in fp32; github.com/Yinghan-Li/YHs_Sample, issue 4).
_SLOTS_LEFT = (29.17 / 35.48) / (18.88 / 19.49)


def chip_of(kind: str) -> tuple[str, ...]:
    """Returns the kinds that have the chip of a kind, itself among them."""
    return next((chip for chip in _CHIPS if kind in chip), (kind,))


def family_of(dtype: str) -> str:
    """Returns what a dtype's arithmetic shares a class curve with."""
    return "fp32" if dtype in ("fp32", "fp64") else "16-bit"


def is_odd_one(kind: str, dtype: str) -> bool:
    """Whether a GPU without tensor cores has 16-bit products, which are like no other's."""
    return family_of(dtype) != "fp32" and kind.startswith(_NO_TENSOR_CORES)


def aligned(curve: OpCurve, kind: str) -> OpCurve:
    """Returns a curve with the kind's price of dimensions that are no multiple of 8."""
    if curve.form != "tiles":
        return curve
    price = _MISALIGNED_OLD if kind.startswith(_FIRST_TENSOR_CORES) else _MISALIGNED_NEW
    price = _MISALIGNED_NONE if kind.startswith(_NO_TENSOR_CORES) else price
    parameters = curve.parameters | {"misaligned": price}
    return msgspec.structs.replace(curve, parameters=parameters)


def issued(curve: OpCurve, kind: str, dtype: str) -> OpCurve:
    """Returns a class's curve with the share of issue slots that products in fp32 get of a kind."""
    if curve.form != "tiles" or dtype != "fp32" or not kind.startswith(_ALL_SLOTS):
        return curve
    parameters = curve.parameters | {"compute": curve.parameters["compute"] * _SLOTS_LEFT}
    return msgspec.structs.replace(curve, parameters=parameters)
