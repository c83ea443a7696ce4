"""Networks of values of actions: dueling heads, noisy layers, distributions, each a switch."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn


class Shape(Protocol):
    """What decides a network; `agents.dqn.Config` is one."""

    @property
    def noisy(self) -> bool:
        """Noise in the weights."""

    @property
    def dueling(self) -> bool:
        """A value of the state and advantages of actions."""

    @property
    def distributional(self) -> bool:
        """Distributions of returns."""

    @property
    def width(self) -> int:
        """Of the hidden layers."""

    @property
    def atoms(self) -> int:
        """Points of a distribution."""

    @property
    def least(self) -> float:
        """Return that distributions begin at."""

    @property
    def most(self) -> float:
        """Return that they end at."""


class Noisy(nn.Module):
    """A linear layer with factorised Gaussian noise in its weights; without it where it acts."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Linear(inputs, outputs)
        self.spread = nn.Parameter(torch.full((outputs, inputs), 0.5 / math.sqrt(inputs)))
        self.spread_bias = nn.Parameter(torch.full((outputs,), 0.5 / math.sqrt(inputs)))
        self.noise: tuple[Tensor, Tensor] | None = None  # [inputs], [outputs]

    def draw(self, generator: torch.Generator) -> None:
        """Draws new noise."""
        sizes = (self.mean.in_features, self.mean.out_features)
        drawn = [torch.randn(size, generator=generator) for size in sizes]
        self.noise = (_root(drawn[0]), _root(drawn[1]))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns outputs, [B, outputs]."""
        if self.noise is None:
            found: Tensor = self.mean(inputs)
            return found
        first, second = self.noise
        weight = self.mean.weight + self.spread * torch.outer(second, first)
        return nn.functional.linear(inputs, weight, self.mean.bias + self.spread_bias * second)


def _root(noise: Tensor) -> Tensor:
    return noise.sign() * noise.abs().sqrt()


class Network(nn.Module):
    """Observations to values of actions, or their distributions."""

    def __init__(self, config: Shape, inputs: int, actions: int) -> None:
        super().__init__()
        layer = Noisy if config.noisy else nn.Linear
        self.actions, self.atoms = actions, config.atoms if config.distributional else 1
        self.body = nn.Sequential(
            nn.Linear(inputs, config.width),
            nn.ReLU(),
            layer(config.width, config.width),
            nn.ReLU(),
        )
        self.advantage = layer(config.width, actions * self.atoms)
        self.value = layer(config.width, self.atoms) if config.dueling else None
        self.support: Tensor
        self.register_buffer("support", torch.linspace(config.least, config.most, config.atoms))

    def draw(self, generator: torch.Generator | None) -> None:
        """Draws new noise; None = goes on without."""
        for layer in self.modules():
            if isinstance(layer, Noisy):
                layer.noise = None
                if generator is not None:
                    layer.draw(generator)

    def raw(self, seen: Tensor) -> Tensor:
        """Returns values, or logits of distributions, [B, action, atom]."""
        hidden = self.body(seen)
        found: Tensor = self.advantage(hidden).view(-1, self.actions, self.atoms)
        if self.value is not None:
            found = found - found.mean(1, keepdim=True) + self.value(hidden)[:, None]
        return found

    def forward(self, seen: Tensor) -> Tensor:
        """Returns values, [B, action]."""
        raw = self.raw(seen)
        return raw[..., 0] if self.atoms == 1 else (raw.softmax(-1) * self.support).sum(-1)
