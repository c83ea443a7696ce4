"""Communication held against what torch's DTensor does: the same modules, kinds and bytes.

An SPMD program of four ranks is run by one process on torch's fake process group, and its
collectives are noted as they are dispatched. Bytes are of the full buffer, as `Collective` counts.
Where the two differ, the test says why.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from simcore.frontends.torch_capture import capture
from simcore.job import Job
from simcore.sharding.groups import Linkage, find_linkage
from simcore.sharding.local import local_graph
from simcore.sharding.named import Roles, find_roles, style_groups
from simcore.sharding.states import Axis
from simcore.signature import Phase

RANKS = 4
BATCH, LENGTH, WIDTH, INNER, TOKENS = 8, 128, 16, 64, 64
STATES = BATCH * LENGTH * WIDTH * 4  # bytes of the activations between blocks
ROWS = BATCH * LENGTH * 4  # bytes of one number for each token
VECTOR = WIDTH * 4  # bytes of the parameters of a normalisation, or a bias

Moved = Counter[tuple[str, int]]  # (kind, bytes) -> how often


class Scaled(nn.Module):
    """Has a parameter before all else, so that the input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class FeedForward(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x * self.scale)))


class Attention(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        heads = (
            each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(seen.transpose(1, 2).flatten(2))


class Between(Scaled):
    """A feed-forward block between two normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(self.first(x * self.scale))
        return self.last(self.down(torch.relu(inside)))


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).flatten(0, 1)


class Squares(nn.Module):
    """A loss that is not linear, so that it needs whole sums."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


class Entropy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(ids), target.flatten())


# torch


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(backend="fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


class Noted(TorchDispatchMode):
    """Notes collectives on the tensors of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Moved = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own dispatch comes first
        space, _, name = func.name().partition("::")
        kinds = {
            "all_reduce": ("all_reduce", 1),
            "all_gather_into_tensor": ("all_gather", RANKS),
            "reduce_scatter_tensor": ("reduce_scatter", 1),
            "all_to_all_single": ("all_to_all", 1),
        }
        if space == "_c10d_functional" and (kind := kinds.get(name.partition(".")[0])) is not None:
            self.moved[kind[0], kind[1] * args[0].numel() * args[0].element_size()] += 1
        return func(*args, **(kwargs or {}))


def run(model: nn.Module, x: Tensor) -> tuple[Moved, Moved]:
    """Returns what moves forward, and backward."""
    with Noted() as forward:
        loss = model(x).square().sum()
    with Noted() as backward:
        loss.backward()
    return forward.moved, backward.moved


# here


def ours(
    model: nn.Module, inputs: Any, groups: Callable[[Roles, Linkage], Sequence[int]]
) -> tuple[Moved, Moved]:
    """Returns the same from the local graph of the model, captured whole."""
    graph = capture(model, inputs, Job(batch=BATCH), name="model")
    linkage = find_linkage(graph)
    chosen = tuple(groups(find_roles(graph, linkage), linkage))
    axes = [[Axis("tp", RANKS, chosen)]]
    local = local_graph(graph, linkage, axes, np.zeros(graph.num_units, np.int64))
    moved: dict[bool, Moved] = {True: Counter(), False: Counter()}
    for op, what in local.communication.items():
        size = what.num_bytes[0] + what.num_bytes[1] * BATCH // local.samples
        moved[bool(local.graph.phase[op] == Phase.F)][what.kind, size] += 1
    return moved[True], moved[False]


def states(batch: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(batch, LENGTH, WIDTH)}


def inside(roles: Roles, linkage: Linkage) -> Sequence[int]:
    return style_groups("tensor", roles)


def inside_and_positions(roles: Roles, linkage: Linkage) -> Sequence[int]:
    sizes = [group.size for group in linkage.groups]
    return (*roles.widths, sizes.index((LENGTH, 0)))


def test_a_feed_forward_block_sums_once_each_way(mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    theirs = run(parallelize_module(FeedForward(), mesh, plan), torch.randn(BATCH, LENGTH, WIDTH))
    assert theirs == ({("all_reduce", STATES): 1}, {("all_reduce", STATES): 1})
    assert ours(Squares(FeedForward()), states, inside) == theirs


def test_attention_sums_once_each_way_where_torch_sums_the_three_gradients_apart(
    mesh: DeviceMesh,
) -> None:
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
    model = parallelize_module(Attention(), mesh, plan | {"out": RowwiseParallel()})
    forward, backward = run(model, torch.randn(BATCH, LENGTH, WIDTH))
    our_forward, our_backward = ours(Squares(Attention()), states, inside)
    assert forward == our_forward == {("all_reduce", STATES): 1}
    assert backward == {("all_reduce", STATES): 3}  # each module's input by itself
    assert our_backward == {("all_reduce", STATES): 1}  # partial gradients are added first


def test_sequence_parallel_gathers_and_scatters_and_gathers_what_was_saved_again(
    mesh: DeviceMesh,
) -> None:
    plan = {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(use_local_output=True),
    }
    model = parallelize_module(Between(), mesh, plan)
    forward, backward = run(model, torch.randn(BATCH, LENGTH // RANKS, WIDTH))
    once = Counter({("all_gather", STATES): 1, ("reduce_scatter", STATES): 1})
    our_forward, our_backward = ours(Squares(Between()), states, inside_and_positions)
    assert forward == our_forward == once
    assert backward == once
    # torch keeps the gathered input of `up` for its weight's gradient; here, as in Megatron, it is
    # gathered again
    again = Counter({("all_gather", STATES): 1})
    # torch leaves the gradients of parameters that see a part of the positions as partial sums
    # until someone reads them: two normalisations, the bias of `down`, the scale
    vectors = Counter({("all_reduce", VECTOR): 6})
    assert our_backward == backward + again + vectors


def test_the_vocabulary_is_looked_up_and_scored_in_parts(mesh: DeviceMesh) -> None:
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(Vocabulary(), mesh, plan)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with loss_parallel():
        with Noted() as forward:
            loss = nn.functional.cross_entropy(model(ids), ids.flatten())
        with Noted() as backward:
            loss.backward()

    def tokens(batch: int) -> dict[str, Tensor]:
        return dict.fromkeys(("ids", "target"), torch.zeros(batch, LENGTH, dtype=torch.long))

    our_forward, our_backward = ours(
        Entropy(Vocabulary()), tokens, lambda roles, _: roles.vocabulary
    )
    looked_up = Counter({("all_reduce", STATES): 1})
    # the largest score and the sum of exponentials of each token, two messages or one
    assert forward.moved == looked_up + Counter({("all_reduce", ROWS): 3})
    # torch sums the target's score of each token, here the loss of all tokens is summed
    assert our_forward == looked_up + Counter({("all_reduce", 2 * ROWS): 1, ("all_reduce", 4): 1})
    # the softmax's gradient needs the sum of what comes back; torch's fused loss knows it is 1
    assert backward.moved == looked_up
    assert our_backward == looked_up + Counter({("all_reduce", ROWS): 1})


def test_data_parallel_sums_every_gradient_once(mesh: DeviceMesh) -> None:
    model = distribute_module(nn.Linear(WIDTH, WIDTH), mesh)
    x = DTensor.from_local(torch.randn(BATCH // RANKS, WIDTH), mesh, [Shard(0)])
    with Noted() as forward:
        loss = model(x).square()
    with Noted() as backward:
        loss.backward(torch.ones_like(loss))
        for parameter in model.parameters():
            assert parameter.grad.placements == (Partial(),)
            parameter.grad.redistribute(mesh, [Replicate()]).to_local().sum()
    found = ours(
        Squares(nn.Linear(WIDTH, WIDTH)),
        lambda batch: {"x": torch.zeros(batch, WIDTH)},
        lambda roles, _: roles.batch,
    )
    assert found == (forward.moved, backward.moved)
    assert backward.moved == {("all_reduce", WIDTH * VECTOR): 1, ("all_reduce", VECTOR): 1}
