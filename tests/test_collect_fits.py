"""What a collection makes of its records; nothing is measured here."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.collect import fits
from calibration.collect.ledger import FINISHED, MESSAGES, PROBES, RECORDS, Ledger
from calibration.collect.matching import OpTime, OpTimes
from calibration.collect.probes import Launch
from calibration.collect.rows import Rows
from calibration.collect.stations import Beside, Timing
from simcore.errors import MeasurementError

ROWS = Rows("some-CPU", "torch 9", on_gpu=False)
LAUNCH = ROWS.launch(Launch(per_op=10e-6, in_call=4e-6, num_ops=100))


def op(seconds: float, **changes: object) -> OpTime:
    usual = OpTime(
        "aten.mm", "matmul", "fp32", (("m", 64), ("n", 32), ("k", 16)), 1.0, 14336, "F", 1,
        seconds, 0.0,
    )  # fmt: skip
    return usual._replace(**changes)


def records_of(*ops: OpTime) -> list:
    return [*LAUNCH, *ROWS.ops("a model", OpTimes(list(ops), 0.0, 0.0, 0), passes=5)]


def test_a_call_is_taken_off_an_op_and_equal_ops_become_one_line() -> None:
    (entry,) = fits.op_entries(records_of(op(100e-6), op(200e-6)), on_gpu=False)
    assert entry.seconds == pytest.approx(150e-6 - 4e-6)
    assert (entry.samples, entry.target) == (2, "aten.mm")
    assert dict(entry.dims) == {"m": 64, "n": 32, "k": 16}


def test_ops_that_differ_in_one_thing_only_have_lines_of_their_own() -> None:
    different = [
        op(1e-3), op(1e-3, target="aten.addmm"), op(1e-3, dtype="bf16"), op(1e-3, factor=2.0),
        op(1e-3, traffic=1), op(1e-3, dims=(("m", 64), ("n", 32), ("k", 8))),
    ]  # fmt: skip
    assert len(fits.op_entries(records_of(*different), on_gpu=False)) == len(different)


def test_seconds_and_launches_of_a_recurrent_layer_add_up_to_what_it_took() -> None:
    dims = (("t", 20), ("b", 2), ("dirs", 1), ("gates", 4), ("h", 8), ("i", 8))
    layer = op(2e-3, target="lstm_layer", op_class="rnn", dims=dims, kernels=20)
    (entry,) = fits.op_entries(records_of(layer), on_gpu=False)
    launch, in_call = fits.launch_of(LAUNCH)
    outside = launch - in_call  # of the one call: the module's Python and autograd
    assert entry.seconds + 20 * launch == pytest.approx(2e-3 + outside)


def test_a_gpus_ops_are_taken_as_they_are() -> None:
    (entry,) = fits.op_entries(records_of(op(100e-6)), on_gpu=True)
    assert entry.seconds == pytest.approx(100e-6)


def test_the_rates_of_a_class_give_its_time_as_a_whole() -> None:
    small = op(1e-3, dims=(("m", 100), ("n", 100), ("k", 100)))
    large = op(50e-3, dims=(("m", 1000), ("n", 1000), ("k", 1000)))
    adds = [
        op(2e-3, target="aten.add", op_class="pointwise", dims=(("elements", n),), traffic=n * 12)
        for n in (10_000, 500_000)
    ]
    entries = fits.op_entries(records_of(small, large, *adds), on_gpu=False)
    rates = fits.rates_of(entries)
    flops = 2e6 + 2e9
    share = rates.compute["matmul", "fp32"]
    seconds = [entry.seconds for entry in entries if entry.op_class == "matmul"]
    assert flops / (rates.peak["fp32"] * share) == pytest.approx(sum(seconds))
    moved = 12 * 510_000 / (rates.bandwidth * rates.memory["pointwise"])
    assert moved == pytest.approx(2 * (2e-3 - 4e-6))
    assert all(0 < value <= 1 for value in (share, *rates.memory.values(), rates.usual_memory))


def test_an_op_too_short_for_a_rate_does_not_set_the_peak() -> None:
    wrong = op(4.1e-6, dims=(("m", 4000), ("n", 4000), ("k", 4000)))  # 0.1 us without the call
    right = op(20e-3, dims=(("m", 1000), ("n", 1000), ("k", 1000)))
    adds = op(1e-3, target="aten.add", op_class="pointwise", dims=(("elements", 9),), traffic=108)
    rates = fits.rates_of(fits.op_entries(records_of(wrong, right, adds), on_gpu=False))
    assert rates.peak["fp32"] == pytest.approx(2e9 / (20e-3 - 4e-6))


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(0, 2**31))
def test_a_line_is_recovered_from_noisy_times(latency: float, bandwidth: float, seed: int) -> None:
    sizes = [4**power for power in range(3, 15)]
    noise = np.random.default_rng(seed).normal(0, 0.03, len(sizes))
    times = {
        size: (latency + size / bandwidth) * math.exp(each)
        for size, each in zip(sizes, noise, strict=True)
    }
    line = fits.line_of(times)
    for size in (sizes[0], sizes[-1]):
        true = latency + size / bandwidth
        assert line.latency + size / line.bandwidth == pytest.approx(true, rel=0.15)
    assert line.relative_error < 0.1


def test_one_wild_time_does_not_bend_a_line() -> None:
    times = {4**power: 50e-6 + 4**power / 4e9 for power in range(3, 14)}
    times[4**5] *= 30
    line = fits.line_of(times)
    assert line.latency == pytest.approx(50e-6, rel=0.1)
    assert line.bandwidth == pytest.approx(4e9, rel=0.1)


def test_a_line_stays_near_its_points_where_noise_hides_the_bandwidth() -> None:
    line = fits.line_of({1024: 2e-3, 2**20: 1e-3})
    assert 2**20 / 1e-3 / 2 <= line.bandwidth <= 10 * 2**20 / 1e-3
    assert 1e-5 <= line.latency <= 2e-3


def test_what_the_core_does_for_messages_slows_compute_by_that_much() -> None:
    share = 0.75
    factor = fits.slower(share)
    assert 1 - 1 / factor == pytest.approx(share)  # lost seconds of compute per second of message
    assert fits.slower(0.0) == 1.0
    assert fits.slower(1.0) == fits.MOST_SLOW


def test_the_share_of_the_core_is_that_of_large_messages() -> None:
    records = []
    for size, core in ((1024, 1.0), (2**22, 0.5), (2**24, 0.7), (2**26, 0.6)):
        ends = [Timing(1e-3, 0.0, core * 1e-3, 5)] * 2
        records += ROWS.messages(size, "one", ends, "gloo")
        records += ROWS.messages(size, "both", [end._replace(core=9e-3) for end in ends], "gloo")
    assert fits.core_share(records, "gloo", kind="link") == pytest.approx(0.6)
    assert fits.core_share(records, "gloo", kind="collective") == 0.0


def test_a_message_is_stretched_by_what_its_receiver_saw_while_the_sender_computed() -> None:
    records = ROWS.messages(2**22, "one", [Timing(2e-3, 0.0, 1e-3, 5)] * 2, "gloo")
    idle, busy = Beside(0.0, 3e-3, 80e-6), Beside(8e-3, 9e-3, 90e-6)
    records += ROWS.beside(2**22, "sender", [busy, idle], "gloo")
    assert fits.longer_beside_compute(records, "gloo") == pytest.approx(1.5)
    assert fits.posting_time(records, "gloo") == 0.0  # known only where both ends compute
    records += ROWS.beside(2**22, "both", [busy, idle], "gloo")
    assert fits.posting_time(records, "gloo") == pytest.approx(85e-6)


def test_a_ledger_finds_again_what_was_finished_with_the_same_software(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "some-CPU", "torch 9")
    ledger.finish(PROBES, LAUNCH, {"context": 5.0})
    again = Ledger(tmp_path, "some-CPU", "torch 9")
    assert again.has(PROBES)
    assert not again.has(MESSAGES)
    assert again.findings(PROBES) == {"context": 5.0}
    assert again.records == LAUNCH
    for other in (Ledger(tmp_path, "some-CPU", "torch 10"), Ledger(tmp_path, "x", "torch 9")):
        assert not other.has(PROBES)
        assert other.records == []


def test_half_a_line_of_a_killed_collection_is_dropped(tmp_path: Path) -> None:
    Ledger(tmp_path, "some-CPU", "torch 9").finish(PROBES, LAUNCH, {})
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b'{"format":"placewright-meas')
    again = Ledger(tmp_path, "some-CPU", "torch 9")
    again.finish(MESSAGES, LAUNCH[:1], {})
    assert Ledger(tmp_path, "some-CPU", "torch 9").records == [*LAUNCH, LAUNCH[0]]


def test_a_malformed_ledger_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FINISHED).write_text('{"format": "placewright-collected/1", "devices": 3}')
    with pytest.raises(MeasurementError, match=FINISHED):
        Ledger(tmp_path, "some-CPU", "torch 9")
