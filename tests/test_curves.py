"""Curves of collectives: files, and times between and beyond the measured sizes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.curves import Curve, CurveKey, load_curves, parse_curve, shipped_curves
from simcore.errors import ProfileError

POINTS = [(1_000, 10.0), (4_000, 20.0), (16_000, 80.0)]


def curve(*points):
    sizes, seconds = zip(*points, strict=True)
    return Curve(np.array(sizes, np.float64), np.array(seconds, np.float64))


def document(points=POINTS, **changes):
    record = {
        "format": "placewright-collective-curve/1",
        "kind": "all_reduce",
        "algorithm": "auto",
        "num_members": 8,
        "topology": "1 node, V100-SXM2-16GB, NVLink2-1+NVLink2-2",
        "description": "made up",
        "points": {
            "value": [{"bytes": size, "time_us": time_us} for size, time_us in points],
            "tag": "fitted",
            "source": "a test",
            "date": "2026",
            "num_samples": 3,
        },
    }
    return json.dumps(record | changes).encode()


def test_measured_sizes_have_their_measured_times():
    measured = curve(*POINTS)
    for size, seconds in POINTS:
        assert measured.time(size) == pytest.approx(seconds, rel=1e-12)


def test_between_two_sizes_the_logarithms_are_on_a_line():
    assert curve(*POINTS).time(2_000) == pytest.approx(10.0 * 2**0.5)
    assert curve(*POINTS).time(8_000) == pytest.approx(40.0)


def test_beyond_the_sizes_time_is_latency_and_bytes():
    measured = curve((1_000, 10.0), (3_000, 20.0), (5_000, 40.0))
    assert measured.time(7_000) == pytest.approx(60.0)
    assert measured.time(500) == pytest.approx(7.5)
    assert measured.latency == pytest.approx(5.0)


def test_a_curve_that_rises_faster_than_its_bytes_has_no_latency():
    measured = curve((1_000, 10.0), (2_000, 40.0))
    assert measured.latency == 0.0
    assert measured.time(500) == pytest.approx(5.0)


@given(
    st.lists(st.tuples(st.floats(1.1, 4.0), st.floats(1.0, 6.0)), min_size=1, max_size=6),
    st.lists(st.floats(0.0, 1e6), min_size=2, max_size=2),
)
def test_more_bytes_never_take_less_time(steps, sizes):
    points = np.cumprod([(1_000.0, 10.0), *steps], axis=0)
    measured = Curve(points[:, 0], points[:, 1])
    less, more = (measured.time(size) for size in sorted(sizes))
    assert 0 <= measured.latency <= less * (1 + 1e-12)
    assert less <= more * (1 + 1e-12)


def test_a_file_says_what_its_curve_holds_for():
    key, measured = parse_curve(document(), "x.json")
    assert key == CurveKey("all_reduce", "auto", 8, "1 node, V100-SXM2-16GB, NVLink2-1+NVLink2-2")
    assert measured.time(4_000) == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "truncated"),
        (document(kind="scan"), "scan"),
        (document(algorithm="magic"), "magic"),
        (document(format="other/1"), "other/1"),
        (document(unit="ms"), "unit"),
        (document(num_members=1), "num_members must be at least 2, not 1"),
        (document(POINTS[:1]), "at least two"),
        (document([POINTS[1], POINTS[0]]), "grow"),
        (document([(1, 2.0), (2, 1.0)]), "must not fall"),
        (document([(0, 1.0), (2, 1.0)]), "positive"),
        (document([(1, 0.0), (2, 1.0)]), "positive"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_reason(text, reason):
    with pytest.raises(ProfileError, match=rf"x\.json: .*{reason}"):
        parse_curve(text, "x.json")


def test_a_folder_of_files_is_a_table_of_curves(tmp_path):
    (tmp_path / "a.json").write_bytes(document())
    (tmp_path / "b.json").write_bytes(document(num_members=4))
    assert {key.num_members for key in load_curves(tmp_path)} == {4, 8}
    (tmp_path / "c.json").write_bytes(document())
    with pytest.raises(
        ProfileError, match=r"c\.json: another file has a curve for all_reduce auto 8"
    ):
        load_curves(tmp_path)


def test_no_folder_is_no_curves(tmp_path):
    assert load_curves(tmp_path / "absent") == {}


def test_the_curves_that_ship_are_well_formed():
    assert all(key.num_members == int(key.num_members) for key in shipped_curves())
