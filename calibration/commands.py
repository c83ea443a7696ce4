"""The command of measurements: ``placewright calibrate import|fit|validate|collect``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from simcore.cli import FAILED, OK, Answer, Subparsers, note, show_table
from simcore.errors import UsageError
from simcore.units import GB, US

if TYPE_CHECKING:
    from calibration.importers.source import Imported
    from calibration.records import Record
    from calibration.splits import Errors
    from calibration.validate import Validation

DATA = Path("../shared/data")
KINETO = "kineto"


def add_calibrate(subparsers: Subparsers) -> None:
    """Adds ``placewright calibrate`` and what it can do."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine, read measurements of others, fit and check profiles",
        description="Turns measurements into hardware profiles, and holds profiles against "
        "measurements.",
    )
    inner = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_import(inner)
    _add_fit(inner)
    _add_validate(inner)
    _add_collect(inner)


def _add_import(inner: Subparsers) -> None:
    parser = inner.add_parser(
        "import",
        help="read a data set or a profiler's trace as measurement records",
        description="Reads the folder of a public data set, or a trace of the torch profiler, and "
        "writes measurement records (JSON lines). What is no record is counted with its reason.",
    )
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help=f"a data set by name, or {KINETO}"
    )
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH",
                        help="its folder, or the trace file (JSON)")  # fmt: skip
    parser.add_argument("--all", type=Path, metavar="DIR",
                        help="read every data set that has a folder in here")  # fmt: skip
    parser.add_argument("--device", default="", metavar="KIND",
                        help="kind of the GPU of a trace, where it does not say")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the data sets known by name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--merge", action="store_true",
                        help="one record for repeats of the same: their median")  # fmt: skip
    parser.set_defaults(run=_import)


def _add_fit(inner: Subparsers) -> None:
    parser = inner.add_parser(
        "fit",
        help="fit curves of links, collectives and ops to records",
        description="Fits curves of links and collectives, and with --profiles of ops, to "
        "measurement records, and writes them as files that the simulator reads. Says how far they "
        "are from sizes, group sizes and shapes that they have not seen.",
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORDS", help="JSON lines")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="public data sets, as import reads"
    )
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="write curves of links and collectives here")  # fmt: skip
    parser.add_argument("--profiles", type=Path, metavar="DIR",
                        help="device profiles whose op curves are fitted and replaced")  # fmt: skip
    parser.set_defaults(run=_fit)


def _add_validate(inner: Subparsers) -> None:
    parser = inner.add_parser(
        "validate",
        help="hold the profiles against measurements, refitting nothing",
        description="Predicts every measurement of a folder of data sets with the profiles and "
        "curves as they are, and says how far they are off. Any data set may be absent.",
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR",
                        help=f"folder with one folder for each data set ({DATA})")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="write pictures of predicted against measured here")  # fmt: skip
    parser.add_argument("--without-runs", action="store_true",
                        help="leave out published training runs, which take minutes")  # fmt: skip
    parser.set_defaults(run=_validate)


def _add_collect(inner: Subparsers) -> None:
    """Adds ``collect``; its options are made when they are parsed, as they import numpy."""
    parser = inner.add_parser("collect", help="measure this machine and write its profiles")
    parse = parser.parse_known_args

    def with_options(*given: Any) -> Any:
        from calibration.collect import command

        parser.description = command.DESCRIPTION
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)
        return parse(*given)

    setattr(parser, "parse_known_args", with_options)  # noqa: B010 - mypy refuses the assignment


def _import(args: argparse.Namespace) -> Answer:
    from calibration.importers import IMPORTERS
    from calibration.records import merge_duplicates, write_records

    if args.list:
        rows = [[name, one.contains, one.how] for name, one in sorted(IMPORTERS.items())]
        known = {row[0]: {"contains": row[1], "how": row[2]} for row in rows}
        return Answer(
            data={"sources": known}, show=lambda: show_table(["source", "contains", "how"], rows)
        )
    found = _read(args)
    records = [record for imported in found.values() for record in imported.records]
    records = merge_duplicates(records) if args.merge else records
    out = args.out if records else None  # what an earlier import wrote is kept
    if out is not None:
        write_records(records, out)
        note(f"wrote {out}")
    elif args.out is not None:
        note(f"found no records; {args.out} is not written")
    data = {
        "sources": {name: _counts(imported) for name, imported in found.items()},
        "records": len(records),
        "out": None if out is None else str(out),
    }
    return Answer(data=data, show=lambda: _show_import(found), status=OK if records else FAILED)


def _read(args: argparse.Namespace) -> dict[str, Imported]:
    """Returns what was asked for, by source; folders that are absent are said."""
    from calibration.importers import IMPORTERS, import_folder
    from calibration.importers.kineto import read_trace

    if args.all is not None:
        if args.source is not None:
            raise UsageError("give SOURCE and PATH, or --all DIR")
        return _read_all(args.all)
    if args.source is None or args.path is None:
        raise UsageError(f"give SOURCE and PATH, or --all DIR; sources: {', '.join(IMPORTERS)}")
    if args.source == KINETO:
        return {KINETO: read_trace(args.path, args.device, _told())}
    if not args.path.is_dir():
        raise UsageError(f"{args.path}: no such folder")
    return {args.source: import_folder(args.source, args.path)}


def _read_all(folder: Path) -> dict[str, Imported]:
    from calibration.importers import IMPORTERS, import_folder

    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    places = {name: one.place(folder) for name, one in sorted(IMPORTERS.items())}
    absent = [name for name, place in places.items() if not place.is_dir()]
    if absent:
        note(f"no folder of {', '.join(absent)}")
    return {n: import_folder(n, place) for n, place in places.items() if place.is_dir()}


def _told() -> Any:
    """Returns a progress function that says every hundred megabytes."""
    step, last = 100 * 10**6, [0]

    def progress(num_bytes: int) -> None:
        if num_bytes // step > last[0]:
            last[0] = num_bytes // step
            note(f"read {last[0] * step // 10**6} MB")

    return progress


def _counts(imported: Imported) -> dict[str, Any]:
    skipped: dict[str, dict[str, int]] = {}
    for (kind, reason), rows in imported.skipped.most_common():
        skipped.setdefault(kind, {})[reason] = rows
    kinds = [record.kind for record in imported.records]
    counts = {kind: kinds.count(kind) for kind in ("op", "link", "collective")}
    return {"records": counts, "not_expressible": skipped, "files": imported.files}


def _show_import(found: dict[str, Imported]) -> None:
    rows = []
    for name, imported in found.items():
        counts = _counts(imported)["records"]
        skipped = sum(imported.skipped.values())
        rows.append([name, *(f"{count:,}" for count in counts.values()), f"{skipped:,}"])
    show_table(["source", "ops", "links", "collectives", "not expressible"], rows)
    for name, imported in found.items():
        for (_, reason), count in imported.skipped.most_common(5):
            print(f"  {name}: {count:,} {reason}")


def _fit(args: argparse.Namespace) -> Answer:
    from calibration.curve_files import fit_all, left_out_groups, write_curves

    records = _records(args)
    note(f"fitting {sum(record.kind != 'op' for record in records):,} records ...")
    fitted = fit_all(records, note)
    ops = [] if args.profiles is None else _fit_ops(records, args.profiles)
    if not fitted and not ops:
        raise UsageError("no records of links or collectives; ops are fitted with --profiles")
    left_out = left_out_groups(fitted, records)
    paths = [] if args.out is None else write_curves(fitted, args.out)
    rows = [
        {
            "kind": item.key.kind,
            "num_members": item.key.num_members,
            "topology": item.key.topology,
            "outcome": item.fit.outcome,
            "points": 0 if item.fit.curve is None else len(item.fit.curve.seconds),
            "num_samples": item.fit.num_samples,
            "held_out_sizes": _errors(item.fit.held_out),
            "held_out_group": _errors(left_out.get(item.key)),
        }
        for item in fitted
    ]
    links = _link_rows(records)
    data = {"curves": rows, "links": links, "ops": ops, "files": [str(path) for path in paths]}
    return Answer(data=data, show=lambda: _show_fit(rows, links, ops))


def _fit_ops(records: list[Record], folder: Path) -> list[dict[str, Any]]:
    """Replaces the op curves of the profiles in a folder; returns one row for each fitted one."""
    from calibration.op_fit import fit_profiles, write_curves
    from simcore.profile import parse_profile

    profiles = {p.stem: parse_profile(p.read_bytes(), p.name) for p in folder.glob("*.json")}
    if not profiles:
        raise UsageError(f"--profiles {folder}: no device profiles there")
    curves = fit_profiles(records, profiles)
    write_curves(curves, folder)
    return [
        {
            "device": kind, "op_class": op_class, "dtype": dtype, "num_samples": curve.num_samples,
            "outcome": curve.value.outcome,
            **{name: to_builtins(found) for name, found in curve.value.held_out.items()},
        }
        for kind, by_class in sorted(curves.items())
        for op_class, by_dtype in by_class.items()
        for dtype, curve in by_dtype.items()
        if curve.tag == "fitted"
    ]  # fmt: skip


def _records(args: argparse.Namespace) -> list[Record]:
    from calibration.records import read_records

    if not args.records and args.data is None:
        raise UsageError("give RECORDS, or --data DIR")
    records = [record for path in args.records for record in read_records(path)]
    found = {} if args.data is None else _read_all(args.data)
    return records + [record for imported in found.values() for record in imported.records]


def _errors(found: Errors | None) -> dict[str, Any] | None:
    return None if found is None or not found.cases else found._asdict()


def _link_rows(records: list[Record]) -> list[dict[str, Any]]:
    from calibration.links import fit_links

    return [
        {
            "topology": name,
            "outcome": fit.outcome,
            "latency_us": fit.latency / US,
            "latency_error_us": fit.latency_error / US,
            "bandwidth_GBps": fit.bandwidth / GB,
            "bandwidth_relative_error": fit.bandwidth_error,
            "num_samples": fit.num_samples,
        }
        for name, fit in fit_links(records).items()
    ]


def _show_fit(
    rows: list[dict[str, Any]], links: list[dict[str, Any]], ops: list[dict[str, Any]]
) -> None:
    columns = ["curve", "members", "topology", "points", "samples", "unseen sizes", "unseen group"]
    show_table(
        columns,
        [
            [
                row["kind"], str(row["num_members"]), row["topology"], str(row["points"]),
                f"{row['num_samples']:,}", *(
                    "" if row[key] is None else f"{row[key]['median']:.1%}"
                    for key in ("held_out_sizes", "held_out_group")
                ),
            ]
            for row in rows
        ],
        right={1, 3, 4, 5, 6},
    )  # fmt: skip
    show_table(
        ["link", "latency", "bandwidth", "samples"],
        [
            [
                row["topology"],
                f"{row['latency_us']:.1f} ± {row['latency_error_us']:.1f} us",
                f"{row['bandwidth_GBps']:.1f} GB/s ± {row['bandwidth_relative_error']:.1%}",
                f"{row['num_samples']:,}",
            ]
            for row in links
        ],
    )
    if ops:
        held = ("interpolation", "extrapolation")
        show_table(
            ["device", "op class", "dtype", "samples", *held],
            [
                [
                    row["device"], row["op_class"], row["dtype"], f"{row['num_samples'] or 0:,}",
                    *(f"{row[name]['median']:.1%}" if name in row else "" for name in held),
                ]
                for row in ops
            ],
        )  # fmt: skip
    print("errors are medians on sizes, group sizes and shapes that the fit did not see")


def _validate(args: argparse.Namespace) -> Answer:
    from calibration.pictures import draw
    from calibration.validate import validate

    found = validate(args.data, lambda name: note(f"{name} ..."), published=not args.without_runs)
    if found.absent:
        note(f"nothing of {', '.join(found.absent)}")
    pictures = [] if args.out is None else draw(found, args.out)
    data = found.result() | {"pictures": [str(path) for path in pictures]}
    cases = [result["cases"] for result in data["sources"].values()]
    status = OK if any(cases) else FAILED
    return Answer(data=data, show=lambda: _show_validation(found), status=status)


def _show_validation(found: Validation) -> None:
    rows = []
    for name, result in found.result()["sources"].items():
        shown = [
            "-" if result[key] is None else f"{result[key]:.1%}"
            for key in ("median", "mean", "p90", "bias")
        ]
        rows.append([name, f"{result['cases']:,}", f"{result['coverage']:.0%}", *shown])
    show_table(["source", "cases", "coverage", "median", "mean", "p90", "bias"], rows)
    if any(score.runs for score in found.runs.values()):
        _show_cells(found)


def _show_cells(found: Validation) -> None:
    """Shows ranks inside cells, of the simulator and of the closed form (in brackets)."""
    rows = []
    for name, score in sorted(found.runs.items()):
        result = score.result()
        other = result["baseline"]
        if not result["cells"]:
            continue
        rows.append([
            name, str(result["cells"]),
            *(
                f"{_share(result[key])} ({_share(other[key])})"
                for key in ("mean", "rank_correlation", "regret", "worst_regret")
            ),
        ])  # fmt: skip
    columns = ["runs (closed form)", "cells", "mean", "rank correlation", "regret", "worst"]
    show_table(columns, rows, right={1, 2, 3, 4, 5})
    _show_intervals(found)


def _show_intervals(found: Validation) -> None:
    """Shows how often runs are inside deciles, of others and stated, and how times scale.

    How far the share of a sample is known is in brackets.
    """
    rows = []
    for name, score in sorted(found.runs.items()):
        result = score.result()
        scaling = result.get("scaling", {}).get("mean")
        stated, known = result.get("stated_coverage"), result.get("stated_range")
        others = result["interval_coverage"]
        if any(value is not None for value in (others, stated, scaling)):
            more = f" ({known[0]:.0%} to {known[1]:.0%})" if known else ""
            rows.append([name, _share(others), _share(stated) + more, _share(scaling)])
    columns = ["runs", "inside p10-p90 of others", "inside p10-p90 stated", "scaling, mean error"]
    show_table(columns, rows, right={1, 2, 3})


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
