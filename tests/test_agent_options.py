"""``--checkpoint`` is read before a search begins."""

from pathlib import Path

import pytest

from agents.agent_options import SHIPPED
from simcore.cli import main


@pytest.mark.parametrize(
    ("content", "reason", "status"),
    [(b"junk", "not a checkpoint", 1), (None, "there is no checkpoint", 2)],
)
def test_a_bad_checkpoint_is_refused_before_the_search(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    reason: str,
    status: int,
) -> None:
    path = tmp_path / "x.pt"
    if content is not None:
        path.write_bytes(content)
    words = ["plan", "vgg-19", "--cluster", "local", "--agent", "mars", "--checkpoint", str(path)]
    assert main([*words, "--out", str(tmp_path / "plan.json")]) == status
    told = capsys.readouterr().err
    assert reason in told
    assert "capturing" not in told


def test_a_checkpoint_of_another_system_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "vgg-19", "--cluster", "local", "--agent", "eagle"]
    words += ["--checkpoint", str(SHIPPED / "mars.pt"), "--out", str(tmp_path / "plan.json")]
    assert main(words) == 2
    assert "a network of mars, not eagle" in capsys.readouterr().err
