"""Options and fixtures of the whole suite."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"  # public profiles, not part of the repository
NUM_CASES = 2000

settings.register_profile("placewright", deadline=None, derandomize=True, database=None)
settings.load_profile("placewright")

# profiles that a developer has collected must not decide what a test sees; subprocesses inherit it
HOME = tempfile.mkdtemp(prefix="placewright-tests-")
os.environ["PLACEWRIGHT_HOME"] = HOME


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("placewright")
    group.addoption(
        "--data",
        type=Path,
        default=DATA,
        metavar="DIR",
        help="folder of public profiles (default: %(default)s)",
    )
    group.addoption(
        "--cases",
        type=int,
        default=NUM_CASES,
        metavar="N",
        help="random problems on which compiled and reference are compared (default: %(default)s)",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def data(request: pytest.FixtureRequest) -> Path:
    """The folder of public profiles; a test that needs it is skipped where it is absent."""
    folder: Path = request.config.getoption("--data")
    if not folder.is_dir():
        pytest.skip(f"no public profiles at {folder}; point --data to them")
    return folder


@pytest.fixture
def num_cases(request: pytest.FixtureRequest) -> int:
    """Number of random problems on which compiled and reference are compared."""
    number: int = request.config.getoption("--cases")
    return number
