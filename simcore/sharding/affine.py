"""Sizes as (c0, c1), for c0 + c1 * batch: products, quotients and order where they exist."""

from simcore.signature import Affine

ONE: Affine = (1, 0)


def times(a: Affine, b: Affine) -> Affine | None:
    """Returns the product, None where it is not affine."""
    if a[1] and b[1]:
        return None
    return (a[0] * b[0], a[0] * b[1] + a[1] * b[0])


def over(a: Affine, b: Affine) -> Affine | None:
    """Returns a / b where that is affine with whole numbers, else None."""
    if b[1] == 0:
        if b[0] == 0 or a[0] % b[0] or a[1] % b[0]:
            return None
        return (a[0] // b[0], a[1] // b[0])
    if a[1] % b[1]:
        return None
    ratio = a[1] // b[1]
    return (ratio, 0) if ratio and a[0] == ratio * b[0] else None


def at(a: Affine, batch: int) -> int:
    """Returns the value at a batch."""
    return a[0] + a[1] * batch
