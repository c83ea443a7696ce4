"""Which sizes of a step grow with the batch.

A file has numbers only. The first dimension of the inputs that are no parameters is the batch; it
spreads from there, through the loops of all ops and in both directions, to every dimension that it
is the same as. What cannot be told apart this way (a product of two sizes that both grow) makes
the batch of the file the only one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from simcore.frontends.hlo_nest import CUT, Nest, Use, growing_part, parts_of
from simcore.frontends.hlo_step import Step
from simcore.signature import Affine

_Place = tuple[int, int]  # (value, dimension)


class NotAffineError(Exception):
    """A size is not a constant plus a multiple of the batch."""


def find_batch(step: Step, inputs: Iterable[int]) -> int | None:
    """Returns the most frequent first dimension of the given inputs, of two the last; None = none.

    Args:
        step: the step.
        inputs: values of inputs that are neither parameters nor states.
    """
    sizes = Counter(
        shape[0]
        for value in reversed(list(inputs))
        if (shape := step.values[value].shape) and step.values[value].dtype != "uint32"
    )
    return max(sizes, key=lambda size: sizes[size]) if sizes else None


class Growth:
    """Sizes of all values as (c0, c1), for c0 + c1 * batch."""

    def __init__(
        self, step: Step, nests: Sequence[Nest], seeds: Iterable[int], batch: int | None
    ) -> None:
        """Spreads the batch.

        Args:
            step: the step.
            nests: of its ops.
            seeds: inputs whose first dimension may be the batch.
            batch: samples of the file; None or 1 = nothing grows.

        Raises:
            NotAffineError: two sizes that grow are multiplied.
        """
        self.step, self.nests, self.batch = step, nests, batch or 1
        self.grows: set[_Place] = set()
        if self.batch == 1:
            return
        self.ops_of: dict[int, list[int]] = defaultdict(list)
        for number, nest in enumerate(nests):
            for use in nest.uses:
                self.ops_of[use.value].append(number)
        pending = [
            value for value in seeds
            if step.values[value].shape[:1] == (self.batch,)
        ]  # fmt: skip
        self.grows.update((value, 0) for value in pending)
        while pending:
            for number in self.ops_of[pending.pop()]:
                pending += self._spread(nests[number])

    def _spread(self, nest: Nest) -> list[int]:
        """Lets what grows in one use of an op grow in the others; returns values that changed."""
        growing = {label for use in nest.uses for label in self._growing(use)}
        changed = []
        for use in nest.uses:
            shape = self.step.values[use.value].shape
            for dim, label in enumerate(use.labels):
                if (use.value, dim) in self.grows:
                    continue
                names = {name for name, _ in parts_of(label, shape[dim])} & growing
                if names - {CUT}:
                    self.grows.add((use.value, dim))
                    changed.append(use.value)
        return changed

    def _growing(self, use: Use) -> list[str]:
        """Returns the labels of a use that grow: of a dimension of several, the outermost."""
        shape = self.step.values[use.value].shape
        found = []
        for dim, label in enumerate(use.labels):
            if (use.value, dim) in self.grows:
                found.append(growing_part(parts_of(label, shape[dim]), self.batch))
        return [name for name in found if name != CUT]

    def part_sizes(self, nest: Nest) -> dict[str, Affine]:
        """Returns the size of each label of an op.

        Raises:
            NotAffineError: a label grows that is no multiple of the batch.
        """
        growing = {label for use in nest.uses for label in self._growing(use)}
        sizes: dict[str, Affine] = {}
        for use in nest.uses:
            shape = self.step.values[use.value].shape
            for dim, label in enumerate(use.labels):
                for name, size in parts_of(label, shape[dim]):
                    if name != CUT:
                        sizes[name] = self._affine(size, grows=name in growing)
        return sizes

    def _affine(self, size: int, *, grows: bool) -> Affine:
        if not grows:
            return (size, 0)
        if size % self.batch:
            raise NotAffineError
        return (0, size // self.batch)

    def dim(self, value: int, dim: int) -> Affine:
        """Returns the size of one dimension of a value."""
        size = self.step.values[value].shape[dim]
        return self._affine(size, grows=(value, dim) in self.grows)

    def elements(self, value: int) -> Affine:
        """Returns the number of elements of a value."""
        shape = self.step.values[value].shape
        return product([self.dim(value, dim) for dim in range(len(shape))])

    def num_bytes(self, value: int) -> Affine:
        """Returns the bytes of a value."""
        constant, slope = self.elements(value)
        size = self.step.values[value].itemsize
        return constant * size, slope * size


def product(sizes: Sequence[Affine]) -> Affine:
    """Returns the product of sizes.

    Raises:
        NotAffineError: two of them grow.
    """
    growing = [size for size in sizes if size[1]]
    if len(growing) > 1:
        raise NotAffineError
    constant = prod(size[0] for size in sizes if not size[1])
    if not growing:
        return constant, 0
    return growing[0][0] * constant, growing[0][1] * constant
