"""Units: SI inside the program, a unit in the key outside; and numbers as people read them."""

GB = 1e9  # bytes; link and memory bandwidths are quoted in decimal GB/s
TERA = 1e12
KiB = 2**10  # bytes
MiB = 2**20  # bytes
GiB = 2**30  # bytes
US = 1e-6  # s
MS = 1e-3  # s


def format_bytes(num_bytes: float) -> str:
    """Returns bytes with a binary unit, for example ``3.21 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Returns seconds with the unit that fits, for example ``41.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", MS), ("us", US)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{float(f'{seconds / 1e-9:.3g}'):g} ns" if seconds else "0 s"


def format_count(count: float) -> str:
    """Returns a count with a decimal prefix, for example ``110 M`` or ``1.64 G``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g}"
