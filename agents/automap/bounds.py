"""What no plan of a sharded space beats, under stated assumptions.

Assumed: the space is that of one mesh and one choice for all layers of a stack; a device computes
one op at a time, an op takes what the profile says of its share, and a device runs one collective
at a time (``contention="ordered"``), all groups of an axis theirs at the same time. Then a step
takes at least what a device computes, and at least what its collectives keep the link busy for, so
at least any mean of the two. The least of that mean over all plans is found exactly, for several
weights, and the largest is the bound. What has to wait for what is not looked at.
"""

from agents.automap.additive import Additive
from agents.automap.eliminate import eliminate
from simcore.bounds import ROUNDING

_WEIGHTS = (1.0, 0.9, 0.75, 0.5, 0.25)


def mesh_bound(additive: Additive) -> float:
    """Returns seconds that no plan of a space beats.

    Raises:
        PlanError: the decisions are too entangled.
    """
    sizes = [len(values) for values in additive.values]
    values = [
        eliminate(sizes, additive.scopes, additive.weighted(weight)).value for weight in _WEIGHTS
    ]
    return max(0.0, *values) * (1.0 - ROUNDING)
