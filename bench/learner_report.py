"""What the stored cells of ``bench.learners`` say: ``python -m bench.learner_report``.

Prints, for one cluster and budget, the median of each model and method with its spread over seeds,
the gap to the proven bound (``--bounds``, which captures the models again), how often nothing
fitted, evaluations and seconds until within 5 % and 1 % of the best that any cell knows (seconds in
proportion to evaluations), each of ``--ours`` against each of ``--peers``: the ratio of medians
by model with bootstrap intervals, and in how many models it is at most 1.01; and what `plan` does
with placements (``portfolio``) against the best of its rivals in every cell.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.intervals import Cell, evaluations_to, ratio, times
from bench.learners import MODELS, RESULTS, read
from simcore import Problem, Settings
from simcore.bounds import placement_bound
from simcore.cluster import resolve
from simcore.sources import load_graph

NEAR = (0.05, 0.01)
AT_MOST = 1.01  # ratio that counts as no worse
PORTFOLIO = "portfolio"


def of_budget(cells: Sequence[Cell], args: argparse.Namespace) -> list[Cell]:
    """Returns the cells of one cluster and budget."""
    limit = None if args.seconds else args.evaluations
    return [
        cell
        for cell in cells
        if (cell["cluster"], cell["evaluations"], cell.get("budget_seconds"))
        == (args.cluster, limit, args.seconds)
    ]


def bound_of(model: str, cluster: str) -> float:
    """Returns a step time that no placement beats, s."""
    graph, job, _ = load_graph(model)
    problem = Problem.build(graph, resolve(cluster), job, Settings())
    return float(placement_bound(problem, problem.supported))


def median_row(cells: Sequence[Cell], models: Sequence[str], method: str) -> list[str]:
    """Returns medians in ms with the least and most of the seeds, one for each model."""
    row = [method]
    for model in models:
        found = times(cells, model, method) * 1e3
        if not len(found):
            row.append("")
            continue
        low, middle, high = found.min(), statistics.median(found), found.max()
        row.append(f"{middle:.1f} ({low:.1f} to {high:.1f})" if np.isfinite(high) else "some fit"
                   if np.isfinite(low) else "none fits")  # fmt: skip
    return row


def arrivals(cells: Sequence[Cell], models: Sequence[str], method: str) -> list[str]:
    """Returns the share that does not fit, and median evaluations and seconds until near."""
    own = [cell for cell in cells if cell["method"] == method]
    failed = sum(cell["step_time_s"] is None for cell in own)
    row = [method, str(len(own)), f"{failed / len(own):.0%}"]
    spent = sum(cell["seconds"] for cell in own)
    made = sum(cell["evaluations_made"] for cell in own)
    for within in NEAR:
        found = evaluations_to(cells, models, method, within)
        middle = statistics.median(found) if found else np.inf
        seconds = middle * spent / max(1, made)
        arrived = f"{sum(np.isfinite(found))}/{len(found)}"
        text = f"{middle:.0f}, {seconds:.1f} s" if np.isfinite(middle) else "never"
        row.append(f"{text} ({arrived})")
    return row


def against(cells: Sequence[Cell], models: Sequence[str], own: str, peer: str) -> list[str]:
    """Returns ratios of medians, by model and together, with their 95 % intervals."""
    each = [ratio(cells, [model], own, peer) for model in models]
    whole = ratio(cells, models, own, peer)
    texts = [
        "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"
        for found in (*each, whole)
    ]
    kept = [found.value for found in each if found is not None]
    return [f"{own} / {peer}", *texts, f"{sum(value <= AT_MOST for value in kept)} of {len(kept)}"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def gap_row(cells: Sequence[Cell], models: Sequence[str], cluster: str) -> list[str]:
    """Returns how far the best of all methods is above the bound, by model."""
    row = ["best over bound"]
    for model in models:
        known = [c["step_time_s"] for c in cells if c["model"] == model and c["step_time_s"]]
        row.append(f"{min(known) / bound_of(model, cluster) - 1:.1%}" if known else "")
    return row


def portfolio_line(cells: Sequence[Cell]) -> str:
    """Returns in how many cells the portfolio is as good as the best method that is alone in it."""
    by_cell: dict[tuple[str, int], dict[str, float]] = {}
    for cell in cells:
        found = np.inf if cell["step_time_s"] is None else cell["step_time_s"]
        by_cell.setdefault((cell["model"], cell["seed"]), {})[cell["method"]] = found
    ratios = [
        found[PORTFOLIO] / min(time for name, time in found.items() if name != PORTFOLIO)
        for found in by_cell.values()
        if PORTFOLIO in found and len(found) > 1
    ]
    if not ratios:
        return ""
    kept = sum(value <= AT_MOST for value in ratios)
    return (
        f"{PORTFOLIO} against the best single method of the cell: <= {AT_MOST} in {kept} of "
        f"{len(ratios)} cells, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}"
    )


def report(cells: Sequence[Cell], args: argparse.Namespace) -> str:
    """Returns all tables."""
    models = [model for model in args.models if any(c["model"] == model for c in cells)]
    methods = sorted({cell["method"] for cell in cells})
    medians = [["median ms", *models], *(median_row(cells, models, name) for name in methods)]
    if args.bounds:
        medians.append(gap_row(cells, models, args.cluster))
    near = [["method", "cells", "nothing fits", *(f"to {within:.0%}" for within in NEAR)]]
    near += [arrivals(cells, models, name) for name in methods]
    pairs = [["ratio", *models, "all", f"<= {AT_MOST}"]]
    pairs += [
        against(cells, models, own, peer)
        for own in args.ours
        for peer in args.peers
        if {own, peer} <= set(methods)
    ]
    texts = [*(table(rows) for rows in (medians, near, pairs)), portfolio_line(cells)]
    return "\n\n".join(text for text in texts if text)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cluster", default="4xP100-PCIe")
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--ours", nargs="+", default=["eagle", "mars"])
    parser.add_argument("--peers", nargs="+", default=["hierarchical", "post", "anneal"])
    args = parser.parse_args(argv)
    print(report(of_budget(read(args.results), args), args))


if __name__ == "__main__":
    main()
