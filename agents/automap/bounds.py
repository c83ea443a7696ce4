"""What no plan of a sharded space beats, under stated assumptions.

Assumed: the space is that of one mesh and one choice for all layers of a stack; a device computes
one op at a time, an op takes what the profile says of its share; collectives along one axis, and
the sums of gradients over copies, share a busiest link, so that they take at least their durations
one after another, all groups of an axis theirs at the same time. Then a step takes at least what a
device computes, and at least what the collectives along each axis keep their link busy for, so at
least any mean of these, whether collectives wait for each other or not. The least of such a mean
over all plans is found exactly; the weights climb to where it is largest (the Lagrangian dual,
Held and Karp 1970). What has to wait for what, and that plans have to fit, is not looked at.
"""

import numpy as np

from agents.automap.additive import Additive
from agents.automap.eliminate import eliminate
from simcore.bounds import ROUNDING

_QUANTITIES = 4
_STEPS = (0.5, 0.25, 0.1, 0.05)  # of weight that is moved


def mesh_bound(additive: Additive) -> float:
    """Returns seconds that no plan of a space beats.

    Raises:
        PlanError: the decisions are too entangled.
    """
    corners = np.eye(_QUANTITIES)
    values = [_least(additive, corner) for corner in corners]
    weights, best = corners[int(np.argmax(values))], max(0.0, *values)
    for step in _STEPS:
        improves = True
        while improves:
            improves = False
            for corner in corners:
                moved = (1.0 - step) * weights + step * corner
                value = _least(additive, moved)
                if value > best * (1.0 + 1e-6):
                    weights, best, improves = moved, value, True
    return best * (1.0 - ROUNDING)


def _least(additive: Additive, weights: np.ndarray) -> float:
    """Returns the least of a mean over all plans, s."""
    sizes = [len(values) for values in additive.values]
    return eliminate(sizes, additive.scopes, additive.weighted(weights.tolist())).value
