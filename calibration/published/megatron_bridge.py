"""Rows of NVIDIA's Megatron-Bridge: all of them train in 8 or 4 bits, which no profile prices."""

from calibration.published.described import NotExpressible
from calibration.published.rows import Run


def read_bridge(run: Run) -> NotExpressible:
    """Returns why a run of Megatron-Bridge is not predicted."""
    name = run.precision.upper()
    if "FP4" in name:
        return NotExpressible("products in 4 bits")
    if "FP8" in name:
        return NotExpressible("products in 8 bits")
    return NotExpressible("no model family for this source")
