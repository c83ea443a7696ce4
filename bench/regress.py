"""Fails on a slow-down: ``python -m bench.regress`` (``--update`` stores a new baseline).

Runs bench/test_speed.py and divides the best time of every benchmark by the best push-pop of the
yardstick in the same run; more than 15 % above the stored ratio is a regression. What looks slow is
run again, up to twice, since a busy machine makes things slow but never fast.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASELINE = Path(__file__).parent / "results" / "speed.json"
TOLERANCE = 0.15
YARDSTICK = "test_yardstick"


def run(selection: list[str]) -> dict[str, float]:
    """Returns benchmark -> time per unit of work / yardstick per push-pop."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "speed.json"
        tests = [f"bench/test_speed.py::{name}" for name in selection] or ["bench/test_speed.py"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        subprocess.run([*command, f"--benchmark-json={out}"], check=True, stdout=sys.stderr)
        rows = json.loads(out.read_text())["benchmarks"]
    best = {row["name"]: row["stats"]["min"] / row["extra_info"]["per"] for row in rows}
    yardstick = best.pop(YARDSTICK)
    return {name: seconds / yardstick for name, seconds in best.items()}


def slower(found: dict[str, float], stored: dict[str, float]) -> dict[str, float]:
    """Returns the benchmarks that are slower than allowed, with the factor."""
    return {
        name: ratio / stored[name]
        for name, ratio in found.items()
        if name in stored and ratio > stored[name] * (1 + TOLERANCE)
    }


def main() -> int:
    """Compares with the baseline, or stores it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="store what is measured now")
    args = parser.parse_args()
    found = run([])
    if args.update:
        again = run([])  # the better of two runs, so that one busy moment is not the baseline
        ratios = {name: min(ratio, again[name]) for name, ratio in found.items()}
        machine = {"machine": platform.processor() or platform.machine(), "python": sys.version}
        document = {"date": time.strftime("%Y-%m-%d"), **machine, "ratio_to_yardstick": ratios}
        BASELINE.write_text(json.dumps(document, indent=1) + "\n")
        print(f"stored {len(ratios)} ratios in {BASELINE}")
        return 0
    stored = json.loads(BASELINE.read_text())["ratio_to_yardstick"]
    for _ in range(2):
        suspects = slower(found, stored)
        if not suspects:
            break
        again = run([YARDSTICK, *suspects])
        found |= {name: min(found[name], ratio) for name, ratio in again.items()}
    for name, ratio in sorted(found.items()):
        factor = f"{ratio / stored[name]:6.2f} x stored" if name in stored else "new"
        print(f"{name:50s} {ratio:8.3f} yardsticks  {factor}")
    suspects = slower(found, stored)
    for name, factor in suspects.items():
        print(f"REGRESSION {name}: {factor:.2f} times its stored ratio")
    return 1 if suspects else 0


if __name__ == "__main__":
    sys.exit(main())
