"""Published runs that say how a model scales: nodes, relative times, and stated intervals."""

import dataclasses

import numpy as np
import pytest

from calibration.published import other_sources
from calibration.published.blocking import message_times, with_stops
from calibration.published.described import Described
from calibration.published.node_clusters import THROUGH_HOST, node_cluster
from calibration.published.prediction import Step
from calibration.published.reading import describe_run
from calibration.published.rows import Run
from calibration.published.scaling import (
    known_factors,
    known_reference,
    references,
    scaling_errors,
    stated_scaling,
)
from calibration.published.spread import DECILE, share_inside, spread_of
from simcore.signature import Phase
from simcore.uncertainty import Spread

RUN = Run(
    id="e2e-1", source="petuum/adaptdl", part="all", task="train", model="cifar10",
    parameters=0.0, layers=0, hidden=0, heads=0, length=0, gpu="T4", num_gpus=5, per_node=0,
    precision="", global_batch=160, micro_batch=32, tp=1, pp=1, dp=5, vpp=0, cp=0, ep=0,
    sharding="", recompute="", schedule="", placement="GPUs used on each node: 1+4", seconds=0.1,
    notes="",
)  # fmt: skip


def changed(**fields: object) -> Run:
    return dataclasses.replace(RUN, **fields)


def test_the_slowest_of_more_workers_is_slower() -> None:
    assert other_sources.largest_of(1) == pytest.approx(0.0, abs=1e-6)
    assert other_sources.largest_of(2) == pytest.approx(np.pi**-0.5, abs=1e-4)
    assert other_sources.largest_of(8) > other_sources.largest_of(4)


def test_gpus_without_a_direct_path_send_through_their_node() -> None:
    run = changed(
        source="stanford-futuredata/gavel", gpu="K80", num_gpus=2, placement="consolidated"
    )
    cluster = node_cluster(run)
    assert cluster is not None
    assert {(link.kind, link.bandwidth) for link in cluster.links} == {("", THROUGH_HOST / 2)}


def test_a_node_sends_more_to_two_others_than_to_one() -> None:
    cluster = node_cluster(changed(placement="GPUs used on each node: 1+1+1", num_gpus=3))
    assert cluster is not None
    ports = [link for link in cluster.links if link.b.endswith("port")]
    between = {link.bandwidth for link in ports if link.a.endswith("port")}
    out = {link.bandwidth for link in ports if link.a.endswith("switch")}
    assert len(between) == len(out) == 1
    assert min(between) < min(out) < 2 * min(between)
    alone = node_cluster(changed(placement="GPUs used on each node: 4", num_gpus=4))
    assert alone is not None
    assert alone.switches == ("node0.switch",)


@pytest.mark.parametrize(
    ("placement", "num_gpus", "others"), [("1", 1, 0), ("4", 4, 3), ("1+3", 4, 2)]
)
def test_gpus_that_share_a_node_slow_the_loading_of_large_images(
    placement: str, num_gpus: int, others: int
) -> None:
    run = changed(
        placement=f"GPUs used on each node: {placement}", num_gpus=num_gpus, model="yolov3",
        dp=num_gpus, micro_batch=8, global_batch=8 * num_gpus,
    )  # fmt: skip
    described = describe_run(run)
    assert isinstance(described, Described)
    assert described.idle == pytest.approx(others * other_sources.CROWDED)
    assert isinstance(other := describe_run(dataclasses.replace(run, model="cifar10")), Described)
    assert other.idle == 0.0


def test_spread_workers_have_a_node_each() -> None:
    run = changed(
        source="stanford-futuredata/gavel", gpu="P100", num_gpus=4,
        placement="unconsolidated (workers spread over several servers)",
    )  # fmt: skip
    cluster = node_cluster(run)
    assert cluster is not None
    assert len({device.node for device in cluster.devices}) == 4


def test_messages_that_share_a_port_take_as_many_times_as_long() -> None:
    slow = changed(placement="GPUs used on each node: 2+2", num_gpus=4)
    cluster = node_cluster(slow)
    assert cluster is not None
    one, two = (
        message_times(cluster, [(0, 2)], 10**8),
        message_times(cluster, [(0, 2), (1, 3)], 10**8),
    )
    assert two[0] == two[1] == pytest.approx(2 * one[0], rel=0.01)
    inside = message_times(cluster, [(0, 1), (2, 3)], 10**8)
    assert inside[0] == inside[1] < one[0]


def test_stages_that_stop_for_a_message_have_its_time_and_send_nothing() -> None:
    run = changed(
        source="eth-easl/sailor", model="OPT-350M", gpu="2xRTX-3090+2xTitan-RTX", num_gpus=4, tp=2,
        pp=2, dp=1, layers=2, hidden=64, heads=4, length=16, global_batch=8, micro_batch=2,
        placement='[{"layers":2,"replicas":[{"gpus":[["RTX-3090",2]],"tp":2}]},'
        '{"layers":2,"replicas":[{"gpus":[["Titan-RTX",2]],"tp":2}]}]',
    )  # fmt: skip
    cluster, described = node_cluster(run), describe_run(run)
    assert cluster is not None
    assert isinstance(described, Described)
    free = Step(cluster, described._replace(splits=False), 0.0).pipeline()
    stopped = with_stops(free.tables, cluster, free.devices)
    num_bytes = int(free.tables[0].forward_bytes.sum())
    assert num_bytes == int(free.tables[0].backward_bytes.sum()) > 0
    took = message_times(cluster, [(0, 2), (1, 3)], num_bytes)
    for stage, kind in enumerate(("RTX-3090-24GB", "Titan-RTX-24GB")):
        place = stopped[stage].kinds.index(kind)
        more = stopped[stage].seconds[stage] - free.tables[stage].seconds[stage]
        assert more[Phase.F, place] == pytest.approx(took[0])
        assert more[Phase.B, place] == pytest.approx(took[0])
        assert more[Phase.U].max() == 0.0
    assert stopped[0].forward_bytes.sum() == stopped[0].backward_bytes.sum() == 0


def test_a_run_is_held_against_the_fewest_gpus_with_as_many_samples_each() -> None:
    runs = [
        changed(num_gpus=1, global_batch=32, seconds=0.1),
        changed(num_gpus=1, global_batch=64, micro_batch=64, seconds=0.2),
        changed(num_gpus=4, global_batch=128, seconds=0.15),
        changed(num_gpus=2, global_batch=32, micro_batch=16, seconds=0.1),
    ]
    assert references(runs) == {2: [0], 3: [0, 1]}
    right = scaling_errors(runs, [run.seconds * 3 for run in runs])
    assert right["cases"] == 2
    assert right["mean"] == pytest.approx(0.0, abs=1e-12)
    assert scaling_errors(runs, [0.1, 0.2, 0.3, 0.1])["mean"] == pytest.approx(0.5)
    assert scaling_errors(runs[:1], [0.1])["mean"] is None


def test_a_relative_time_is_inside_where_it_is_as_predicted_and_outside_where_far_off() -> None:
    one = changed(
        model="ncf", num_gpus=1, dp=1, global_batch=64, micro_batch=64, seconds=0.007,
        placement="GPUs used on each node: 1",
    )  # fmt: skip
    four = dataclasses.replace(
        one, num_gpus=4, dp=4, global_batch=256, placement="GPUs used on each node: 1+1+1+1"
    )
    factors = known_factors([one, four])
    known = known_reference([one, four], factors)
    assert known[0] == pytest.approx(one.seconds, rel=1e-3)
    assert factors[0] == factors[1]
    for times, inside in ((1.0, 1.0), (2.0, 0.0)):
        runs = [one, dataclasses.replace(four, seconds=known[1] * times)]
        found = stated_scaling(runs, factors, known)
        assert (found["stated_coverage"], found["stated_cases"]) == (inside, 1)


def test_a_source_may_say_itself_how_far_its_runs_differ() -> None:
    plain, spread = Spread(machine=0.1), Spread(machine=0.0)
    assert spread_of(RUN, plain) == plain
    wide = spread_of(changed(notes="Jean Zay; authors: results +/-40%; TFLOPs 23.2;"), spread)
    assert np.exp(wide.machine * DECILE) == pytest.approx(1.4)
    assert spread_of(changed(notes="+/-10%"), plain).machine > plain.machine


def test_a_share_of_few_runs_is_known_less_well_than_one_of_many() -> None:
    few, many = share_inside([True, True, True, False]), share_inside([True] * 30 + [False] * 10)
    assert few["stated_coverage"] == many["stated_coverage"] == 0.75
    widths = [found["stated_range"][1] - found["stated_range"][0] for found in (few, many)]
    assert widths[0] > widths[1] > 0
    assert share_inside([])["stated_coverage"] is None
