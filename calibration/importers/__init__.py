"""Importers: folders of public measurements -> records; one registry, by the folder's name."""

from pathlib import Path

from calibration.importers import (
    aceso,
    aiconfigurator,
    deepbench,
    graphs,
    networks,
    neusight,
    pipedream,
    sailor,
    traces,
    vidur,
)
from calibration.importers.source import Imported, Importer
from simcore.errors import UsageError
from simcore.profile import suggestion

IMPORTERS: dict[str, Importer] = {
    importer.name: importer
    for importer in (
        aceso.IMPORTER,
        aiconfigurator.IMPORTER,
        deepbench.IMPORTER,
        graphs.NEUSIGHT_GRAPHS,
        graphs.TRIOSIM,
        networks.GALVATRON,
        networks.JEAN_ZAY,
        networks.ML_ENGINEERING,
        networks.NNSCALER,
        networks.P2P_LINKS,
        networks.TACCL,
        networks.VTRAIN,
        neusight.IMPORTER,
        pipedream.IMPORTER,
        sailor.IMPORTER,
        traces.IMPORTER,
        vidur.IMPORTER,
    )
}


def import_folder(source: str, folder: str | Path) -> Imported:
    """Returns the records of one source.

    Args:
        source: name of its importer.
        folder: where its files are.

    Raises:
        UsageError: no such importer.
        MeasurementError: a malformed file.
    """
    if source not in IMPORTERS:
        known = ", ".join(sorted(IMPORTERS))
        hint = suggestion(source, list(IMPORTERS))
        raise UsageError(f"no importer {source!r}{hint}; known: {known}")
    return IMPORTERS[source].read(Path(folder))
