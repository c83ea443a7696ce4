"""Ops of a model that really runs are those of its graph; here, in this process."""

from collections import Counter

import pytest
import torch

from calibration.collect.call_times import CallTimer, plain_step, timed_step
from calibration.collect.matching import OpTimes, expected_calls, match
from calibration.collect.models import Step, real_step, workload
from calibration.collect.probes import launch_time
from calibration.collect.whole_ops import whole_kernels
from simcore.errors import JobError, UsageError
from simcore.frontends.torch_private import composite_kernels
from simcore.graph import OpClass
from simcore.sources import load_graph

MIXED = "tests.collect_models:mixed"


def timed(model: str, batch: int, passes: int = 2) -> tuple[Step, OpTimes]:
    work = workload(model, batch, {"optimizer": "adam"})
    step = real_step(work, "cpu")
    calls = [timed_step(step, "cpu") for _ in range(passes)]
    expected = expected_calls(step.source, batch)
    return step, match(expected, calls, work.job.update_traffic_per_element())


def signatures(model: str, batch: int) -> Counter:
    """Counts the ops of the captured graph by what is known of them, updates and views left out."""
    graph, _, _ = load_graph(model, {"batch": batch})
    found: Counter = Counter()
    for op, number in enumerate(graph.signature.tolist()):
        if number < 0 or graph.op_class[op] in (OpClass.UPDATE, OpClass.VIEW, OpClass.INPUT):
            continue
        s = graph.signatures[number]
        dims = tuple((name, s.dim(name, batch)) for name, _, _ in s.dims)
        what = (graph.op_targets[op], s.op_class, s.dtype, dims, s.factor)
        found[*what, s.traffic_bytes(batch), int(graph.kernels[op])] += 1
    return found


@pytest.mark.parametrize("batch", [2, 3])
def test_every_op_of_the_graph_is_timed_under_its_own_signature(batch: int) -> None:
    _, times = timed(MIXED, batch)
    seen = Counter((*op[:6], op.kernels) for op in times.ops if op.op_class != "update")
    assert seen == signatures(MIXED, batch)
    assert times.missing == 0
    kept_whole = {"attention", "lstm_layer", "lstm_layer_backward", "gru_layer"}
    assert kept_whole <= {op.target for op in times.ops}
    assert all(op.seconds > 0 for op in times.ops)


def test_updates_share_the_optimizers_time_by_elements() -> None:
    step, times = timed("tests.collect_models:layers", 2)
    updates = [op for op in times.ops if op.op_class == "update"]
    assert len(updates) == len(list(step.model.parameters()))
    by_elements = {dict(op.dims)["elements"]: op for op in updates}
    weight, bias = by_elements[384**2], by_elements[384]
    assert weight.seconds / bias.seconds == pytest.approx(384)
    assert weight.traffic == 384**2 * 28  # Adam in fp32: read and write p, m, v; read g


@pytest.mark.parametrize("model", [MIXED, "tests.collect_models:cell"])
def test_gradients_are_those_of_the_model_as_it_is(model: str) -> None:
    step = real_step(workload(model, 2, {}), "cpu")
    step.model.dropout.p = 0.0
    step.forward().backward()
    plain = [p.grad.clone() for p in step.model.parameters()]
    timer = CallTimer("cpu")
    with composite_kernels(whole_kernels(timer)), timer:
        step.forward().backward()
    for parameter, gradient in zip(step.model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_launch_is_some_microseconds_and_most_of_it_is_the_call() -> None:
    found = launch_time("cpu", repeats=5)
    assert 0 < found.in_call <= found.per_op < 1e-3
    assert found.num_ops > 100


def test_a_plain_step_takes_time_of_the_core_and_of_the_wall() -> None:
    step = real_step(workload("tests.collect_models:layers", 1, {}), "cpu")
    found = plain_step(step, "cpu")
    assert 0 < found.core < 60
    assert found.issued <= found.wall


@pytest.mark.parametrize("text", ["bert-huge", "bert-base@", "bert-base@x"])
def test_a_model_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bert"):
        workload(text, 1, {})


def test_a_size_and_other_changes_are_part_of_the_job() -> None:
    work = workload("bert-base@64", 3, {"optimizer": "sgd"})
    assert (work.job.sequence_length, work.job.batch, work.job.optimizer) == (64, 3, "sgd")
    assert work.label == "bert-base@64 batch 3 sgd"
    with pytest.raises(JobError):
        workload("bert-base", 1, {"optimizer": "lion"})
