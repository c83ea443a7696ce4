"""Measurement records: what is refused, what is merged, and files of them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.records import (
    FORMAT,
    Record,
    encode,
    merge_duplicates,
    read_records,
    write_records,
)
from simcore.errors import MeasurementError

COMMON = {"device": "T4-16GB", "contains": "kernel", "how": "a test", "source": "tests/made_up"}


def product(**changes):
    fields = COMMON | {
        "kind": "op",
        "op_class": "matmul",
        "dtype": "fp16",
        "dims": {"m": 4, "n": 5, "k": 6},
        "phase": "F",
        "seconds": 2e-6,
    }
    return Record(**(fields | changes))


def reduced(**changes):
    fields = COMMON | {
        "kind": "collective",
        "collective": "all_reduce",
        "group": 4,
        "bytes": 1024,
        "seconds": 1e-5,
    }
    return Record(**(fields | changes))


def test_a_record_is_a_line_that_names_its_format(tmp_path):
    records = [product(), reduced(), reduced(kind="link", group=0, collective="")]
    path = tmp_path / "records.jsonl"
    assert write_records(records, path) == 3
    lines = path.read_bytes().splitlines()
    assert all(msgspec.json.decode(line)["format"] == FORMAT for line in lines)
    assert list(read_records(path)) == records


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": -1.0}, "seconds must be positive"),
        ({"seconds": 0.0}, "seconds must be positive"),
        ({"spread": -1.0}, "spread"),
        ({"dims": {"m": -4}}, "m -4 is not a size"),
        ({"op_class": "magic"}, "unknown op class 'magic'"),
        ({"dtype": ""}, "needs a dtype"),
        ({"count": 0}, "count"),
        ({"unit": "ms"}, "unit"),
        ({"contains": "coffee"}, "coffee"),
        ({"kind": "link"}, "a link needs bytes"),
        ({"kind": "collective", "collective": "scan"}, "unknown collective 'scan'"),
        ({"kind": "collective", "collective": "all_gather"}, "two members"),
        ({"format": "other/1"}, "other/1"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_its_number_and_the_reason(tmp_path, changes, reason):
    path = tmp_path / "records.jsonl"
    fields = msgspec.json.decode(encode(product())) | changes
    path.write_bytes(encode(product()) + msgspec.json.encode(fields) + b"\n")
    with pytest.raises(MeasurementError, match=rf"records\.jsonl:2: .*{reason}"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", '"2"', "null"])
def test_seconds_that_are_no_finite_number_are_refused(tmp_path, text):
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode(product(seconds=0.125)).replace(b"0.125", text.encode()))
    with pytest.raises(MeasurementError, match=r"records\.jsonl:1: "):
        list(read_records(path))


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(MeasurementError, match=r"absent\.jsonl: cannot be read: No such file"):
        list(read_records(tmp_path / "absent.jsonl"))


def test_good_lines_before_a_bad_one_are_there_already(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode(product()) + b"{\n")
    rows = read_records(path)
    assert next(rows) == product()
    with pytest.raises(MeasurementError, match=":2: "):
        next(rows)


def test_repeats_are_merged_by_their_median():
    records = [product(seconds=seconds) for seconds in (3e-6, 1e-6, 8e-6)]
    (merged,) = merge_duplicates(records)
    assert merged.seconds == 3e-6
    assert merged.count == 3
    assert merged.spread == pytest.approx(3.6055e-6, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "A40-48GB"},
        {"dtype": "fp32"},
        {"dims": {"m": 4, "n": 6, "k": 5}},
        {"phase": "W"},
        {"op_class": "other"},
        {"contains": "kernel+launch"},
    ],
)
def test_different_things_are_not_merged(changes):
    assert len(merge_duplicates([product(), product(**changes)])) == 2


@pytest.mark.parametrize(
    "changes", [{"bytes": 2048}, {"group": 8}, {"topology": "other"}, {"collective": "broadcast"}]
)
def test_different_collectives_are_not_merged(changes):
    assert len(merge_duplicates([reduced(), reduced(**changes)])) == 2


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=9))
def test_a_merged_time_is_among_those_measured(times):
    (merged,) = merge_duplicates(product(seconds=seconds) for seconds in times)
    assert min(times) <= merged.seconds <= max(times)
    assert merged.count == len(times)
