"""What an op runs over: its loops, and how each of its tensors lies in memory along them.

An op is a nest of loops, as in Einstein's notation: a matrix product runs over m, n and k; its
first input has the dimensions (m, k), its second (k, n), its output (m, n). To split an op over
devices is to split one loop: every tensor that has the loop is split, the others are whole on each
device, and an output without the loop is a sum of parts. What is added to such a sum (a bias) is
added by one part only; what depends on the position of an element (an index, a range) knows where
its part begins. A dimension is a size and a stride in the elements of its storage, so that what one
op calls rows and another batch and position can be known as the same memory; dimensions of size 1
are left out.
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import NamedTuple

from simcore.errors import GraphError
from simcore.signature import Affine

NO_LOOP = -1  # of a dimension that cannot be split


class LoopKind(IntEnum):
    """What splitting a loop takes."""

    MAP = 0  # nothing: every part stands alone, or outputs without the loop are summed
    INNER = 1  # collectives inside the op (softmax over it, its statistics)
    HALO = 2  # neighbours' borders (convolution, pooling)
    SEMANTIC = 3  # it changes the mathematics (batch statistics of a part of the batch)


class Loop(NamedTuple):
    """One loop of an op.

    Attributes:
        name: of the field: ``m n k``, ``b h q kv d``, ``n c k out filter``, ``e0 e1 …``, …
        size: iterations, as (c0, c1): c0 + c1 * batch.
        kind: what splitting it takes.
        dim: the dimension of the op's signature that shrinks with it, "" = none.
        inner: bytes of the collectives inside the op if it is split: their whole payload on one
            device, before any other loop is split, as an all-reduce; HALO: from each neighbour;
            SEMANTIC: what would keep the mathematics.
    """

    name: str
    size: Affine
    kind: LoopKind = LoopKind.MAP
    dim: str = ""
    inner: Affine = (0, 0)


class Dim(NamedTuple):
    """One dimension of a tensor as an op sees it."""

    loop: int  # index of the op's loop that runs over it, NO_LOOP = cannot be split
    size: Affine
    stride: Affine  # elements of the storage; 0 = expanded: every part reads the same elements


class Access(NamedTuple):
    """One tensor that an op reads or writes.

    Attributes:
        tensor: its number; in an `OpGraph`, the tensor id.
        itemsize: bytes of an element.
        dims: outermost first, as the op sees them.
        is_output: whether the op writes it.
        whole: of an output: along the loops that it lacks, every device has it whole, or its own
            (statistics, a maximum). Else it is a sum of parts along them.
    """

    tensor: int
    itemsize: int
    dims: tuple[Dim, ...]
    is_output: bool
    whole: bool = False


class OpLoops(NamedTuple):
    """The loops of one op.

    Attributes:
        loops: in the order of the rule that made them.
        accesses: inputs, then outputs; a tensor may occur twice.
        is_linear: a sum of the op's outputs is the op of the sum of its inputs, all inputs taken
            together (addition, scaling, conversion, sums), so that it can run on partial sums.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    is_linear: bool = False


def check_tensors(loops: OpLoops, inputs: Collection[int], num_outputs: int, where: str) -> None:
    """Refuses loops that name a tensor which the op does not have, or a loop that is not there.

    Args:
        loops: inputs called by their number, outputs by their place.
        inputs: numbers of the tensors that the op reads.
        num_outputs: tensors that the op writes.
        where: what errors call the op.

    Raises:
        GraphError: it is named.
    """
    for access in loops.accesses:
        known = range(num_outputs) if access.is_output else inputs
        if access.tensor not in known:
            kind = "output" if access.is_output else "input"
            raise GraphError(f"{where}: loops: the op has no {kind} {access.tensor}")
        for dim in access.dims:
            if not NO_LOOP <= dim.loop < len(loops.loops):
                raise GraphError(f"{where}: loops: there is no loop {dim.loop}")


def renumbered(loops: OpLoops, number: Mapping[int, int], first_output: int) -> OpLoops:
    """Returns the loops with other tensor numbers.

    Args:
        loops: inputs called by their number, outputs by their place.
        number: the new number of each input.
        first_output: the new number of the op's first output.
    """
    accesses = tuple(
        a._replace(tensor=first_output + a.tensor if a.is_output else number[a.tensor])
        for a in loops.accesses
    )
    return loops._replace(accesses=accesses)
