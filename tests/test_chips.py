"""What curves are lent between GPU kinds: chips, alignment, issue slots."""

import pytest

from calibration.chips import aligned, chip_of, is_odd_one, issued
from simcore.op_forms import DEFAULTS, OpCurve
from simcore.profile_store import device_kinds, load_profile

CURVE = OpCurve("tiles", dict(DEFAULTS["tiles"]))


@pytest.mark.parametrize("kind", ["H100-SXM5-80GB", "L40S-48GB", "B200-SXM-180GB"])
def test_products_in_fp32_share_issue_slots_where_an_sm_has_a_lane_for_each_thread(
    kind: str,
) -> None:
    share = issued(CURVE, kind, "fp32").parameters["compute"] / CURVE.parameters["compute"]
    assert share == pytest.approx(0.849, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("A100-SXM4-80GB", "fp32"), ("V100-SXM2-16GB", "fp32"), ("H100-SXM5-80GB", "bf16")],
)
def test_other_products_do_not(kind: str, dtype: str) -> None:
    assert issued(CURVE, kind, dtype) is CURVE


def test_the_shipped_class_curve_of_products_is_slower_there_by_that_share() -> None:
    lent = {
        kind: load_profile(kind).curves["matmul"]["fp32"].value.parameters["compute"]
        for kind in ("H100-SXM5-80GB", "MI100-32GB")
    }
    assert lent["H100-SXM5-80GB"] / lent["MI100-32GB"] == pytest.approx(0.849, abs=2e-3)


def test_every_kind_has_one_chip_and_is_on_it() -> None:
    for kind in device_kinds():
        chip = chip_of(kind)
        assert kind in chip
        assert all(chip_of(other) == chip for other in chip)


def test_dimensions_out_of_line_cost_most_where_tensor_cores_are_oldest() -> None:
    prices = [
        aligned(CURVE, kind).parameters["misaligned"]
        for kind in ("V100-SXM2-16GB", "A100-SXM4-80GB", "P100-PCIe-16GB")
    ]
    assert prices == sorted(prices, reverse=True)


def test_16_bit_products_without_tensor_cores_are_like_no_others() -> None:
    assert is_odd_one("P100-PCIe-16GB", "fp16")
    assert not is_odd_one("P100-PCIe-16GB", "fp32")
    assert not is_odd_one("V100-SXM2-16GB", "fp16")
