"""Small models that the tests of sharding share, and the exact simulation of a plan of a space."""

from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from simcore.cluster import Cluster
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.shard_space import ShardSpace
from simcore.simulation import Options, simulate_sharded

JOB = Job(batch=16)
SWITCH = Cluster.preset("8xA100-NVSwitch")
GPUS = [device.name for device in SWITCH.devices if not device.kind.startswith("CPU")]


class Block(nn.Module):
    """A transformer's block, its products as in GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, width = states.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.qkv(self.first_norm(states)).chunk(3, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return states + self.down(nn.functional.gelu(self.up(self.second_norm(states))))


class Experts(nn.Module):
    """Soft routing: every expert sees a mix of the tokens, as batched products."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width))
        self.down = nn.Parameter(torch.randn(count, 2 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        gates = self.gate(states).softmax(-1)
        mixed = torch.einsum("bte,btw->ebtw", gates, states).flatten(1, 2)
        done = torch.bmm(torch.relu(torch.bmm(mixed, self.up)), self.down)
        done = done.unflatten(1, states.shape[:2])
        return states + torch.einsum("ebtw,bte->btw", done, gates)


class Language(nn.Module):
    """Blocks (or blocks and experts in turn) between an embedding and a head."""

    def __init__(self, layers: int, *, experts: int = 0) -> None:
        super().__init__()
        width = 64
        self.table = nn.Embedding(512, width)
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts.append(Block(width, 4))
            if experts:
                parts.append(Experts(width, experts))
        self.layers = nn.ModuleList(parts)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        states = self.table(ids)
        for layer in self.layers:
            states = layer(states)
        scores = self.head(self.norm(states))
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Images(nn.Module):
    """Convolutions with everything that has neighbours or statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 8 * 8, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), target)


def _tokens(batch: int) -> dict[str, Any]:
    return {name: torch.zeros(batch, 32, dtype=torch.long) for name in ("ids", "target")}


def _pictures(batch: int) -> dict[str, Any]:
    return {"x": torch.zeros(batch, 4, 16, 16), "target": torch.zeros(batch, dtype=torch.long)}


def transformer(layers: int = 2) -> OpGraph:
    return capture(Language(layers), _tokens, JOB, name="transformer")


def mixture() -> OpGraph:
    return capture(Language(1, experts=4), _tokens, JOB, name="mixture")


def images() -> OpGraph:
    return capture(Images(), _pictures, JOB, name="images")


def exact(space: ShardSpace, row: NDArray[np.int8], settings: Settings | None = None) -> Result:
    """Simulates a plan of a space op by op on all devices; an axis may be idle."""
    settings = settings or space.settings
    plan = Plan.data_parallel(space.graph, space.cluster, space.job, space.devices)
    mesh = dict(zip(space.mesh.names, space.mesh.sizes, strict=True))
    stage = msgspec.structs.replace(plan.stages[0], mesh=mesh, sharding=space.sharding(row))
    plan = msgspec.structs.replace(plan, stages=(stage,), buckets=space.buckets)
    return simulate_sharded(space.graph, space.cluster, space.job, plan, Options(settings=settings))
