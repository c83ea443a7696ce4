"""Op curves of all device kinds from measurement records, with errors on rows held out.

`fit_profiles(records, profiles)` takes records of any kinds (see `calibration.records`; those that
are no op of a class with curves are ignored) and returns, for every GPU kind of ``profiles``, the
``curves`` section of its file. `write_curves` puts it there. A curve is, first that applies:

- fitted to the kind's own rows, unless the class, without having seen this kind, predicts them
  better than they predict each other (few rows, or seconds that hold more than the op), or, where
  they are of a last resort, a kind of the same chip does; nor where large products would outrun
  the arithmetic (all rows are small and wait for memory);
- borrowed from a kind of the same chip, or from the other 16-bit type of the same kind;
- borrowed from the class: parameters fitted to all kinds at once, scaled by the kind's peaks. Its
  error is that of kinds left out of that fit.

Rows of a kind that were not fitted choose which curve it borrows.

Splits: shape groups (see `calibration.op_data`), never rows; and the largest decile of FLOPs.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from calibration.chips import TWINS, aligned, chip_of, family_of, is_odd_one, issued
from calibration.importers import IMPORTERS
from calibration.op_data import CURVED, LAST_RESORT, Key, samples_of
from calibration.op_models import Samples, fit_curve, pooled, predict
from calibration.records import Record
from simcore.atomic import write_whole
from simcore.op_curves import CURVE_ERROR
from simcore.op_forms import Device, Floats, HeldOut, OpCurve, Work, seconds
from simcore.profile import HardwareProfile, Tagged, parse_profile
from simcore.profile_store import SHIPPED

DATE = "2026-11"
LEAST_ROWS = 8  # of a fit
_FOLDS = 5
_ONE_FOLD_FROM = 1500  # rows, from which one fold tells enough
_LEAST_ERROR = 0.03  # of a fitted curve
_LARGE = 8192.0  # a side of a product that does not wait for memory
_BOOST = 1.15  # clocks above those that a stated peak is for, at most
_SOURCES = ("aceso_v100", "aiconfigurator", "deepbench", "neusight", "sailor", "vidur")
OfDtypes = dict[str, Tagged[OpCurve]]
Curves = dict[str, OfDtypes]


class ClassCurve(NamedTuple):
    """What all kinds together say of an op class and dtype."""

    curve: OpCurve
    kinds: tuple[str, ...]
    left_out: HeldOut | None  # over all kinds; None where one chip has rows
    by_kind: Mapping[tuple[str, str], HeldOut]  # kind left out (with its chip), dtype -> errors


Classes = Mapping[tuple[str, str], ClassCurve]


def fit_profiles(
    records: Iterable[Record], profiles: Mapping[str, HardwareProfile], jobs: int = 1
) -> dict[str, Curves]:
    """Returns the curves of every GPU kind: see the top of this file.

    Args:
        records: measurements.
        profiles: device kind -> profile.
        jobs: processes; the result does not depend on it.
    """
    usable = {
        kind: profile
        for kind, profile in profiles.items()
        if profile.multiprocessors is not None and profile.cache_MiB is not None
    }
    by_class: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "op" and record.op_class in CURVED:
            by_class.setdefault(record.op_class, []).append(record)
    largest_first = sorted(by_class.values(), key=len, reverse=True)
    work = functools.partial(_fit_class, profiles=usable)
    found = [work(group) for group in largest_first] if jobs == 1 else []
    if jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(work, largest_first))
    merged: dict[str, Curves] = {kind: {} for kind in usable}
    for part in found:
        for kind, curves in part.items():
            merged[kind] |= curves
    return {kind: dict(sorted(curves.items())) for kind, curves in merged.items()}


def _fit_class(records: list[Record], profiles: Mapping[str, HardwareProfile]) -> dict[str, Curves]:
    """Returns the curves of one op class."""
    samples = samples_of(records, profiles)
    sources = _sources(records)
    classes = _class_curves(
        {key: found for key, found in samples.items() if sources[key.kind] not in LAST_RESORT}
    )
    fitted: dict[str, Curves] = {kind: {} for kind in profiles}
    for key in sorted(samples, key=lambda key: (sources[key.kind] in LAST_RESORT, key)):
        sys.stderr.write(f"{key.kind} {key.op_class} {key.dtype}: {len(samples[key])} rows\n")
        found = _fitted(key, samples[key], classes, sources[key.kind], fitted)
        if found is not None:
            fitted[key.kind].setdefault(key.op_class, {})[key.dtype] = found
    return {kind: _borrowed(kind, profiles[kind], fitted, classes, samples) for kind in profiles}


def held_out(samples: Samples, start: OpCurve | None) -> dict[str, HeldOut]:
    """Returns errors on shape groups, and on the largest sizes, that a fit did not see.

    Args:
        samples: of a device.
        start: as of the fit.
    """
    large, parts = samples.flops >= np.quantile(samples.flops, 0.9), []
    for fold in range(1 if len(samples) > _ONE_FOLD_FROM else _FOLDS):
        out = (samples.group // 7) % _FOLDS == fold
        test, train = out & ~large, ~out & ~large
        if test.any() and train.sum() >= LEAST_ROWS:
            parts.append(_compare(fit_curve(samples.take(train), start), samples.take(test)))
    found = {}
    if parts:
        found["interpolation"] = _errors(np.concatenate(parts))
    if large.any() and (~large).sum() >= LEAST_ROWS:
        curve = fit_curve(samples.take(~large), start)
        found["extrapolation"] = _errors(_compare(curve, samples.take(large)))
    return found


def write_curves(curves: Mapping[str, Curves], folder: Path) -> None:
    """Writes the curves into the profiles of a folder; the rest of each file stays.

    Raises:
        ProfileError: a file that is no profile, or would be none any more.
    """
    for kind, found in curves.items():
        path = folder / f"{kind}.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["curves"] = _rounded(msgspec.to_builtins(found))
        text = _layout(content).encode()
        parse_profile(text, path.name)
        write_whole(path, text)


def _class_curves(samples: Mapping[Key, Samples]) -> dict[tuple[str, str], ClassCurve]:
    """Returns the curve of every op class and kind of arithmetic over all device kinds."""
    members: dict[tuple[str, str], list[Samples]] = {}
    for key, found in sorted(samples.items()):
        if len(found) >= LEAST_ROWS and not is_odd_one(key.kind, key.dtype):
            members.setdefault((key.op_class, family_of(key.dtype)), []).append(found)
    return {key: _class_curve(parts) for key, parts in members.items()}


def _class_curve(parts: list[Samples]) -> ClassCurve:
    curve = fit_curve(pooled(parts), surfaces=False)
    ratios = {}
    for part in parts:
        chip = chip_of(part.kinds[0])
        others = [other for other in parts if chip_of(other.kinds[0]) != chip]
        if others:
            left = fit_curve(pooled(others), surfaces=False)
            ratios[part.kinds[0], part.work.dtype] = _compare(left, part)
    return ClassCurve(
        curve=curve,
        kinds=tuple(sorted({kind for part in parts for kind in part.kinds})),
        left_out=_errors(np.concatenate(list(ratios.values()))) if ratios else None,
        by_kind={key: _errors(found) for key, found in ratios.items()},
    )


def _fitted(
    key: Key,
    mine: Samples,
    classes: Classes,
    source: str,
    fitted: Mapping[str, Curves],
) -> Tagged[OpCurve] | None:
    """Returns the curve of a kind from its own rows; None where they are too few, or others do."""
    if len(mine) < LEAST_ROWS:
        return None
    found = classes.get((key.op_class, family_of(key.dtype)))
    start = None if found is None else found.curve
    curve = fit_curve(mine, start)
    if outruns(curve, mine):
        return None
    errors = held_out(mine, start)
    others = []
    if found is not None and (unseen := _left_out(found, mine)) is not None:
        errors["device left out"] = unseen
        others.append(unseen.median)
    if source in LAST_RESORT:
        others += [_errors(_compare(o.value, mine)).median for o in _of_chip(key, fitted)]
    inside = errors.get("interpolation")
    if inside is not None and inside.median > min(others, default=np.inf):
        return None
    error = CURVE_ERROR if inside is None else max(_LEAST_ERROR, inside.p90 / 1.645)
    return Tagged(
        value=aligned(msgspec.structs.replace(curve, held_out=errors), key.kind),
        tag="fitted",
        source=f"public measurements: {source}",
        date=DATE,
        relative_error=min(error, 1.0),
        num_samples=len(mine),
    )


def outruns(curve: OpCurve, samples: Samples) -> bool:
    """Whether a curve says that large products are faster than the arithmetic of their device.

    Args:
        curve: fitted to samples.
        samples: of one device.
    """
    if samples.op_class != "matmul":
        return False  # convolutions may multiply less often than they are counted
    side = np.array([_LARGE])
    dims = {"m": side, "n": side, "k": side}
    device = Device(*(np.asarray(value)[:1] for value in samples.device))
    took = seconds(curve, Work(dims, np.zeros(1), samples.work.dtype), device)
    return bool(2.0 * _LARGE**3 / took[0] > _BOOST * np.asarray(device.peak)[0])


def _left_out(found: ClassCurve, mine: Samples) -> HeldOut | None:
    """Returns the errors of a class on a kind that it did not see; None where it is one chip's."""
    if mine.kinds[0] in found.kinds:
        return found.by_kind.get((mine.kinds[0], mine.work.dtype))
    return _errors(_compare(found.curve, mine))


def _borrowed(
    kind: str,
    profile: HardwareProfile,
    fitted: Mapping[str, Curves],
    classes: Classes,
    samples: Mapping[Key, Samples],
) -> Curves:
    """Returns the curves of a kind, the missing ones from its chip, its twin dtype or the class."""
    result: Curves = {}
    for op_class in sorted({name for name, _ in classes}):
        own = dict(fitted[kind].get(op_class, {}))
        for dtype in profile.peak_TFLOPS.value:
            key = Key(op_class, dtype, kind)
            found = None if dtype in own else _lent(key, fitted, classes, samples.get(key))
            if found is not None:
                own[dtype] = found
        known = {key.dtype for key in samples if key.kind == kind}
        if own:
            bandwidth = next(iter(own.values())).value.form == "bandwidth"
            result[op_class] = _without_repeats(own, known) if bandwidth else own
    return result


def _without_repeats(curves: OfDtypes, known: set[str]) -> OfDtypes:
    """Returns those of dtypes with rows, else the best: bytes take the same time in any dtype."""
    kept = {dtype: curve for dtype, curve in curves.items() if dtype in known}
    return kept or dict([min(curves.items(), key=lambda item: item[1].relative_error or 1.0)])


def _lent(
    key: Key,
    fitted: Mapping[str, Curves],
    classes: Classes,
    mine: Samples | None,
) -> Tagged[OpCurve] | None:
    """Returns the nearest curve; of those that there are the best where rows can tell."""
    offers = [*_of_chip(key, fitted), *_of_class(key, classes)]
    if mine is None or len(mine) < LEAST_ROWS:
        return next(iter(offers), None)
    return min(offers, key=lambda o: _errors(_compare(o.value, mine)).median, default=None)


def _of_chip(key: Key, fitted: Mapping[str, Curves]) -> Iterator[Tagged[OpCurve]]:
    """Yields curves of the other 16-bit type and of kinds of the same chip."""
    chip = [kind for kind in chip_of(key.kind) if kind != key.kind and kind in fitted]
    donors = [(key.kind, twin) for twin in TWINS.get(key.dtype, ()) if key.dtype != "fp8"]
    donors += [(kind, dtype) for kind in chip for dtype in (key.dtype, *TWINS.get(key.dtype, ()))]
    for kind, dtype in donors:
        found = fitted.get(kind, {}).get(key.op_class, {}).get(dtype)
        if found is not None and not is_odd_one(key.kind, key.dtype):
            source = f"{kind} {dtype}, scaled by the peaks ({found.source})"
            error = 1.5 * (found.relative_error or CURVE_ERROR)
            yield _lend(found.value, key.kind, source, max(0.1, error))


def _of_class(key: Key, classes: Mapping[tuple[str, str], ClassCurve]) -> Iterator[Tagged[OpCurve]]:
    common = classes.get((key.op_class, family_of(key.dtype)))
    if common is None:
        return
    source = f"all of {', '.join(common.kinds)} in one fit, scaled by the peaks"
    error = 0.4 if common.left_out is None else max(CURVE_ERROR, common.left_out.p90 / 1.645)
    held = {} if common.left_out is None else {"device left out": common.left_out}
    curve = msgspec.structs.replace(issued(common.curve, key.kind, key.dtype), held_out=held)
    yield _lend(curve, key.kind, source, error)


def _lend(curve: OpCurve, kind: str, source: str, error: float) -> Tagged[OpCurve]:
    value = msgspec.structs.replace(aligned(curve, kind), outcome="borrowed", standard_errors={})
    return Tagged(value, "borrowed", source, DATE, min(error, 1.0))


def _compare(curve: OpCurve, samples: Samples) -> Floats:
    return predict(curve, samples) / samples.seconds - 1.0


def _errors(signed: Floats) -> HeldOut:
    size = np.abs(signed)
    return HeldOut(
        len(signed), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(signed))
    )


def _sources(records: Iterable[Record]) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for record in records:
        names.setdefault(record.device, set()).add(record.folder)
    used = {kind: found - set(LAST_RESORT) or found for kind, found in names.items()}
    return {kind: ", ".join(sorted(found)) for kind, found in used.items()}


def _rounded(value: object) -> object:
    """Returns builtins with floats of four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(child) for key, child in value.items() if child is not None}
    return [_rounded(child) for child in value] if isinstance(value, list | tuple) else value


def _layout(content: Mapping[str, object]) -> str:
    """Returns JSON with one line a field, and one an op class."""
    lines = []
    for key, value in content.items():
        if key in ("efficiency", "curves") and isinstance(value, dict):
            inner = [f"    {json.dumps(name)}: {json.dumps(part)}" for name, part in value.items()]
            lines.append(f'  "{key}": {{\n' + ",\n".join(inner) + "\n  }")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Fits the shipped profiles to a folder of public measurements, and prints the errors."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="public data")
    parser.add_argument("--write", type=Path, help="folder of profiles to be written")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"{options.data}: there is no such folder")
    folder = options.write or SHIPPED / "devices"
    profiles = {
        path.stem: parse_profile(path.read_bytes(), path.name) for path in folder.glob("*.json")
    }
    records: list[Record] = []
    for name in _SOURCES:
        records += IMPORTERS[name].read(options.data / name).records
    curves = fit_profiles(records, profiles, options.jobs)
    for kind, by_class in sorted(curves.items()):
        for op_class, by_dtype in by_class.items():
            for dtype, tagged in by_dtype.items():
                _show(f"{kind} {op_class} {dtype}", tagged)
    if options.write:
        write_curves(curves, options.write)
    return 0


def _show(what: str, tagged: Tagged[OpCurve]) -> None:
    held = tagged.value.held_out
    errors = "  ".join(
        f"{name}: {e.cases} cases, median {e.median:.1%}, p90 {e.p90:.1%}"
        for name, e in held.items()
    )
    sys.stdout.write(f"{what}: {tagged.tag}, {tagged.value.outcome}  {errors}\n")


if __name__ == "__main__":
    sys.exit(main())
