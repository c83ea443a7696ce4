"""Compiled: a sum tree, which draws items in proportion to their priorities in logarithmic time.

Schaul et al., Prioritized experience replay, 2016. A complete binary tree in one array: node 1 is
the root, node k has children 2k and 2k + 1, item i is node capacity + i; a node is the sum of its
children. Sums are made anew from the children, so errors do not add up.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])


def _compiled(function: Function) -> Function:
    return cast(
        Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)
    )


@_compiled
def set_priorities(
    tree: NDArray[np.float64], items: NDArray[np.int64], priorities: NDArray[np.float64]
) -> None:
    """Sets priorities, [item], and the sums above them.

    Args:
        tree: [2 x capacity]; capacity is a power of two.
        items: numbers of the items.
        priorities: 0 or more.
    """
    capacity = tree.shape[0] // 2
    for k in range(items.shape[0]):
        node = capacity + items[k]
        tree[node] = priorities[k]
        node //= 2
        while node >= 1:
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            node //= 2


@_compiled
def draw_items(tree: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns items, one from each of as many equal parts of the total priority, [draw].

    Args:
        tree: [2 x capacity], its total more than 0.
        uniform: 0 to below 1, [draw].
    """
    capacity, count = tree.shape[0] // 2, uniform.shape[0]
    items = np.empty(count, np.int64)
    for k in range(count):
        rest = (k + uniform[k]) / count * tree[1]
        node = 1
        while node < capacity:
            left = tree[2 * node]
            if (rest < left and left > 0.0) or tree[2 * node + 1] <= 0.0:
                node = 2 * node
            else:
                rest -= left
                node = 2 * node + 1
        items[k] = node - capacity
    return items
