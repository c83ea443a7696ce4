import itertools
import json

import msgspec
import numpy as np
import pytest

from calibration.op_growth import (
    GRIDS,
    MOST_FALL,
    MOST_RISE,
    toned_down,
    worst_fall,
    worst_rise,
)
from simcore import profile_store
from simcore.errors import ProfileError
from simcore.op_curves import CostSource, Query, device_of, op_costs, predict, work_of
from simcore.op_forms import (
    CONVOLUTION_DEFAULTS,
    DEFAULTS,
    FORMS,
    Device,
    OpCurve,
    Surface,
    Work,
    seconds,
)
from simcore.profile import HardwareProfile, MeasuredOp, Tagged, parse_profile
from simcore.signature import Phase, Signature

SHIPPED = sorted(path.stem for path in (profile_store.SHIPPED / "devices").glob("*.json"))
A100 = Device(peak=312e12, bandwidth=2.0e12, units=108.0, cache=40 * 2.0**20)


def grid_work(op_class):
    """Ops at every point of the class's grid."""
    lists = GRIDS[op_class]
    points = np.array(list(itertools.product(*lists.values())))
    dims = {name: points[:, at] for at, name in enumerate(lists)}
    if "q" in dims:
        dims["kv"] = dims["q"]
    return Work(dims, np.zeros(len(points)), "fp16")


def defaults(form, op_class=""):
    extra = CONVOLUTION_DEFAULTS if op_class == "convolution" else {}
    return OpCurve(form, dict(DEFAULTS[form]) | dict(extra))


FORM_OF = {
    "matmul": "tiles", "batched_matmul": "tiles", "convolution": "tiles",
    "attention": "attention", "rnn": "recurrent",
}  # fmt: skip


@pytest.mark.parametrize("op_class", GRIDS)
def test_a_form_never_falls_as_any_size_grows(op_class):
    curve = defaults(FORM_OF[op_class], op_class)
    work = grid_work(op_class)
    assert np.isfinite(seconds(curve, work, A100)).all()
    assert (seconds(curve, work, A100) > 0).all()
    assert worst_fall(curve, op_class, "fp16", A100) <= 1e-12


@pytest.mark.parametrize("op_class", GRIDS)
@pytest.mark.parametrize("field", ["peak", "bandwidth"])
def test_a_device_with_a_higher_peak_is_never_slower(op_class, field):
    work = grid_work(op_class)
    curve = defaults(FORM_OF[op_class], op_class)
    faster = A100._replace(**{field: 2.0 * getattr(A100, field)})
    assert (seconds(curve, work, faster) <= seconds(curve, work, A100) * (1 + 1e-12)).all()


def test_a_large_product_runs_near_the_share_of_the_peak_that_its_tiles_reach():
    size = np.array([8192.0])
    work = Work({"m": size, "n": size, "k": size}, np.zeros(1), "fp16")
    curve = defaults("tiles")
    reuse = 1 + curve.parameters["edge"] * (1 / 256 + 1 / 128)
    tiles = (8192 / 256) * (8192 / 128)
    waves = np.ceil(tiles / 108)
    expected = waves * 108 / tiles * 2 * 8192**3 * reuse / (curve.parameters["compute"] * A100.peak)
    assert seconds(curve, work, A100)[0] == pytest.approx(expected, rel=0.02)


def test_one_more_tile_than_fits_a_wave_costs_another_wave():
    k = np.full(2, 16384.0)
    n = np.array([108.0, 109.0]) * 128  # columns of tiles: exactly a wave, and one more
    work = Work({"m": np.full(2, 128.0), "n": n, "k": k}, np.zeros(2), "fp16")
    one, two = seconds(defaults("tiles"), work, A100)
    assert 1.02 < two / one < 2.1


def test_a_causal_mask_nearly_halves_long_attention():
    one = np.ones(1)
    dims = {"b": 8 * one, "h": 32 * one, "q": 8192 * one, "kv": 8192 * one, "d": 128 * one}
    full = seconds(defaults("attention"), Work(dims, np.zeros(1), "bf16"), A100)
    causal = Work(dims | {"causal": one}, np.zeros(1), "bf16")
    assert seconds(defaults("attention"), causal, A100)[0] / full[0] == pytest.approx(
        0.51, abs=0.02
    )


def test_a_surface_is_linear_between_its_knots_flat_outside_and_silent_without_its_size():
    surface = Surface(("k",), ((4.0, 6.0),), (0.0, 1.0))
    curve = OpCurve("bandwidth", dict(DEFAULTS["bandwidth"]), (surface,))
    k = np.array([1.0, 16.0, 32.0, 64.0, 4096.0, 0.0])
    work = Work({"k": k}, np.full(6, 1e9), "fp32")
    plain = seconds(OpCurve("bandwidth", curve.parameters), work, A100)
    assert np.log(seconds(curve, work, A100) / plain) == pytest.approx([0, 0, 0.5, 1, 1, 0])


def shipped_curves():
    for kind in SHIPPED:
        path = profile_store.SHIPPED / "devices" / f"{kind}.json"
        profile = parse_profile(path.read_bytes(), path.name)
        for op_class, by_dtype in profile.curves.items():
            for dtype, tagged in by_dtype.items():
                yield profile, op_class, dtype, tagged


def test_every_shipped_curve_is_finite_positive_and_grows_with_every_size():
    """From grid point to grid point (at least a factor of two), but for what tiles take back."""
    number = 0
    for profile, op_class, dtype, tagged in shipped_curves():
        where, device = (profile.kind, op_class, dtype), device_of(profile, dtype)
        fall = worst_fall(tagged.value, op_class, dtype, device)
        assert np.isfinite(fall), where
        assert fall <= MOST_FALL + 0.02, where  # + rounding, and peaks other than the fit's
        number += 1
    assert number > 300


def test_no_shipped_curve_runs_away_beyond_the_data():
    """Seconds per FLOP or byte: corrections add 1.25 at most, leaving the cache a factor of 4."""
    for profile, op_class, dtype, tagged in shipped_curves():
        where, device = (profile.kind, op_class, dtype), device_of(profile, dtype)
        assert worst_rise(tagged.value, op_class, dtype) <= MOST_RISE + 0.02, where
        if op_class in GRIDS:
            continue
        large = np.exp2(np.arange(26, 41))
        per_byte = seconds(tagged.value, Work({}, large, dtype), device) / large
        assert (per_byte[1:] <= 1.25 * per_byte[:-1]).all(), where


def test_a_rise_beyond_the_data_is_seen_and_toned_down():
    ladder = Surface(("work",), ((40.0, 50.0),), (0.0, 3.0))
    curve = OpCurve("tiles", dict(DEFAULTS["tiles"]), (ladder,))
    assert worst_rise(curve, "matmul", "fp16") > 1.0
    assert worst_rise(toned_down(curve, "matmul", "fp16", A100), "matmul", "fp16") <= MOST_RISE
    assert worst_rise(defaults("tiles"), "matmul", "fp16") == 0.0


def test_a_fall_is_seen():
    falling = OpCurve(
        "bandwidth",
        dict(DEFAULTS["bandwidth"]),
        (Surface(("traffic",), ((20.0, 21.0),), (0.0, -2.0)),),
    )
    assert worst_fall(falling, "pointwise", "fp32", A100) > 1.0
    assert worst_fall(defaults("bandwidth"), "pointwise", "fp32", A100) == 0.0


def test_shipped_curves_say_where_they_are_from_and_fitted_ones_how_well_they_did():
    for profile, op_class, dtype, tagged in shipped_curves():
        where = (profile.kind, op_class, dtype)
        assert tagged.tag in ("fitted", "borrowed"), where
        assert tagged.source, where
        assert 0.02 < tagged.relative_error <= 1.0, where
        if tagged.tag == "fitted":
            assert tagged.num_samples >= 8, where
            assert tagged.value.outcome in ("full", "few samples"), where
            assert tagged.value.standard_errors, where
        else:
            assert tagged.value.outcome == "borrowed", where


@pytest.mark.parametrize(
    "kind", ["V100-SXM2-16GB", "V100-PCIe-16GB", "RTX-3090-24GB", "A100-SXM4-80GB"]
)
def test_a_vocabulary_padded_to_a_multiple_of_64_is_not_slower(kind):
    profile = profile_store.load_profile(kind)
    odd, padded = (
        predict(profile, Signature("matmul", "fp16", (("m", 4096, 0), ("n", n, 0), ("k", 768, 0))))
        for n in (50257, 50304)
    )
    assert padded < odd


@pytest.mark.parametrize("kind", [kind for kind in SHIPPED if not kind.startswith("CPU")])
def test_every_gpu_has_curves_of_the_common_classes_in_its_dtypes(kind):
    profile = profile_store.load_profile(kind)
    for op_class in ("matmul", "batched_matmul", "convolution"):
        assert set(profile.curves[op_class]) >= set(profile.peak_TFLOPS.value) & {"fp32", "fp16"}
    assert set(profile.curves) >= {"normalisation", "softmax", "pointwise", "rnn"}


def square(size=1024, dtype="fp32", factor=1.0):
    dims = (("m", 0, size // 8), ("n", size, 0), ("k", size, 0))
    return Signature("matmul", dtype, dims, factor, (0, 3 * 4 * size * size // 8))


def with_measured(kind, *entries):
    profile = profile_store.load_profile(kind)
    table = Tagged(list(entries), "fitted", "here", "2026")
    return msgspec.structs.replace(profile, measured=table)


def test_a_measured_op_comes_before_the_curve_and_a_named_target_before_any():
    signature = square()
    dims = {"m": 1024, "n": 1024, "k": 1024}
    entry = MeasuredOp("", "matmul", "fp32", dims, signature.traffic_bytes(8), 0.5, 0.01)
    named = msgspec.structs.replace(entry, target="aten.mm", seconds=0.25)
    profile = with_measured("V100-SXM2-16GB", entry, named)
    queries = [Query(signature), Query(signature, "aten.mm"), Query(signature, "aten.addmm")]
    costs = op_costs(profile, queries, 8)
    assert costs.seconds.tolist() == [0.5, 0.25, 0.5]
    assert set(costs.source) == {CostSource.MEASURED}
    assert costs.relative_error.tolist() == [0.01] * 3
    other = op_costs(profile, queries, 16)  # another batch was not measured
    assert set(other.source) == {CostSource.CURVE}


def test_the_rounded_traffic_of_a_shard_finds_its_measured_op():
    signature = square()
    dims = {"m": 1024, "n": 1024, "k": 1024}
    traffic = signature.traffic_bytes(8)
    near = MeasuredOp("", "matmul", "fp32", dims, traffic - 2, 0.5, 0.01)
    far = msgspec.structs.replace(near, traffic=2 * traffic, seconds=0.25)
    profile = with_measured("V100-SXM2-16GB", far, near)
    assert op_costs(profile, [Query(signature)], 8).seconds.tolist() == [0.5]
    profile = with_measured("V100-SXM2-16GB", far)
    assert op_costs(profile, [Query(signature)], 8).source.tolist() == [CostSource.CURVE]


def test_a_measured_op_with_a_factor_is_of_ops_with_that_factor():
    dims = {"m": 1024, "n": 1024, "k": 1024}
    traffic = square().traffic_bytes(8)
    entry = MeasuredOp("", "matmul", "fp32", dims, traffic, 0.5, 0.01, factor=2.0)
    profile = with_measured("V100-SXM2-16GB", entry)
    once, twice = op_costs(profile, [Query(square()), Query(square(factor=2.0))], 8).source
    assert (once, twice) == (CostSource.CURVE, CostSource.MEASURED)


def test_an_op_without_curve_takes_the_roofline():
    profile = profile_store.load_profile("V100-SXM2-16GB")
    plain = msgspec.structs.replace(profile, curves={})
    costs = op_costs(plain, [Query(square(4096))], 8)
    assert costs.source.tolist() == [CostSource.ROOFLINE]
    assert costs.seconds[0] == pytest.approx(2 * 4096**3 / plain.flop_rate("matmul", "fp32"))
    assert costs.relative_error[0] == plain.relative_error("matmul")


def test_gradients_of_convolutions_have_curves_of_their_own_and_both_are_their_own_too():
    dims = (("n", 0, 1), ("k", 256, 0), ("out", 784, 0), ("c", 256, 0), ("filter", 9, 0))
    profile = profile_store.load_profile("V100-SXM2-16GB")
    one = Signature("convolution", "fp32", dims, 1.0, (0, 2_000_000))
    both = msgspec.structs.replace(one, factor=2.0, traffic=(0, 4_000_000))
    forward, data, weight = (
        predict(profile, one, 32, phase=p) for p in (Phase.F, Phase.I, Phase.W)
    )
    backward = predict(profile, both, 32, phase=Phase.B)
    assert len({forward, data, weight}) == 3
    assert 0.5 < backward / (data + weight) < 2.0
    assert predict(profile, one, 32, phase=Phase.B) == weight  # a first layer has no data gradient


def test_twice_the_products_take_twice_the_time():
    profile = profile_store.load_profile("V100-SXM2-16GB")
    once = square(4096)
    twice = msgspec.structs.replace(once, factor=2.0, traffic=(0, 2 * once.traffic[1]))
    assert predict(profile, twice, 8) == pytest.approx(2 * predict(profile, once, 8))


def test_costs_of_many_ops_are_those_of_each():
    profile = profile_store.load_profile("A100-SXM4-80GB")
    signatures = [square(size, dtype) for size in (64, 200, 1024) for dtype in ("fp32", "bf16")]
    signatures.append(Signature("pointwise", "fp32", (("elements", 0, 9),), 1.0, (0, 7_000_000)))
    together = op_costs(profile, [Query(s) for s in signatures], 4).seconds
    assert together == pytest.approx([predict(profile, s, 4) for s in signatures], rel=1e-12)


def test_what_only_bytes_decide_takes_the_curve_of_another_dtype():
    profile = profile_store.load_profile("V100-PCIe-32GB")
    sizes = ("pointwise", "int64", (("elements", 10**7, 0),), 1.0, (10**9, 0))
    costs = op_costs(profile, [Query(Signature(*sizes))], 1)
    assert costs.source.tolist() == [CostSource.CURVE]
    assert 1e9 / 900e9 < costs.seconds[0] < 1.5e9 / 900e9


def test_work_of_a_convolution_is_that_of_the_product_it_amounts_to():
    dims = (("n", 0, 1), ("k", 64, 0), ("out", 100, 0), ("c", 3, 0), ("filter", 9, 0))
    work = work_of([Signature("convolution", "fp32", dims, 2.0, (0, 8000))], 4, "fp32")
    assert work.traffic.tolist() == [16000.0]  # of one of the two gradients
    matmul = Work(
        {"m": np.array([400.0]), "n": np.array([64.0]), "k": np.array([27.0])}, work.traffic, "fp32"
    )
    curve = OpCurve("tiles", dict(DEFAULTS["tiles"]) | {"filter_9": 1.0, "large_filter": 1.0})
    assert seconds(curve, work, A100) == pytest.approx(seconds(curve, matmul, A100))


def surface(knots, values):
    return {"axes": ["m"], "knots": [knots], "values": values}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["parameters"].pop("edge"), "curves.matmul.fp32: no parameter edge"),
        (lambda c: c["parameters"].update(edge=-1.0), "curves.matmul.fp32.edge must be positive"),
        (lambda c: c.update(surfaces=[surface([2.0, 1.0], [0, 0])]), "wrong knots"),
        (lambda c: c.update(surfaces=[surface([1.0, 2.0], [0])]), "wrong knots"),
        (lambda c: c.update(form="cubic"), "cubic"),
    ],
)  # fmt: skip
def test_a_malformed_curve_is_refused_with_file_and_key(change, message):
    record = json.loads((profile_store.SHIPPED / "devices" / "T4-16GB.json").read_text())
    curve = record["curves"]["matmul"]["fp32"]["value"]
    change(curve)
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(json.dumps(record).encode(), "T4-16GB.json")
    assert str(caught.value).startswith("T4-16GB.json")


def test_curves_need_the_multiprocessors_and_the_cache():
    record = json.loads((profile_store.SHIPPED / "devices" / "T4-16GB.json").read_text())
    del record["cache_MiB"]
    with pytest.raises(ProfileError, match="curves need multiprocessors and cache_MiB"):
        parse_profile(json.dumps(record).encode(), "T4-16GB.json")
    record["curves"] = {}
    assert isinstance(parse_profile(json.dumps(record).encode(), "T4-16GB.json"), HardwareProfile)


def test_every_form_has_its_parameters():
    assert set(FORMS) == set(DEFAULTS)
