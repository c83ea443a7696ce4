"""Pipelines whose places all do the same at the same time: one place of each stage is enough.

Where every rank has the same mesh over devices of one kind, each place sends to the place of its
own number. If no channel serves two places, or two sums of gradients, what happens to one place
happens to all, and the first one of each stage shows it. Hundreds of devices then cost what one
pipeline does. The sums of gradients keep all their members.
"""

from collections.abc import Iterator
from dataclasses import replace

from simcore.cluster import Cluster
from simcore.collectives import make_collective
from simcore.errors import PlanError
from simcore.mesh import DATA_AXIS
from simcore.pipeline import Pipeline
from simcore.result import DeviceUse, Result


def folded(pipeline: Pipeline, cluster: Cluster) -> Pipeline:
    """Returns the pipeline folded if that changes nothing, else as it is."""
    sizes = {mesh.sizes for mesh in pipeline.meshes}
    if len(sizes) > 1 or pipeline.meshes[0].num_devices == 1:
        return pipeline
    specs = [
        {(cluster.devices[device].kind, cluster.devices[device].memory) for device in rank}
        for rank in pipeline.devices
    ]
    if any(len(spec) > 1 for spec in specs) or not _apart(pipeline, cluster):
        return pipeline
    return replace(pipeline, is_folded=True)


def _apart(pipeline: Pipeline, cluster: Cluster) -> bool:
    """Whether all places have equal routes and sums, and no channel serves two of them."""
    groups = pipeline.meshes[0].members(DATA_AXIS).tolist()
    hops = _hops(pipeline, cluster)
    sums = _sums(pipeline, cluster, groups)
    if hops is None or sums is None or not (_disjoint(hops) and _disjoint(sums)):
        return False
    strangers = (
        hops[place] & channels
        for shard, channels in enumerate(sums)
        for other, group in enumerate(groups)
        if other != shard
        for place in group
    )
    return not any(strangers)


def _hops(pipeline: Pipeline, cluster: Cluster) -> list[set[int]] | None:
    """Returns the channels that messages of each place take; None: places have unlike routes."""
    found: list[set[int]] = [set() for _ in pipeline.devices[0]]
    for source, target in _pairs(pipeline):
        pairs = list(zip(source, target, strict=True))
        speeds = {(cluster.route_latency[pair], cluster.route_bandwidth[pair]) for pair in pairs}
        if len(speeds) > 1:
            return None
        for place, pair in enumerate(pairs):
            found[place] |= set(cluster.route(*pair))
    return found


def _sums(pipeline: Pipeline, cluster: Cluster, groups: list[list[int]]) -> list[set[int]] | None:
    """Returns the channels that the sums of each shard take; None: shards have unlike sums."""
    found: list[set[int]] = [set() for _ in groups]
    if len(groups[0]) == 1:
        return found
    for rank in pipeline.devices:
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            try:
                made = [
                    make_collective(kind, 2**20, cluster, [rank[place] for place in group])
                    for group in groups
                ]
            except PlanError:  # told where the sum is written
                return None
            if len({(each.algorithm, each.latency, each.duration) for each in made}) > 1:
                return None
            for shard, each in enumerate(made):
                found[shard] |= set(each.channels.tolist())
    return found


def _disjoint(sets: list[set[int]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


def _pairs(pipeline: Pipeline) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the devices of ranks that send to each other, both ways."""
    rank_of = pipeline.schedule.stage_rank
    ties = [(tie.source, tie.target) for tie in pipeline.ties]
    ranks = {
        (rank_of[a], rank_of[b])
        for edge in (*pipeline.schedule.edges, *ties)
        for a, b in (edge, edge[::-1])
    }
    for a, b in sorted(ranks):
        if a != b:
            yield pipeline.devices[a], pipeline.devices[b]


def unfolded(result: Result, pipeline: Pipeline, cluster: Cluster) -> Result:
    """Returns the result with what the first place of a stage does told of all its places."""
    if not pipeline.is_folded:
        return result
    uses: dict[int, DeviceUse] = dict(enumerate(result.devices))
    for rank in pipeline.devices:
        for device in rank[1:]:
            uses[device] = replace(result.devices[rank[0]], name=cluster.devices[device].name)
    devices = tuple(uses[device] for device in range(len(result.devices)))
    return replace(
        result, devices=devices, feasible=all(use.reserved <= use.capacity for use in devices)
    )
