"""Torch's threads and random numbers, set for a while and then as before."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use so many threads, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seeded(make: Callable[[], T], seed: int) -> T:
    """Returns what is made, its random numbers decided by a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
