"""Sizes that a source's text gives and its rows lack.

- BLOOM's tuning runs of 18 billion parameters have layers and width; heads are the 64 that every
  run of that width and day has. The larger ones that state a number of parameters alone (191 to 205
  billion) fit several widths, and are not guessed.
- The 52 billion parameters on V100 are the 64 layers of 8,192 with 32 heads of the logs that the
  same project keeps of that run.
- Megatron-LM's first version: widths and heads are those of the paper's table (Shoeybi et al.,
  2019); layers follow from the stated parameters, which gives the table's where both are known.
"""

from dataclasses import replace

from calibration.published.rows import Run

_BIGSCIENCE = "bigscience-workshop/bigscience"
_MEGATRON_V1 = "nv-adlr.github.io/MegatronLMV1"
_FIRST_MEGATRON = {"1.2": (1536, 16), "2.5": (1920, 20), "4.2": (2304, 24), "8.7": (3072, 32)}
_VOCABULARY = 51_200


def filled(run: Run) -> Run:
    """Returns a run with the sizes that its source's text gives; as it is where there are none."""
    if run.source == _BIGSCIENCE:
        return _bigscience(run)
    return _first_megatron(run) if run.source == _MEGATRON_V1 else run


def _bigscience(run: Run) -> Run:
    if run.hidden == 14_336 and run.layers and not run.heads:
        return replace(run, heads=64)
    if run.part == "v100" and run.parameters == 52 and not run.layers:
        return replace(run, layers=64, hidden=8192, heads=32)
    return run


def _first_megatron(run: Run) -> Run:
    """Returns a run with the sizes that its parameters, in billions, lead to."""
    stated = f"{run.parameters:g}"
    if run.layers or stated not in _FIRST_MEGATRON:
        return run
    width, heads = _FIRST_MEGATRON[stated]
    layers = round((run.parameters * 1e9 - _VOCABULARY * width) / (12 * width**2))
    return replace(run, layers=layers, hidden=width, heads=heads, length=run.length or 1024)
