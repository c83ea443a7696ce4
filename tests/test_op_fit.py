import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from calibration import op_fit
from calibration.op_data import ABOVE_FLOOR, Key, samples_of
from calibration.op_models import Samples, fit_curve, pooled, predict
from calibration.records import Record
from simcore import profile_store
from simcore.op_forms import DEFAULTS, Device, OpCurve, Work, seconds

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
A100 = (312e12, 2.0e12, 108.0, 40 * 2.0**20)
H100 = (990e12, 3.3e12, 132.0, 50 * 2.0**20)


def products(number, noise, device=A100, parameters=None, seed=0):
    """Samples of matrix products that follow the form, with log-normal noise."""
    rng = np.random.default_rng(seed)
    dims = {name: np.exp2(rng.integers(5, 14, number)).astype(float) for name in "mnk"}
    one = np.ones(number)
    curve = OpCurve("tiles", dict(DEFAULTS["tiles"]) | (parameters or {}))
    samples = Samples(
        op_class="matmul",
        work=Work(dims, np.zeros(number), "fp16"),
        device=Device(*(value * one for value in device)),
        seconds=one,
        group=(dims["n"] * 31 + dims["k"]).astype(np.int64),
        flops=dims["m"] * dims["n"] * dims["k"],
        weight=one,
        kinds=("GPU",),
    )
    exact = seconds(curve, samples.work, samples.device)
    return Samples(**{f: getattr(samples, f) for f in samples.__slots__} | {
        "seconds": exact * np.exp(noise * rng.standard_normal(number))
    })  # fmt: skip


def test_a_fit_recovers_the_parameters_that_made_the_data():
    true = {"compute": 0.95, "memory": 0.7, "floor_us": 5.0, "edge": 40.0}
    curve = fit_curve(products(600, 0.03, parameters=true), surfaces=False)
    for name, value in true.items():
        distance = abs(np.log(curve.parameters[name] / value))
        assert distance < max(0.1, 5 * curve.standard_errors[name]), name
    assert curve.outcome == "full"


def test_a_fit_predicts_rows_it_did_not_see():
    curve = fit_curve(products(400, 0.02, parameters={"compute": 0.8}))
    unseen = products(300, 0.0, parameters={"compute": 0.8}, seed=1)
    assert np.median(np.abs(predict(curve, unseen) / unseen.seconds - 1)) < 0.03


def test_standard_errors_fall_with_the_noise():
    wide, narrow = (
        fit_curve(products(400, noise), surfaces=False).standard_errors["compute"]
        for noise in (0.2, 0.02)
    )
    assert narrow < wide / 3


def test_a_tenth_of_wild_outliers_changes_little():
    samples = products(400, 0.02)
    wild = samples.seconds.copy()
    wild[::10] *= 10.0
    spoiled = Samples(**{f: getattr(samples, f) for f in samples.__slots__} | {"seconds": wild})
    curve = fit_curve(spoiled)
    assert np.median(np.abs(predict(curve, samples) / samples.seconds - 1)) < 0.05


def test_few_samples_free_few_parameters_and_say_so():
    curve = fit_curve(products(20, 0.02, parameters={"compute": 0.6}))
    assert curve.outcome == "few samples"
    assert set(curve.standard_errors) == {"compute", "memory", "floor_us"}
    assert curve.parameters["edge"] == DEFAULTS["tiles"]["edge"]


def test_a_class_curve_carries_over_to_a_device_it_did_not_see():
    a100, h100 = products(300, 0.02), products(300, 0.02, H100, seed=2)
    curve = fit_curve(pooled([a100]), surfaces=False)
    assert np.median(np.abs(predict(curve, h100) / h100.seconds - 1)) < 0.05


def record(seconds, **fields):
    base = {
        "kind": "op", "device": "T4-16GB", "seconds": seconds, "contains": "kernel", "how": "",
        "source": "here/x.csv", "op_class": "matmul", "dtype": "fp32",
        "dims": {"m": 64, "n": 128, "k": 256}, "phase": "F", "traffic": 1000,
    }  # fmt: skip
    return Record(**base | fields)


def one(records):
    profiles = {"T4-16GB": profile_store.load_profile("T4-16GB")}
    (found,) = samples_of(records, profiles).items()
    return found


def test_samples_have_the_units_of_the_profile_and_repeats_are_merged():
    key, samples = one([record(1e-3), record(3e-3), record(2e-3)])
    assert key == Key("matmul", "fp32", "T4-16GB")
    assert samples.seconds.tolist() == [2e-3]
    assert samples.flops.tolist() == [64 * 128 * 256]
    peak, bandwidth, units, cache = (value[0] for value in samples.device)
    assert (peak, bandwidth, units, cache) == (8.1e12, 320e9, 40.0, 4 * 2.0**20)


def test_both_gradients_of_a_product_count_as_two():
    _, samples = one([record(4e-3, phase="B", factor=2.0, traffic=2000)])
    whole = predict(OpCurve("tiles", dict(DEFAULTS["tiles"])), samples)
    assert samples.work.traffic.tolist() == [1000.0]
    assert samples.seconds.tolist() == [2e-3]
    assert whole.shape == (1,)


def test_gradients_of_a_convolution_are_classes_and_so_is_their_sum():
    dims = {"n": 4, "k": 8, "out": 100, "c": 3, "filter": 9, "stride": 1}
    halves = [
        record(s, op_class="convolution", dims=dims, phase=p) for s, p in ((1.0, "I"), (2.0, "W"))
    ]
    profiles = {"T4-16GB": profile_store.load_profile("T4-16GB")}
    found = {key.op_class: s.seconds[0] for key, s in samples_of(halves, profiles).items()}
    assert found == {"convolution.I": 1.0, "convolution.W": 2.0, "convolution.B": 3.0}


def test_rows_that_the_host_hides_are_left_out():
    many = [
        record(seconds, dims={"m": m, "n": 1, "k": 1}, contains="kernel+launch+sync")
        for m, seconds in enumerate([40e-6] * 60 + [50e-6, 41e-6 * ABOVE_FLOOR, 1e-3], 1)
    ]
    _, samples = one(many)
    assert sorted(samples.seconds) == [41e-6 * ABOVE_FLOOR, 1e-3]


def test_backwards_have_a_host_floor_of_their_own():
    loop = {"contains": "kernel+launch+sync"}
    many = [
        record(seconds, dims={"m": m, "n": 1, "k": 1}, phase=phase, factor=factor, **loop)
        for phase, factor, times in (("F", 1.0, [40e-6] * 60), ("B", 2.0, [130e-6] * 60 + [1e-3]))
        for m, seconds in enumerate(times, 1)
    ]
    _, samples = one(many)
    assert samples.seconds.tolist() == [0.5e-3]  # of one of the two products


def test_held_out_groups_are_whole_and_the_largest_sizes_are_apart():
    samples = products(500, 0.05)
    errors = op_fit.held_out(samples, None)
    assert set(errors) == {"interpolation", "extrapolation"}
    large = samples.flops >= np.quantile(samples.flops, 0.9)
    assert errors["extrapolation"].cases == large.sum()
    assert errors["interpolation"].cases == 500 - large.sum()  # every row once, in five folds
    assert errors["interpolation"].median < 0.08


@pytest.fixture(scope="module")
def small_fit():
    """Fit of one GPU's products; another of the same chip, one of none, and a CPU."""
    kinds = ("T4-16GB", "RTX-2080-8GB", "H100-SXM5-80GB", "CPU-2x-EPYC-7742")
    profiles = {kind: profile_store.load_profile(kind) for kind in kinds}
    rng = np.random.default_rng(0)
    records = []
    for _ in range(80):
        m, n, k = (int(2 ** rng.integers(7, 12)) for _ in range(3))
        time = 5e-6 + 2 * m * n * k / 5e12
        fields = {"dims": {"m": m, "n": n, "k": k}, "traffic": 4 * (m * k + k * n + m * n)}
        records.append(record(time * float(np.exp(0.02 * rng.standard_normal())), **fields))
    return profiles, op_fit.fit_profiles(records, profiles)


def test_a_kind_with_rows_is_fitted_and_others_borrow_with_wider_error(small_fit):
    _, curves = small_fit
    fitted = curves["T4-16GB"]["matmul"]["fp32"]
    sibling = curves["RTX-2080-8GB"]["matmul"]["fp32"]
    stranger = curves["H100-SXM5-80GB"]["matmul"]["fp32"]
    assert [c.tag for c in (fitted, sibling, stranger)] == ["fitted", "borrowed", "borrowed"]
    assert fitted.source == "public measurements: here"
    assert fitted.relative_error < sibling.relative_error < stranger.relative_error
    assert "T4-16GB" in sibling.source
    assert "CPU-2x-EPYC-7742" not in curves


def test_own_rows_are_kept_where_the_class_predicts_them_worse_and_else_the_class_is():
    """The class is of one GPU; a second has rows of its own: with little noise, or with much."""
    mine = {noise: products(60, noise, H100, {"compute": 0.8}, seed=3) for noise in (0.02, 0.9)}
    other = op_fit.ClassCurve(fit_curve(products(300, 0.02), surfaces=False), ("A100",), None, {})
    key = Key("matmul", "fp16", "H100-SXM5-80GB")
    kept, left = (
        op_fit._fitted(key, samples, {("matmul", "16-bit"): other}, "here", {})
        for samples in (mine[0.02], mine[0.9])
    )
    assert kept is not None
    assert (
        kept.value.held_out["device left out"].median > kept.value.held_out["interpolation"].median
    )
    assert left is None


def test_written_curves_are_read_again_and_the_rest_of_the_file_stays(small_fit, tmp_path):
    _, curves = small_fit
    for kind in curves:
        shutil.copy(profile_store.SHIPPED / "devices" / f"{kind}.json", tmp_path)
    before = json.loads((tmp_path / "T4-16GB.json").read_text())
    op_fit.write_curves(curves, tmp_path)
    after = json.loads((tmp_path / "T4-16GB.json").read_text())
    assert {**before, "curves": 0} == {**after, "curves": 0}
    written = after["curves"]["matmul"]["fp32"]["value"]["parameters"]
    exact = curves["T4-16GB"]["matmul"]["fp32"].value.parameters
    assert written == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_shipped_curves_are_those_that_the_public_data_gives(tmp_path):
    """Of one small class, since the whole takes minutes: see `python -m calibration.op_fit`."""
    from calibration.importers import IMPORTERS

    if not (DATA / "neusight").is_dir():
        pytest.skip("needs ../shared/data")
    kinds = ("T4-16GB", "P100-PCIe-16GB", "V100-PCIe-32GB", "A100-PCIE-40GB", "MI100-32GB")
    profiles = {kind: profile_store.load_profile(kind) for kind in kinds}
    records = [
        r
        for r in IMPORTERS["neusight"].read(DATA / "neusight").records
        if r.op_class == "pointwise"
    ]
    curves = op_fit.fit_profiles(records, profiles)
    for kind in kinds:
        found = curves[kind]["pointwise"]["fp32"].value
        shipped = profiles[kind].curves["pointwise"]["fp32"].value
        assert found.parameters["memory"] == pytest.approx(shipped.parameters["memory"], rel=0.1)
        assert found.held_out["interpolation"].median < 0.05


def test_a_curve_of_small_products_that_outruns_the_arithmetic_is_not_taken():
    """Rows that wait for memory leave the rate of large products open."""
    honest, wrong = (OpCurve("tiles", dict(DEFAULTS["tiles"]) | {"compute": c}) for c in (1.0, 2.0))
    samples = products(60, 0.02, parameters={"compute": 2.0})
    assert op_fit.outruns(wrong, samples)
    assert not op_fit.outruns(honest, samples)
    assert op_fit._fitted(Key("matmul", "fp16", "GPU"), samples, {}, "here", {}) is None
