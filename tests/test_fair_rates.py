"""Max-min fair rates against linear programs, and against SimGrid where it is installed."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from tests.reference_rates import Flow, fair_rates

FREE = 1e9  # bytes/s, a cap that never binds
NUM_SETS = 500
NUM_SIMGRID_SETS = 200
OTHER_VERSION = 3  # exit status of the script
SCRIPT = Path(__file__).with_name("simgrid_flows.py")


# by hand


def test_two_flows_halve_a_channel():
    assert fair_rates([({0: 1.0}, FREE), ({0: 1.0}, FREE)], [4.0]) == [2.0, 2.0]


def test_a_flow_over_both_links_gets_the_share_of_the_narrow_one():
    flows = [({0: 1.0, 1: 1.0}, FREE), ({0: 1.0}, FREE), ({1: 1.0}, FREE)]
    assert fair_rates(flows, [1.0, 2.0]) == [0.5, 0.5, 1.5]


def test_what_a_capped_flow_leaves_goes_to_the_others():
    flows = [({0: 1.0}, 1.0), ({0: 1.0}, FREE), ({0: 1.0}, 3.0)]
    assert fair_rates(flows, [9.0]) == [1.0, 5.0, 3.0]


def test_rates_are_equal_even_where_one_flow_uses_a_channel_twice():
    assert fair_rates([({0: 2.0}, FREE), ({0: 1.0}, FREE)], [3.0]) == [1.0, 1.0]


def test_a_flow_without_channels_has_its_cap_and_no_flows_have_no_rates():
    assert fair_rates([({}, 5.0), ({0: 0.0}, 7.0)], [1.0]) == [5.0, 7.0]
    assert fair_rates([], [1.0]) == []


def test_channels_that_fill_together_freeze_all_their_flows():
    flows = [({0: 1.0}, FREE), ({0: 1.0, 1: 1.0}, FREE), ({1: 1.0}, FREE)]
    assert fair_rates(flows, [1.0, 1.0]) == [0.5, 0.5, 0.5]


# at random


def draw_flows(
    rng: np.random.Generator, shares: Sequence[float], capped: float = 0.5
) -> tuple[list[Flow], list[float]]:
    """Draws up to 8 flows over up to 6 channels.

    Args:
        rng: where the choices come from.
        shares: what a flow may use of a channel, per byte.
        capped: how many of the flows have a cap that can bind.
    """
    bandwidth = rng.integers(1, 17, rng.integers(1, 7)) / 4
    flows: list[Flow] = []
    for _ in range(rng.integers(1, 9)):
        used = rng.permutation(len(bandwidth))[: rng.integers(1, len(bandwidth) + 1)]
        cap = rng.uniform(0.05, 2.0) if rng.random() < capped else 100.0
        flows.append(({int(c): float(rng.choice(shares)) for c in sorted(used)}, float(cap)))
    return flows, bandwidth.tolist()


def rates_by_programs(flows: list[Flow], bandwidth: list[float]) -> list[float]:
    """Max-min fair rates from their definition.

    Maximises the least rate; fixes the flows whose rate cannot rise above it without another
    sinking below (those with a price in the dual program); goes on with the others.
    """
    count = len(flows)
    usage = [[flow.get(c, 0.0) for flow, _ in flows] + [0.0] for c in range(len(bandwidth))]
    fixed: dict[int, float] = {}
    while len(fixed) < count:
        rising = [i for i in range(count) if i not in fixed]
        above = [[-1.0 * (i == j) for j in range(count)] + [1.0] for i in rising]
        found = linprog(
            c=[0.0] * count + [-1.0],  # the last variable is the least rate
            A_ub=usage + above,
            b_ub=bandwidth + [0.0] * len(rising),
            bounds=[
                (fixed[i], fixed[i]) if i in fixed else (0.0, cap)
                for i, (_, cap) in enumerate(flows)
            ]
            + [(0.0, None)],
        )
        assert found.status == 0, found.message
        prices = -found.ineqlin.marginals[len(bandwidth) :]
        stopped = [i for i, price in zip(rising, prices, strict=True) if price > 1e-9]
        assert stopped
        fixed.update(dict.fromkeys(stopped, float(found.x[-1])))
    return [fixed[i] for i in range(count)]


@pytest.mark.parametrize("block", range(5))
def test_rates_are_those_of_repeated_linear_programs(block):
    for index in range(block, NUM_SETS, 5):
        rng = np.random.default_rng([11, index])
        flows, bandwidth = draw_flows(rng, shares=(0.25, 0.5, 1.0, 1.0, 1.5, 2.0))
        expected = rates_by_programs(flows, bandwidth)
        assert fair_rates(flows, bandwidth) == pytest.approx(expected, rel=1e-7), f"set {index}"


def test_no_channel_is_overfull_and_every_flow_has_a_reason_to_stop():
    for index in range(NUM_SETS):
        rng = np.random.default_rng([12, index])
        flows, bandwidth = draw_flows(rng, shares=(0.25, 0.5, 1.0, 1.0, 1.5, 2.0))
        rates = fair_rates(flows, bandwidth)
        load = [
            sum(usage.get(c, 0.0) * rate for (usage, _), rate in zip(flows, rates, strict=True))
            for c in range(len(bandwidth))
        ]
        assert all(used <= width * (1 + 1e-12) for used, width in zip(load, bandwidth, strict=True))
        for (usage, cap), rate in zip(flows, rates, strict=True):
            full = [c for c in usage if load[c] >= bandwidth[c] * (1 - 1e-12)]
            most_of = [
                max(r for (u, _), r in zip(flows, rates, strict=True) if c in u) for c in full
            ]
            assert rate == cap or any(rate >= most * (1 - 1e-12) for most in most_of)


def test_the_order_of_flows_changes_nothing_but_the_last_bits():
    for index in range(100):
        rng = np.random.default_rng([13, index])
        flows, bandwidth = draw_flows(rng, shares=(0.5, 1.0))
        turned = fair_rates(flows[::-1], bandwidth)[::-1]
        assert turned == pytest.approx(fair_rates(flows, bandwidth), rel=1e-12)


# against SimGrid


def finish_times(flows: list[Flow], sizes: list[float], bandwidth: list[float]) -> list[float]:
    """When each flow, started at 0, has moved its bytes, s."""
    now, left, ends = 0.0, dict(enumerate(sizes)), {}
    while left:
        rates = dict(zip(left, fair_rates([flows[i] for i in left], bandwidth), strict=True))
        step = min(left[i] / rates[i] for i in left)
        now += step
        left = {i: left[i] - rates[i] * step for i in left}
        ends.update({i: now for i in left if left[i] <= 1e-9 * sizes[i]})
        left = {i: rest for i, rest in left.items() if i not in ends}
    return [ends[i] for i in range(len(flows))]


@pytest.mark.skipif(
    importlib.util.find_spec("simgrid") is None,
    reason="SimGrid is not installed (its module is called simgrid). Its network model is ours"
    " where latencies are 0, every flow uses each of its links once, the TCP window does not bind"
    " (TCP-gamma 0), the bandwidth factor is 1 and there is no cross-traffic",
)
def test_transfers_end_when_simgrid_says(tmp_path):
    sets, expected = [], []
    for index in range(NUM_SIMGRID_SETS):
        rng = np.random.default_rng([14, index])
        flows, bandwidth = draw_flows(rng, shares=(1.0,))
        sizes = rng.uniform(0.5, 4.0, len(flows)).tolist()
        expected.append(finish_times(flows, sizes, bandwidth))
        flow_list = [
            {"channels": list(usage), "cap": cap, "size": size}
            for (usage, cap), size in zip(flows, sizes, strict=True)
        ]
        sets.append({"bandwidth": bandwidth, "flows": flow_list})
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "sets.json"), str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == OTHER_VERSION:
        pytest.skip("the script for SimGrid is written for SimGrid 3")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    for index in range(NUM_SIMGRID_SETS):
        assert found[index] == pytest.approx(expected[index], rel=1e-6), f"set {index}"
