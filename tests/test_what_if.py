"""What-if: changes that must show, changes that must not, and their order."""

import msgspec
import numpy as np
import pytest

from simcore.cluster import Cluster
from simcore.errors import UsageError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.path_text import path_text
from simcore.plan import Plan
from simcore.simulation import simulate
from simcore.what_if import Change, asked_change, what_if
from tests.networks import star

MB = 10**6


def ask(
    ops: dict[str, float], edges: list[tuple[str, str, int]], places: list[int], cluster: Cluster
) -> tuple[float, dict[str, Change]]:
    """Returns the step time of a placement, and the changes by what they are."""
    graph, job = OpGraph.from_edges(ops, edges), Job()
    plan = Plan.from_placement(graph, cluster, job, places)
    result = simulate(graph, cluster, job, plan)
    changes = what_if(graph, cluster, job, plan, result)
    assert [change.saved for change in changes] == sorted(
        (change.saved for change in changes), reverse=True
    )
    return result.step_time, {change.what: change for change in changes}


def test_a_transfer_in_half_the_time_saves_half_of_it():
    step, changes = ask({"a": 1.0, "b": 2.0}, [("a", "b", 1000 * MB)], [0, 1], star(2))
    assert step == pytest.approx(4.0)  # 1 GB at 1 GB/s between them
    assert changes["the 2 1 GB/s links in use twice as fast"].saved == pytest.approx(0.5)
    assert changes["the link d0 - hub twice as fast"].saved == pytest.approx(
        0.0
    )  # the other is slow
    assert changes["the 2 V100-SXM2-16GB in use twice as fast"].saved == pytest.approx(1.5)
    assert changes["the ops of b in half the time"].saved == pytest.approx(1.0)
    assert changes["the ops of a in half the time"].saved == pytest.approx(0.5)


def test_what_is_not_waited_for_saves_nothing():
    ops = {"a": 1.0, "long": 9.0, "short": 1.0, "end": 1.0}
    edges = [("a", "long", 8), ("a", "short", MB), ("long", "end", 8), ("short", "end", MB)]
    step, changes = ask(ops, edges, [0, 0, 1, 0], star(2))
    links = changes["the 2 1 GB/s links in use twice as fast"]
    assert links.saved == pytest.approx(0.0)
    assert links.text(step).endswith("no gain")
    assert "the ops of short in half the time" not in changes
    best = next(iter(changes.values()))
    assert best.what.startswith("the 2 V100") or "long" in best.what


def test_everything_on_one_device_uses_no_links():
    _, changes = ask({"a": 1.0, "b": 2.0}, [("a", "b", MB)], [0, 0], star(2))
    assert not [what for what in changes if "link" in what]
    assert "the V100-SXM2-16GB twice as fast" in changes


def test_a_change_is_told_in_a_sentence():
    text = Change("the PCIe3x16 link twice as fast", 0.9, 0.1).text(1.0)
    assert text == "the PCIe3x16 link twice as fast: 900 ms a step, 10.0% less"


def test_free_launches_are_not_asked_for_where_they_are_free():
    graph, cluster, job = OpGraph.from_edges({"a": 1.0}, []), star(2), Job()
    plan = Plan.from_placement(graph, cluster, job, np.zeros(1, int))
    for launch, wanted in (("eager", 1), ("graph", 0)):
        settings = msgspec.structs.replace(plan.settings, launch=launch)
        result = simulate(graph, cluster, job, plan, settings=settings)
        changes = what_if(graph, cluster, job, plan, result, settings)
        assert sum("launches" in change.what for change in changes) == wanted


def answer(question: str) -> float:
    """Returns what a question saves of a step of 1 s on d0, 1 s of transfer and 2 s on d1."""
    graph = OpGraph.from_edges({"a": 1.0, "b": 2.0}, [("a", "b", 1000 * MB)])
    cluster, job = star(2), Job()
    plan = Plan.from_placement(graph, cluster, job, [0, 1])
    result = simulate(graph, cluster, job, plan)
    return asked_change(graph, cluster, job, plan, result, None, question).saved


@pytest.mark.parametrize(
    ("question", "saved"),
    [
        ("b", 1.0),
        ("b=4", 1.5),
        ("a = 0.5", -1.0),
        ("V100-SXM2-16GB", 1.5),
        ("d0-hub", 0.0),  # the other link is as slow as before
        ("hub - d0=4", 0.0),
    ],
)
def test_a_change_can_be_named(question: str, saved: float) -> None:
    assert answer(question) == pytest.approx(saved)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("c", "no link, kind of link or device, stage, module or op"),
        ("V100-SXM2-32GB", "did you mean V100-SXM2-16GB"),
        ("d0-d1", "did you mean d0-hub"),
        ("a=fast", "'fast' is no positive number"),
        ("a=0", "'0' is no positive number"),
        ("a=inf", "'inf' is no positive number"),
        ("stage0", "of this plan$"),  # the only one: no hint to what is no answer
        ("=2", "names nothing"),
        (" ", "names nothing"),
    ],
)
def test_what_is_not_there_cannot_be_faster(question: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        answer(question)


def test_the_critical_path_is_told_in_words() -> None:
    graph = OpGraph.from_edges({"a": 1.0, "b": 2.0}, [("a", "b", 1000 * MB)])
    cluster, job = star(2), Job()
    result = simulate(graph, cluster, job, Plan.from_placement(graph, cluster, job, [0, 1]))
    chain, modules = path_text(result)
    assert chain == (
        "a chain of 3 tasks: computing 75.0% (d1 50.0%, d0 25.0%), transfers 25.0% (d0 -> d1 25.0%)"
    )
    assert modules == "most of its computing is in b 2 s, a 1 s"
