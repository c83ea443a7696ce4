"""Pictures of a validation: predicted against measured seconds, one file for each source."""

from pathlib import Path

import numpy as np

from calibration.validate import Score, Validation
from simcore.errors import UsageError

_MOST = 20_000  # points of one picture


def draw(validation: Validation, folder: Path) -> list[Path]:
    """Writes the pictures as PNG and returns their paths.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import

        mpl.use("agg")
    except ImportError:
        raise UsageError(
            "pictures need matplotlib: pip install 'placewright[plot]' (or leave out --out)"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _picture(name, score, folder)
        for name, score in sorted(validation.scores.items())
        if score.predicted
    ]


def _picture(name: str, score: Score, folder: Path) -> Path:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    step = max(1, len(score.predicted) // _MOST)
    measured = np.array(score.measured[::step])
    predicted = np.array(score.predicted[::step])
    labels = np.array(score.labels[::step])
    for label in sorted(set(score.labels[::step])):
        chosen = labels == label
        axes.plot(measured[chosen], predicted[chosen], ".", markersize=3, alpha=0.4, label=label)
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title=name)
    axes.legend(fontsize="small", markerscale=3)
    path = folder / f"{name.replace('/', '-')}.png"
    figure.savefig(path, dpi=120)
    return path
