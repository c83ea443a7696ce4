"""Which contention discipline a policy is trained on, per cluster.

The cheapest one whose ranking of placements agrees with the fullest (Spearman >= 0.95 and regret of
its top decile <= 1 % on every graph of the study); finalists are always simulated in full. Measured
by ``python -m bench.fidelity`` (results in bench/results/fidelity.json, 2026-11-30, 600 placements
of 4 graphs per cluster).
"""

from msgspec.structs import replace

from simcore.cluster import Cluster
from simcore.plan import Settings

FULL = "fair"
_TRAIN_ON = {
    "4xP100-PCIe": "fair",
    "4xV100-NVLink": "none",
    "8xV100-NVLink": "none",
    "2x8xV100": "none",
    "8xA100-NVSwitch": "none",
    "2x8xH100": "none",
    "2xA100+4xT4": "none",
}


def training_settings(cluster: Cluster, settings: Settings) -> Settings:
    """Returns the settings to train with; those given where the cluster was not studied.

    Args:
        cluster: the cluster; it is known by its content, not by its name.
        settings: how finalists are simulated.
    """
    if settings.order != "program" or settings.contention != FULL:
        return settings
    discipline = _TRAIN_ON.get(cluster.name)
    if discipline is None:
        return settings
    if cluster.content_hash() != Cluster.preset(cluster.name).content_hash():
        return settings
    return replace(settings, contention=discipline)
