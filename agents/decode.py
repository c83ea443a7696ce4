"""Placements of a trained network without training: draws that hang together, and that fit.

Draws that are independent scatter groups, and every stray group costs transfers. Here half of the
placements decide all their groups by nearly the same random number: where the probability goes over
from one device to the next along the program, the cut then moves as a whole. The draws are also
sharper than the network, by several temperatures, and keep to one, two, ... of the devices that it
likes most, since how many pay is what differs most between graphs. Memory is estimated, and what
would not fit goes elsewhere before anything is simulated.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.planners.grouping import Grouping
from agents.policy import Choose

TEMPERATURES = (0.1, 0.3, 0.6, 1.0)  # of the placements in turn
JITTER = 0.02  # of the random number that the groups of a placement share
MARGINS = (1.0, 0.85, 0.7)  # fractions of each device's room that may be used, in turn


def coherent(num: int, generator: torch.Generator) -> Choose:
    """Returns what draws so many placements; every other one decides all groups alike."""
    temperature = torch.tensor(TEMPERATURES)[torch.arange(num) // 2 % len(TEMPERATURES)]
    shared = torch.rand(num, 1, generator=generator)

    def choose(log_probabilities: Tensor) -> Tensor:
        kept = _kept(log_probabilities.detach(), num)
        sharp = (kept / temperature[:, None, None]).softmax(-1)
        size = sharp.shape[-2]
        jitter = JITTER * torch.randn(num, size, generator=generator)
        alone = torch.rand(num, size, generator=generator)
        is_shared = (torch.arange(num) % 2 == 0)[:, None]
        drawn = torch.where(is_shared, (shared + jitter).clamp(0.0, 1.0), alone)
        choice = (drawn[:, :, None] >= sharp.cumsum(-1)).sum(-1)
        exists = (kept > -torch.inf).to(torch.uint8)
        last = exists.shape[-1] - 1 - exists.flip(-1).argmax(-1)
        return choice.minimum(last)  # where rounding left the sum below 1

    return choose


def _kept(log_probabilities: Tensor, num: int) -> Tensor:
    """Returns log probabilities, [K, decision, choice], of the choices that each placement keeps.

    Each keeps the most probable ones overall, as many as its turn says; decisions that may be none
    of these keep all of theirs.
    """
    size = log_probabilities.shape[-1]
    liked = log_probabilities.exp().mean(-2)  # [..., choice]
    rank = liked.argsort(-1, descending=True).argsort(-1).expand(num, size)
    most = torch.arange(num) // (2 * len(TEMPERATURES)) % size
    table = log_probabilities.expand(num, -1, size)
    kept = table.masked_fill((rank > most[:, None])[:, None], -torch.inf)
    return torch.where((kept > -torch.inf).any(-1, keepdim=True), kept, table)


def fitted(grouping: Grouping, actions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns placements, [plan, group], in which no device is estimated to be too full.

    In program order a group that finds no room goes with the group before it, else to the device
    that it may use with the most room; where no device has room, too.
    """
    space, plans = grouping.space, np.arange(len(actions))
    memory = np.bincount(grouping.group, space.memory, grouping.num_groups)
    margin = np.array(MARGINS)[plans % len(MARGINS)]
    left = margin[:, None] * space.room  # [plan, dev] bytes
    fitting, before = actions.copy(), actions[:, 0]
    for group, allowed in enumerate(grouping.allowed):
        own = fitting[:, group]
        most = np.where(allowed, left, -np.inf).argmax(axis=1)
        has_room = (left[plans, before] >= memory[group]) & allowed[before]
        other = np.where(has_room, before, most)
        own = np.where(left[plans, own] >= memory[group], own, other)
        left[plans, own] -= memory[group]
        fitting[:, group] = before = own
    return fitting
