import math
from typing import Any

import msgspec
import pytest

from simcore.errors import JobError
from simcore.job import Job


@pytest.mark.parametrize(
    ("optimizer", "precision", "total"),
    [
        # parameter + gradient + state (+ master copy), bytes per parameter
        ("sgd", "fp32", 4 + 4 + 0),
        ("momentum", "fp32", 4 + 4 + 4),
        ("adam", "fp32", 4 + 4 + 8),
        ("sgd", "bf16", 2 + 2 + 0 + 4),
        ("momentum", "fp16", 2 + 2 + 4 + 4),
        ("adam", "bf16", 2 + 2 + 8 + 4),  # the 16 bytes of mixed-precision training
        ("adamw", "fp16", 2 + 2 + 8 + 4),
    ],
)
def test_bytes_per_parameter_are_those_known(optimizer: Any, precision: Any, total: int) -> None:
    job = Job(optimizer=optimizer, precision=precision)
    assert 2 * job.parameter_bytes + job.state_bytes_per_element() == total


@pytest.mark.parametrize(
    ("job", "traffic"),
    [
        (Job(optimizer="sgd"), 4 + 4 + 4),  # read parameter and gradient, write parameter
        (Job(optimizer="adam"), 2 * 4 + 4 + 2 * 8),  # and read and write two moments
        (Job(optimizer="adam", precision="bf16"), 2 * 2 + 2 + 2 * 12),
        (Job(optimizer="sgd", clip_norm=1.0), 12 + 4),  # gradients are read once more
        (Job(optimizer="sgd", clip_norm=1.0, loss_scaling=True), 12 + 8),
    ],
)
def test_an_update_moves_what_it_must(job: Job, traffic: int) -> None:
    assert job.update_traffic_per_element() == traffic


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"batch": None},
        {"sequence_length": 128},
        {"optimizer": "adamw"},
        {"precision": "bf16"},
        {"assume_linear": True},
        {"clip_norm": 1.0},
        {"loss_scaling": True},
    ],
)
def test_the_hash_changes_with_every_field(change: dict[str, Any]) -> None:
    job = Job(batch=1)
    assert job.replace(**change).content_hash() != job.content_hash()
    assert job.replace(**change) == job.replace(**change)
    assert len(job.content_hash()) == 16


def test_equal_jobs_have_equal_hashes() -> None:
    assert Job(batch=8, clip_norm=1).content_hash() == Job(clip_norm=1.0, batch=8).content_hash()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 0}, "batch must be between 1 and"),
        ({"batch": -4}, "batch must be between 1 and"),
        ({"batch": 2**41}, "batch must be between 1 and"),
        ({"batch": "many"}, r"Expected `int \| null`.*batch"),
        ({"batch": 1.5}, r"Expected `int \| null`.*batch"),
        ({"sequence_length": 0}, "sequence_length must be between"),
        ({"optimizer": "adagrad"}, "Invalid enum value 'adagrad'"),
        ({"precision": "fp8"}, "Invalid enum value 'fp8'"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_norm": math.nan}, "clip_norm must be positive"),
        ({"clip_norm": math.inf}, "clip_norm must be positive and finite"),
        ({"learning_rate": 0.1}, "unknown field `learning_rate`"),
    ],
)
def test_a_bad_change_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=f"^job: .*{reason}"):
        Job(batch=8).replace(**change)


def test_a_bad_job_is_refused_when_made_and_when_read() -> None:
    with pytest.raises(JobError, match="batch"):
        Job(batch=0)
    for wrong in (1.5, True, "8"):
        with pytest.raises(JobError, match="batch must be a whole number"):
            Job(batch=wrong)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="precision must be one of fp32, bf16, fp16, not 'fp8'"):
        Job(precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="batch"):
        msgspec.json.decode(b'{"batch": 0}', type=Job)


def test_a_job_survives_a_file() -> None:
    job = Job(batch=3, optimizer="momentum", precision="fp16", clip_norm=0.1, loss_scaling=True)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
