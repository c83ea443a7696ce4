"""Shares: sizes, memory traffic and signature of what one device is left with of an op.

A split is (number of an atomic loop, devices that it is split over); an op has one for each axis
along which it takes a loop.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import prod

import msgspec

from simcore.loops import OpLoops
from simcore.sharding.affine import at
from simcore.sharding.factors import AtomicLoop
from simcore.signature import Affine, Signature

Split = tuple[int, int]  # (atomic loop, devices)


def scaled(pair: Affine, ratio: Fraction, samples: int) -> Affine:
    """Returns a share of a size, rounded up, in samples of one device.

    Args:
        pair: (c0, c1) of the whole.
        ratio: what is left of it.
        samples: devices that share the samples of the whole.
    """
    constant, slope = pair[0] * ratio, pair[1] * samples * ratio
    return (-(-constant.numerator // constant.denominator),
            -(-slope.numerator // slope.denominator))  # fmt: skip


def traffic_ratio(
    known: OpLoops | None,
    loops: Sequence[AtomicLoop],
    splits: Sequence[Split],
    batch: int,
    *,
    gathers: bool,
) -> Fraction:
    """Returns the share of an op's memory traffic that is left to one device.

    Args:
        known: what the op runs over, None = no rule.
        loops: its atomic loops.
        splits: which of them are split.
        batch: samples of the whole.
        gathers: it reads but few rows of its inputs (an embedding), which then do not count.
    """
    if known is None or not splits:
        return Fraction(1)
    whole, local = 0, Fraction(0)
    for place, access in enumerate(known.accesses):
        if gathers and not access.is_output:
            continue
        size = access.itemsize * prod(
            at(dim.size, batch) for dim in access.dims if at(dim.stride, batch)
        )
        whole += size
        local += Fraction(size, prod(n for loop, n in splits if loops[loop].factor[place] >= 0))
    return local / whole if whole else Fraction(1)


def local_signature(
    signature: Signature,
    loops: Sequence[AtomicLoop],
    splits: Sequence[Split],
    ratio: Fraction,
    samples: int,
) -> Signature:
    """Returns the signature of one shard.

    Args:
        signature: of the whole op.
        loops: its atomic loops.
        splits: which of them are split.
        ratio: what is left of its memory traffic.
        samples: devices that share the samples of the whole.
    """
    parts: dict[str, int] = {}
    for loop, size in splits:
        dim = loops[loop].dim
        parts[dim] = parts.get(dim, 1) * size
    dims = tuple(
        (name, *scaled((constant, slope), Fraction(1, parts.get(name, 1)), samples))
        for name, constant, slope in signature.dims
    )
    return msgspec.structs.replace(
        signature, dims=dims, traffic=scaled(signature.traffic, ratio, samples)
    )
