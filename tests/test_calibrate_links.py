"""Fits of links and collectives: known parameters come back, files say what was fitted."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.collective_fit import MAX_KNOTS, alpha_beta, fit, times
from calibration.curve_files import (
    FAMILY,
    fit_all,
    key_of,
    left_out_groups,
    write_curves,
)
from calibration.importers.devices import one_node, plain
from calibration.links import fit_link
from calibration.records import Record
from calibration.splits import FOLDS, errors, octaves, size_folds
from simcore.cluster import Cluster, Link
from simcore.collectives import make_collective, topology
from simcore.curves import (
    Curve,
    CurveKey,
    CurveTable,
    between,
    load_curves,
    parse_curves,
    shipped_curves,
)
from simcore.errors import ProfileError
from simcore.profile_store import device_kinds, link_kinds

SIZES = 2.0 ** np.arange(9, 31)


def noisy(seconds, seed=0, spread=0.02):
    return seconds * np.exp(np.random.default_rng(seed).normal(0, spread, len(seconds)))


# links


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_of_a_link_come_back(seed):
    sizes = np.tile(SIZES, 4)
    found = fit_link(sizes, noisy(10e-6 + sizes / 50e9, seed))
    assert found.latency == pytest.approx(10e-6, rel=0.03)
    assert found.bandwidth == pytest.approx(50e9, rel=0.05)
    assert abs(found.latency - 10e-6) < 4 * found.latency_error
    assert found.bandwidth_error < 0.05


def test_a_link_that_fills_slowly_has_a_ramp():
    seconds = 5e-6 + SIZES / 200e9 + 2e-9 * np.sqrt(SIZES)
    found = fit_link(SIZES, seconds)
    assert found.outcome == "alpha-beta with ramp"
    assert found.ramp == pytest.approx(2e-9, rel=1e-3)
    np.testing.assert_allclose(found.time(SIZES), seconds, rtol=1e-6)


def test_stalled_copies_do_not_move_a_link():
    seconds = 10e-6 + SIZES / 50e9
    seconds[::7] *= 20
    found = fit_link(SIZES, seconds)
    assert found.bandwidth == pytest.approx(50e9, rel=0.1)


def test_few_measurements_get_few_parameters():
    few = np.array([1e6, 1e8, 1e9])
    assert fit_link(few, 1e-5 + few / 1e10).outcome == "alpha-beta"
    assert fit_link(few[:2], few[:2] / 1e10).outcome == "too few"


# curves


def test_a_bend_is_found_where_it_is():
    """A library that changes its protocol at 1 MiB: two straight lines of log time."""
    seconds = np.where(SIZES <= 2**20, 20e-6 * (SIZES / 2**9) ** 0.1, 0.0)
    seconds = np.where(SIZES > 2**20, seconds[11] * SIZES / 2**20, seconds)
    found = fit(SIZES, noisy(seconds, spread=0.005))
    assert found.outcome == "curve"
    assert found.curve is not None
    assert len(found.curve.seconds) <= 6
    assert errors(times(found.curve, SIZES), seconds).p90 < 0.02
    assert found.held_out.median < 0.03


@pytest.mark.parametrize(
    ("sizes", "outcome", "points"),
    [(SIZES, "ramp", MAX_KNOTS), (SIZES[:3], "alpha-beta", 2), (SIZES[:1], "one size", 0)],
)
def test_fewer_sizes_have_fewer_parameters_and_a_named_outcome(sizes, outcome, points):
    found = fit(sizes, 1e-5 + sizes / 1e10)
    assert found.outcome == outcome
    assert points == (0 if found.curve is None else len(found.curve.seconds))


def test_one_size_often_measured_is_a_bandwidth():
    found = fit(np.full(9, 4e9), noisy(np.full(9, 0.5)))
    assert found.outcome == "beta"
    assert found.curve is not None
    assert found.curve.time(8e9) == pytest.approx(1.0, rel=0.05)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(5, 40), st.floats(0.0, 0.5))
def test_a_fitted_curve_never_falls_and_is_small(seed, count, spread):
    random = np.random.default_rng(seed)
    sizes = np.floor(2 ** random.uniform(8, 32, count))
    found = fit(sizes, noisy(1e-5 + sizes / 1e10, seed, spread))
    if found.curve is None:
        return
    assert (np.diff(found.curve.seconds) >= 0).all()
    most = MAX_KNOTS if found.outcome == "ramp" else min(MAX_KNOTS, len(np.unique(sizes)) // 2)
    assert 2 <= len(found.curve.seconds) <= max(2, most)
    assert len(found.relative_error) == len(found.curve.seconds)


def test_a_line_is_fitted_by_relative_distance():
    curve, _ = alpha_beta(SIZES, 1e-5 + SIZES / 1e10)
    np.testing.assert_allclose(times(curve, SIZES[[0, -1]]), (1e-5 + SIZES / 1e10)[[0, -1]])


def test_more_noise_is_more_standard_error():
    calm, wild = (fit(SIZES, noisy(1e-5 + SIZES / 1e10, 3, spread)) for spread in (0.01, 0.2))
    assert np.median(wild.relative_error) > 3 * np.median(calm.relative_error)


def test_whole_size_groups_are_held_out_and_never_the_ends():
    sizes = np.concatenate([SIZES, SIZES * 1.5])
    folds = size_folds(sizes)
    groups = octaves(sizes)
    for group in np.unique(groups):
        assert len(set(folds[groups == group])) == 1
    assert set(folds[(groups == groups.min()) | (groups == groups.max())]) == {-1}
    assert set(folds) == {-1, *range(FOLDS)}


# group sizes


def line(alpha, beta):
    return Curve(SIZES, alpha + beta * SIZES)


def test_a_group_between_two_others_carries_the_same_bytes_on_the_wire():
    """Where time depends on (n - 1) / n S alone, every group size in between is exact."""
    curves = {n: line(0.0, (n - 1) / n * 1e-10) for n in (2, 8)}
    for n in (3, 4, 5, 7):
        made = between(curves, n)
        for size in SIZES[3:-3]:
            assert made.time(size) == pytest.approx((n - 1) / n * 1e-10 * size, rel=1e-6)


def test_between_latencies_a_group_has_a_latency_between():
    curves = {2: line(10e-6, 1e-16), 8: line(40e-6, 1e-16)}
    assert between(curves, 4).time(SIZES[0]) == pytest.approx(20e-6, rel=1e-3)


def test_beyond_the_largest_group_there_is_no_curve():
    key = CurveKey("all_reduce", "auto", 2, "here")
    table = CurveTable({key: line(1e-5, 1e-10), key._replace(num_members=8): line(2e-5, 1e-10)})
    assert table.find(key._replace(num_members=5)) is not None
    assert table.find(key._replace(num_members=9)) is None
    assert table.find(key._replace(num_members=4, topology="there")) is None
    assert table.find(key._replace(num_members=4, kind="all_gather")) is None


# files


def collective(group, size, seconds, **changes):
    device = "A100-SXM4-80GB"
    fields = {
        "kind": "collective", "collective": "all_reduce", "group": group, "bytes": int(size),
        "seconds": float(seconds), "device": device, "contains": "kernel", "how": "made up",
        "source": "aiconfigurator/made_up.csv", "algorithm": "auto",
        "topology": one_node(device, "", "aiconfigurator"),
    }  # fmt: skip
    return Record(**(fields | changes))


def sweep(alpha, rate, **changes):
    return [
        collective(n, size, alpha * n + 2 * (n - 1) / n * size / rate, **changes)
        for n in (2, 4, 8)
        for size in SIZES
    ]


def test_a_fitted_machine_becomes_a_file_that_the_simulator_reads(tmp_path):
    records = sweep(5e-6, 200e9)
    fitted = fit_all(records)
    (path,) = write_curves(fitted, tmp_path)
    curves = load_curves(tmp_path)
    record = records[30]
    own = curves[key_of(record)]
    assert own.time(record.bytes) == pytest.approx(record.seconds, rel=0.05)
    named = {key.topology for key in curves}
    label = plain(record.topology)
    assert named == {
        record.topology, label, label.replace("A100-SXM4-80GB", FAMILY["A100-SXM4-80GB"][0]),
    }  # fmt: skip
    assert parse_curves(path.read_bytes(), path.name).keys() == curves.keys()


def test_what_no_one_speaks_for_keeps_the_name_of_its_machine(tmp_path):
    label = one_node("A100-SXM4-80GB", "", "deepbench")
    records = sweep(5e-6, 200e9, source="deepbench/made_up.csv", topology=label)
    write_curves(fit_all(records), tmp_path)
    assert {key.topology for key in load_curves(tmp_path)} == {label}


def test_the_cleaner_witness_speaks_for_the_plain_topology(tmp_path):
    other = one_node("A100-SXM4-80GB", "", "vidur")
    records = sweep(5e-6, 200e9)
    records += sweep(5e-6, 20e9, source="vidur/made_up.csv", topology=other)
    write_curves(fit_all(records), tmp_path)
    curves = load_curves(tmp_path)
    key = key_of(records[0])
    plain_curve = curves[key._replace(topology=plain(key.topology))]
    assert plain_curve.time(1e9) == curves[key].time(1e9)
    assert curves[key._replace(topology=other)].time(1e9) > 5 * plain_curve.time(1e9)


def test_a_group_size_left_out_is_predicted_from_its_neighbours():
    records = sweep(5e-6, 200e9)
    found = left_out_groups(fit_all(records), records)
    assert [key.num_members for key in found] == [4]
    (error,) = found.values()
    assert error.median < 0.1


def test_two_curves_for_one_thing_in_a_file_are_refused():
    text = (
        '{"format": "placewright-collective-curves/1", "topology": "a", "description": "", '
        '"curves": [%s, %s]}'
    )
    curve = (
        '{"kind": "all_reduce", "num_members": 2, "points": {"value": [{"bytes": 1, "time_us": 1}, '
        '{"bytes": 2, "time_us": 2}], "tag": "fitted", "source": "a test", "date": "2026"}}'
    )
    assert len(parse_curves((text.replace(", %s]", "]") % curve).encode(), "x.json")) == 1
    with pytest.raises(ProfileError, match=r"x\.json: curves: two for all_reduce auto 2 a"):
        parse_curves((text % (curve, curve)).encode(), "x.json")


# what ships


def test_every_shipped_curve_says_where_it_is_from():
    files = sorted((Path(__file__).parents[1] / "simcore/profiles/curves").glob("*.json"))
    assert files
    for path in files:
        text = path.read_text()
        assert '"tag": "fitted"' in text or '"tag": "borrowed"' in text
        assert '"relative_error"' in text
        assert len(parse_curves(text.encode(), path.name)) > 0


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [("8xA100-NVSwitch", (2, 3, 5, 8)), ("8xV100-NVLink", (4, 6, 8)), ("2x8xH100", (2, 4, 7, 8))],
)
def test_presets_use_a_curve_inside_a_node(preset, sizes):
    cluster = Cluster.preset(preset)
    for size in sizes:
        members = range(size)
        label = topology(cluster, members)
        curve = shipped_curves().find(CurveKey("all_reduce", "auto", size, label))
        assert curve is not None, (size, label)
        for num_bytes in (2_000_000, 50_000_000):
            made = make_collective("all_reduce", num_bytes, cluster, members)
            assert made.idle_time == pytest.approx(curve.time(num_bytes), rel=1e-9)
            plain_form = make_collective("all_reduce", num_bytes, cluster, members, curves={})
            assert 0.2 < made.idle_time / plain_form.idle_time < 5


@pytest.mark.parametrize("device", ["B200-SXM-180GB", "L40S-48GB", "MI250-64GB", "H200-SXM-141GB"])
def test_a_curve_ships_for_other_machines(device):
    labels = {key.topology for key in shipped_curves() if key.kind == "all_reduce"}
    assert any(label.startswith(f"1 node, {device}, ") and ";" not in label for label in labels)
    assert device in device_kinds()


def test_a_link_with_other_numbers_than_its_kind_does_not_take_the_curve_of_the_kind():
    cluster = Cluster.preset("8xA100-NVSwitch")
    slower = Cluster(
        name="slower",
        devices=cluster.devices,
        switches=cluster.switches,
        links=[
            Link(k.a, k.b, k.kind, k.bandwidth / 2, k.latency) if "NVLink" in k.kind else k
            for k in cluster.links
        ],
    )
    assert topology(slower, range(8)) == "1 node, A100-SXM4-80GB, 130GBps"
    slow, fast = (make_collective("all_reduce", 10**9, c, range(8)) for c in (slower, cluster))
    assert slow.idle_time > 1.5 * fast.idle_time


def test_shipped_links_of_curves_exist():
    assert {"NVLink5-NVSwitch", "NVLink3-bridge", "NVLink4-mesh", "xGMI-MI200"} <= set(link_kinds())
