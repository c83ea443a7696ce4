"""Rows of Megatron-Bridge: why none is predicted."""

from collections import Counter
from pathlib import Path

import pytest

from calibration.published.described import Described
from calibration.published.reading import describe_run
from calibration.published.rows import read_runs

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
REASONS = {"products in 8 bits", "products in 4 bits", "no step time can be derived"}


def test_every_row_is_refused_for_its_precision_or_for_want_of_a_step() -> None:
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    said = Counter[str]()
    for run in read_runs(DATA / "e2e"):
        if run.source == "NVIDIA-NeMo/Megatron-Bridge":
            described = describe_run(run)
            said[described.reason if not isinstance(described, Described) else "read"] += 1
    assert said["products in 8 bits"] > said["products in 4 bits"] > 0
    assert set(said) <= REASONS
