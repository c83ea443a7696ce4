"""Traces: valid JSON in which every op and transfer is found, on tracks that never overlap."""

import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from simcore.cluster import Cluster
from simcore.describe import describe
from simcore.errors import PlanError
from simcore.graph import GraphBuilder, OpGraph, Out, Phase
from simcore.job import Job
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.simulation import run_placement, simulate
from simcore.trace import chrome_trace, write_trace
from tests.strategies import ALL_SETTINGS, Case, compiled_problem, random_case, toy
from tests.test_portfolio import step

V100 = "V100-SXM2-16GB"
CLUSTER = Cluster.preset("4xV100-NVLink")
STAR = (("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 0.0), ("d2", "s0", 1.0, 0.0))
SEED = 31

Event = dict[str, Any]


def played(case: Case) -> Result:
    problem = compiled_problem(case)
    return describe(problem, run_placement(problem, case.placement, case.priorities))


def trace_of(case: Case) -> list[Event]:
    return chrome_trace(case.cluster, played(case))


def of_kind(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["ph"] in kinds]


def track_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_kind(events, "M")
        if event["name"] == "thread_name"
    }


def windows(events: list[Event]) -> dict[str, list[tuple[str, float, float]]]:
    """Track name -> (slice, begin, duration) in us."""
    names = track_names(events)
    found = defaultdict(list)
    for event in of_kind(events, "X"):
        found[names[event["pid"], event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    return dict(found)


# by hand


def test_a_trace_has_a_track_for_each_device_and_each_channel_in_use():
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)])
    assert windows(trace_of(case)) == {
        f"d0 ({V100})": [("o0", 0.0, pytest.approx(1e6))],
        f"d1 ({V100})": [("o1", pytest.approx(4.5e6), pytest.approx(2e6))],
        "d0 -> d1": [("o0:0", pytest.approx(1.5e6), pytest.approx(3e6))],
    }


def test_a_transfer_is_shown_on_every_channel_of_its_route():
    found = windows(trace_of(toy([1, 1], [(0, 2, [1])], [0, 1], links=STAR)))
    assert found["d0 -> s0"] == found["s0 -> d1"]


def test_concurrent_transfers_of_one_channel_get_tracks_of_their_own():
    wires = [(0, 2, [1]), (0, 2, [1]), (0, 2, [1])]
    names = track_names(trace_of(toy([1, 1], wires, [0, 1], contention="none"))).values()
    assert {"d0 -> d1", "d0 -> d1 (2)", "d0 -> d1 (3)"} < set(names)
    held = toy([1, 1], wires, [0, 1], contention="fifo")
    assert "d0 -> d1 (2)" not in track_names(trace_of(held)).values()


def test_more_than_a_thousand_concurrent_transfers_stay_apart():
    wires = [(0, 1, [1])] * 1100 + [(0, 1, [2])]
    case = toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention="none")
    assert_tracks_do_not_overlap(trace_of(case), "wide")


def test_arrows_lead_from_the_producer_over_the_transfer_to_the_first_reader():
    case = toy([1, 1, 2, 2], [(0, 3, [2, 3])], [0, 1, 1, 1], order="ready", priorities=[0, 0, 2, 1])
    events = trace_of(case)
    names = track_names(events)
    flows = of_kind(events, "s", "t", "f")
    assert [(flow["ph"], names[flow["pid"], flow["tid"]], flow["ts"]) for flow in flows] == [
        ("s", f"d0 ({V100})", pytest.approx(0.5e6)),  # inside the producer
        ("t", "d0 -> d1", pytest.approx(1e6)),
        ("f", f"d1 ({V100})", pytest.approx(4e6)),  # op 3, which runs first
    ]
    assert {flow["id"] for flow in flows} == {0}


def test_an_arrow_ends_on_the_device_that_its_transfer_leads_to():
    case = toy([1, 1, 1], [(0, 3, [1, 2])], [0, 2, 1], links=STAR)  # first to d1, then to d2
    events = trace_of(case)
    ends = [(flow["tid"], flow["ts"]) for flow in of_kind(events, "f")]
    assert ends == [(1, pytest.approx(4e6)), (2, pytest.approx(7e6))]


def test_slices_tell_module_phase_and_bytes():
    builder = GraphBuilder("g")
    first = builder.op("a", module="net.0", seconds=1.0, outputs=[Out(10**6)])
    builder.op("b", phase=Phase.B, inputs=builder.outputs(first), seconds=1.0)
    graph = builder.build(measured_on=V100)
    plan = Plan.from_placement(graph, CLUSTER, Job(), [0, 3])
    events = chrome_trace(CLUSTER, simulate(graph, CLUSTER, Job(), plan))
    args = {event["name"]: event["args"] for event in of_kind(events, "X")}
    assert args["a"] == {"module": "net.0", "phase": "F"}
    assert args["b"] == {"module": "", "phase": "B"}
    assert args["a:0"]["bytes"] == 10**6


def test_bytes_are_those_that_travel_where_a_measured_graph_is_scaled():
    graph = OpGraph.from_edges(
        [("a", 1.0), ("b", 1.0)], [("a", "b", 1000)], measured_on=V100, batch=8
    )
    job = Job(batch=16, assume_linear=True)
    plan = Plan.from_placement(graph, CLUSTER, job, [0, 1])
    events = chrome_trace(CLUSTER, simulate(graph, CLUSTER, job, plan))
    (transfer,) = (event for event in of_kind(events, "X") if event["pid"] == 1)
    assert transfer["args"]["bytes"] == 2000


def test_copies_of_the_model_are_shown_with_the_sums_of_their_gradients():
    graph, job = step(2, batch=8, measured_on=V100), Job(batch=8, assume_linear=True)
    names = ["gpu0", "gpu1"]
    plan = Plan.data_parallel(graph, CLUSTER, job, names)
    result = simulate(graph, CLUSTER, job, plan)
    found = windows(chrome_trace(CLUSTER, result))
    for copy, name in enumerate(names):  # 0.5 ms forward and 1 ms backward a layer
        slices = found[f"{name} ({V100})"]
        assert [slice_[:2] for slice_ in slices[:4]] == [
            (f"f0 (copy {copy})", 0.0),
            (f"f1 (copy {copy})", pytest.approx(500)),
            (f"b1 (copy {copy})", pytest.approx(1000)),
            (f"b0 (copy {copy})", pytest.approx(2000)),
        ]
        assert {slice_[0] for slice_ in slices[4:]} == {f"u0 (copy {copy})", f"u1 (copy {copy})"}
    sums = found["collectives (1)"]
    assert [name for name, *_ in sums] == ["all-reduce of bucket 0", "all-reduce of bucket 1"]
    assert 2000 < sums[0][1] < 2000 + 100  # the latency later
    assert sums[1][1] > 3000
    assert sum(duration for _, _, duration in sums) < result.collective_time * 1e6
    args = [e["args"]["requested_us"] for e in of_kind(chrome_trace(CLUSTER, result), "X")
            if e["pid"] == 2]  # fmt: skip
    assert args == [pytest.approx(2000), pytest.approx(3000)]


# on any problem


def assert_tracks_do_not_overlap(events: list[Event], label: str) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of_kind(events, "X"):
        assert event["dur"] >= 0.0, label
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(slices)):
            assert end <= begin * (1 + 1e-12), label  # us; the sum rounds


def assert_all_is_there(case: Case, result: Result, events: list[Event], label: str) -> None:
    assert result.run is not None
    slices = of_kind(events, "X")
    computes = [event["name"] for event in slices if event["pid"] == 0]
    assert computes == list(case.graph.op_names), label
    transfers = result.run.transfers()
    hops = sum(len(case.cluster.route(t.source, t.target)) for t in transfers)
    assert sum(event["pid"] == 1 for event in slices) == hops, label
    flows = of_kind(events, "s", "t", "f")
    assert [(flow["id"], flow["ph"]) for flow in sorted(flows, key=lambda f: f["id"])] == [
        (number, ph) for number in range(len(transfers)) for ph in "stf"
    ], label
    names = track_names(events)
    assert {(event["pid"], event["tid"]) for event in slices + flows} <= set(names), label
    assert len(set(names.values())) == len(names), label


@pytest.mark.parametrize("options", ALL_SETTINGS, ids=lambda s: f"{s.order}-{s.contention}")
def test_every_op_and_transfer_is_there_and_no_track_overlaps(options: Settings) -> None:
    for index in range(6):
        case = random_case(np.random.default_rng([SEED, index]))._replace(settings=options)
        result = played(case)
        events = chrome_trace(case.cluster, result)
        assert_all_is_there(case, result, events, f"case {index}")
        assert_tracks_do_not_overlap(events, f"case {index}")
        for event in events:
            assert event.get("ts", 0.0) >= 0.0


# files


def test_a_trace_file_is_json_and_names_are_escaped(tmp_path):
    name = 'a "quoted" \\ \n\x00\x1f\x7f</script> ünï🦜'
    graph = OpGraph.from_edges([(name, 1.0)], [], name=name, measured_on=V100, batch=8)
    plan = Plan.from_placement(graph, CLUSTER, Job(batch=8), [0])
    path = tmp_path / "trace.json"
    write_trace(path, CLUSTER, simulate(graph, CLUSTER, Job(batch=8), plan))
    raw = path.read_bytes()
    assert not any(byte < 0x20 for byte in raw)
    document = json.loads(raw)
    assert document["otherData"] == {"graph": name, "cluster": "4xV100-NVLink"}
    assert document["displayTimeUnit"] == "ms"
    assert name in [event["name"] for event in document["traceEvents"]]


def test_a_trace_file_holds_the_trace(tmp_path):
    case = random_case(np.random.default_rng([SEED, 2]))
    result, path = played(case), tmp_path / "trace.json"
    write_trace(path, case.cluster, result)
    events = json.loads(path.read_bytes())["traceEvents"]
    assert events == chrome_trace(case.cluster, result)


@pytest.mark.parametrize(
    ("name", "reason"), [("none/trace.json", "No such file"), ("", "Is a dir"), ("a\0b", "null")]
)
def test_a_trace_that_cannot_be_written_says_why(tmp_path, name, reason):
    case = toy([1], [], [0])
    with pytest.raises(PlanError, match=f"cannot write the trace: .*{reason}"):
        write_trace(tmp_path / name, case.cluster, played(case))
