"""What a learner says about itself, under the same names always: JSON lines, and TensorBoard.

A reader tells a sick run from a healthy one by them: entropy that falls to 0 at once, a clip
fraction near 1 or an approximate KL that never stays small are signs of steps that are too long.
"""

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from simcore.atomic import write_whole

FILE = "diagnostics.jsonl"


class Diagnostics(NamedTuple):
    """One iteration of a learner; NaN where a number does not apply."""

    iteration: int  # from 1
    life: int  # from 1: a policy that finds nothing better any more begins again
    evaluations: int  # placements simulated so far
    evaluations_per_second: float  # of this iteration, the update included
    best_step_time: float  # s of the best placement so far that fits, inf = none
    mean_step_time: float  # s over this iteration's placements that fit
    mean_reward: float  # over the same
    fits: float  # fraction of this iteration's placements that fit
    entropy: float  # nats per decision before the update
    approx_kl: float  # per decision, between the policies after and before the update
    clip_fraction: float  # of ratios that the surrogate cuts, last epoch
    explained_variance: float  # of what followed, by the values
    policy_loss: float  # last epoch
    value_loss: float  # last epoch
    gradient_norm: float  # before clipping, last epoch
    epochs: int  # passes over the samples before the KL limit stopped them


class Journal:
    """Writes diagnostics into a folder; TensorBoard's too where the extra ``tb`` is installed."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Opens the journal.

        Args:
            folder: where it lies; made if it is missing.
            after: iteration that a resumed run begins after; what was written of later ones is
                dropped, since it will be written again. 0 begins a new journal.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        kept = _lines(self.path, after) if self.path.exists() else []
        write_whole(self.path, "".join(f"{line}\n" for line in kept).encode())
        self._board = _tensorboard(folder, after)

    def write(self, diagnostics: Diagnostics) -> None:
        """Appends one iteration; a reader sees it at once."""
        values = diagnostics._asdict()
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(known) + "\n")
        if self._board is not None:
            for name, value in known.items():
                if value is not None and name != "iteration":
                    self._board.add_scalar(name, value, diagnostics.iteration)
            self._board.flush()

    def close(self) -> None:
        """Ends the journal."""
        if self._board is not None:
            self._board.close()


def _lines(path: Path, after: int) -> list[str]:
    """Returns the lines up to an iteration; one that was cut short by a crash ends them."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            iteration = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError):
            break
        if iteration > after:
            break
        kept.append(line)
    return kept


def _tensorboard(folder: Path, after: int) -> Any | None:
    """Returns TensorBoard's writer, None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    module = importlib.import_module("torch.utils.tensorboard")
    return module.SummaryWriter(str(folder), purge_step=after + 1)
