"""Placements of a network without training: coherent draws by hand, and what makes them fit."""

import numpy as np
import torch

from agents.decode import MARGINS, coherent, fitted
from agents.families import family, tasks_of
from agents.task import PlacementTask
from simcore import Cluster


def drawn(table: torch.Tensor, num: int) -> torch.Tensor:
    return coherent(num, torch.Generator().manual_seed(0))(table)


def large_task() -> PlacementTask:
    """A generated graph that does not fit on one GPU."""
    cluster = Cluster.preset("4xV100-NVLink")
    for graph in family(["generated:12"]):
        (task,) = tasks_of([graph], [cluster], num_groups=48)
        space = task.grouping.space
        if space.evaluate(space.default[None]).overflow[0]:
            return task
    raise AssertionError("all fit")


def test_what_is_not_allowed_is_never_drawn():
    table = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).log()
    actions = drawn(table, 64)
    assert (actions[:, 0] < 2).all()
    assert (actions[:, 1] == 2).all()


def test_draws_that_share_a_number_cut_a_program_once():
    ramp = torch.linspace(0.05, 0.95, 60)
    table = torch.stack([1.0 - ramp, ramp], 1).log()
    actions = drawn(table, 400)
    changes = (actions[:, 1:] != actions[:, :-1]).sum(1).to(torch.float64)
    assert float(changes[0::2].mean()) < 0.5 * float(changes[1::2].mean())


def test_the_first_placements_keep_to_the_device_that_is_liked_most():
    table = torch.tensor([[0.2, 0.5, 0.3]]).expand(20, 3).log()
    actions = drawn(table, 24)
    assert (actions[:8] == 1).all()
    assert set(actions[8:16].unique().tolist()) == {1, 2}
    assert set(actions[16:].unique().tolist()) == {0, 1, 2}


def test_the_same_seed_draws_the_same():
    table = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    assert torch.equal(drawn(table, 9), drawn(table, 9))


def test_what_does_not_fit_on_one_gpu_is_spread_until_it_does():
    task = large_task()
    actions = np.zeros((len(MARGINS), task.num_groups), np.int64)
    assert not task.evaluate(actions).fits.any()
    assert task.evaluate(fitted(task.grouping, actions)).fits.any()


def test_what_fits_stays_as_it_is():
    (task,) = tasks_of(family(["generated:1"]), [Cluster.preset("4xV100-NVLink")], num_groups=16)
    actions = np.arange(task.num_groups)[None] % 4
    assert (fitted(task.grouping, actions) == actions).all()
