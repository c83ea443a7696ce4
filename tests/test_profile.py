import json

import msgspec
import pytest

from simcore import profile, profile_store
from simcore.errors import ProfileError
from simcore.signature import CLASS_NAMES


def device_record(kind="V100-SXM2-16GB"):
    return json.loads((profile_store.SHIPPED / "devices" / f"{kind}.json").read_text())


def parse(record):
    return profile.parse_profile(json.dumps(record).encode(), f"{record['kind']}.json")


def tags(value):
    """Every tagged value below a JSON value."""
    if isinstance(value, dict):
        if "tag" in value:
            yield value
        for child in value.values():
            yield from tags(child)


@pytest.mark.parametrize("kind", profile_store.device_kinds())
def test_every_shipped_device_profile_loads_and_gives_positive_rates(kind):
    loaded = profile_store.load_profile(kind)
    assert loaded.kind == kind
    for op_class in CLASS_NAMES:
        assert loaded.byte_rate(op_class) > 0
        for dtype in ("fp32", "bf16", "fp16", "int64"):
            assert (
                0
                < loaded.flop_rate(op_class, dtype)
                <= max(loaded.peak(dtype), loaded.peak("tf32"))
            )


@pytest.mark.parametrize("kind", profile_store.link_kinds())
def test_every_shipped_link_profile_loads(kind):
    loaded = profile_store.load_link(kind)
    assert loaded.bandwidth > 1e9
    assert 0 < loaded.latency < 1e-4


def test_every_number_has_a_tag_a_source_and_a_date():
    paths = [p for part in ("devices", "links") for p in (profile_store.SHIPPED / part).glob("*")]
    for path in paths:
        record = json.loads(path.read_text())
        plain = {"format", "kind", "description", "is_cpu", "synchronous", "efficiency", "curves"}
        for key in set(record) - plain:
            assert set(record[key]) >= {"value", "tag", "source", "date"}, (path.name, key)
        for tagged in tags(record):
            assert tagged["source"], path.name
            assert tagged["date"], path.name


def test_file_units_become_si_units():
    v100 = profile_store.load_profile("V100-SXM2-16GB")
    assert v100.peak("fp32") == 15.7e12
    assert v100.memory_bandwidth == 900e9
    assert v100.memory == round(15.77 * 2**30)
    assert v100.context == 400 * 2**20
    assert v100.launch_overhead == pytest.approx(8e-6)
    assert v100.fragmentation == 0.06


def test_a_dtype_that_the_device_lacks_runs_at_the_fp32_rate():
    v100 = profile_store.load_profile("V100-SXM2-16GB")
    assert v100.peak("bf16") == v100.peak("fp32")
    assert v100.flop_rate("matmul", "bf16") == v100.flop_rate("matmul", "fp32")


def test_fp32_uses_tf32_in_convolutions_but_not_in_matrix_products():
    a100 = profile_store.load_profile("A100-SXM4-80GB")
    assert a100.arithmetic("convolution", "fp32") == "tf32"
    assert a100.arithmetic("matmul", "fp32") == "fp32"
    assert a100.flop_rate("matmul", "fp32") == pytest.approx(0.78 * 19.5e12)


def test_a_class_without_an_entry_takes_the_default_efficiency():
    record = device_record()
    del record["efficiency"]["pooling"]
    assert parse(record).byte_rate("pooling") == parse(record).byte_rate("default")


def test_only_cpus_are_synchronous_hosts():
    loaded = [profile_store.load_profile(kind) for kind in profile_store.device_kinds()]
    assert all(p.is_cpu == p.synchronous == p.kind.startswith("CPU") for p in loaded)


def test_an_unknown_kind_is_refused_with_a_suggestion_and_the_list():
    with pytest.raises(ProfileError, match=r"v100-sxm2-16.*did you mean.*known:.*T4-16GB"):
        profile_store.load_profile("v100-sxm2-16")
    with pytest.raises(ProfileError, match=r"unknown link kind.*NVLink2-1"):
        profile_store.load_link("NVLink")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "green"}, "colour"),
        ({"kind": "Other"}, "file's name"),
        ({"format": "placewright-device-profile/2"}, "format"),
        ({"memory_GiB": 16.0}, "memory_GiB"),
        ({"efficiency": {}}, "efficiency.default"),
    ],
)
def test_a_malformed_profile_is_refused_with_file_and_key(change, message):
    record = device_record() | change
    with pytest.raises(ProfileError, match=message) as caught:
        profile.parse_profile(json.dumps(record).encode(), "V100-SXM2-16GB.json")
    assert str(caught.value).startswith("V100-SXM2-16GB.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("memory_bandwidth_GBps", "value"), 0.0, "memory_bandwidth_GBps must be positive"),
        (("peak_TFLOPS", "value"), {"fp16": 1.0}, "fp32"),
        (("launch_overhead_us", "value"), -1.0, "launch_overhead_us must not be negative"),
        (("launch_overhead_us", "tag"), "guessed", "guessed"),
        (("efficiency", "matmul", "value", "memory"), 1.5, "efficiency.matmul.memory"),
        (("efficiency", "matmul", "value", "compute"), {"fp8": 0.5}, "no fp8"),
        (("efficiency", "matmull"), device_record()["efficiency"]["matmul"], "unknown op class"),
    ],
)
def test_a_number_that_cannot_be_is_refused(path, value, message):
    record = device_record()
    target = record
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        parse(record)


def test_a_malformed_link_profile_is_refused_with_file_and_key():
    record = json.loads((profile_store.SHIPPED / "links" / "QPI.json").read_text())
    record["bandwidth_GBps"]["value"] = -9.0
    with pytest.raises(ProfileError, match=r"QPI.json: bandwidth_GBps must be positive"):
        profile.parse_link(json.dumps(record).encode(), "QPI.json")
    with pytest.raises(ProfileError, match=r"x.json"):
        profile.parse_link(b"{", "x.json")


def test_a_profile_survives_a_round_trip_through_json():
    loaded = profile_store.load_profile("T4-16GB")
    assert profile.parse_profile(msgspec.json.encode(loaded), "T4-16GB.json") == loaded
