"""A placement space in groups -> the numbers a policy sees.

Simple features of each group; graph encoders add their own.
"""

import numpy as np
from numpy.typing import NDArray

from agents.planners.grouping import Grouping

FEATURES = ("work", "memory", "received", "sent", "units", "rank")


def group_features(grouping: Grouping) -> NDArray[np.float32]:
    """Returns features of every group, [group, feature], each 0 to 1; the names are `FEATURES`.

    Work (s on the best device), memory kept (bytes), bytes received from and sent to other groups
    and the number of units are told as square roots of their part of the greatest group's: small
    groups are then still told apart. The rank is the place in program order.
    """
    graph, space = grouping.space.problem.graph, grouping.space
    size = grouping.num_groups
    producer, consumer, tensor = graph.edges()
    source = grouping.group[graph.unit[producer]].astype(np.int64)
    target = grouping.group[graph.unit[consumer]].astype(np.int64)
    apart = np.flatnonzero(source != target)
    _, once = np.unique(tensor[apart].astype(np.int64) * size + target[apart], return_index=True)
    edge = apart[once]  # a tensor counts once for each group that reads it
    num_bytes = space.tensor_bytes[tensor[edge]].astype(np.float64)
    columns = (
        _total(grouping.group, space.work.min(axis=1), size),
        _total(grouping.group, space.memory, size),
        _total(target[edge], num_bytes, size),
        _total(source[edge], num_bytes, size),
        _total(grouping.group, np.ones(len(grouping.group)), size),
    )
    features = [np.sqrt(column / max(column.max(initial=0.0), 1e-300)) for column in columns]
    features.append(np.arange(size) / max(1, size - 1))
    return np.stack(features, axis=1).astype(np.float32)


def _total(
    label: NDArray[np.integer], values: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Sums values by label, [label]."""
    return np.bincount(label, values, size).astype(np.float64)
