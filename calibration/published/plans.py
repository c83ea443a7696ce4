"""Plans of published runs: tensor, pipeline and data parallel as Megatron-LM lays them out."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import RANK_HOSTS, Buckets, Plan, Stage
from simcore.recompute import Recompute
from simcore.shards import linkage_of

AFTER_THE_BACKWARD = Buckets(num_bytes=0, as_views=True)
_SPLIT = (  # linkage groups of `simcore.models.megatron` that tensor parallelism splits
    "query_key_value.weight:0",
    "dense_h_to_4h.weight:0",
    "word_embeddings.weight:0",
)
_POSITION = "embedding.arange:0:0"  # what sequence parallelism splits beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is shared out.

    Attributes:
        tp: devices that share a layer.
        pp: pipeline ranks.
        dp: copies.
        chunks: stages of a rank.
        microbatch: samples of a microbatch, of one copy.
        sequence: whether what lies between the split layers is split by position.
        recompute: of all stages.
        optimizer_sharding: ZeRO's stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    microbatch: int = 1
    sequence: bool = False
    recompute: Recompute = "none"
    optimizer_sharding: int = 0

    @property
    def num_devices(self) -> int:
        """Devices that it needs."""
        return self.tp * self.pp * self.dp


def plan_of(graph: OpGraph, cluster: Cluster, job: Job, layout: Layout) -> Plan:
    """Returns the plan of a layout; devices of a tensor group are neighbours, then copies.

    Raises:
        PlanError: the graph has nothing to split.
    """
    names = cluster.device_names
    ops = stage_ops(graph, layout.pp * layout.chunks)
    per_rank = layout.dp * layout.tp
    sharding = {"tp": split_groups(graph, sequence=layout.sequence)} if layout.tp > 1 else {}
    mesh = {"dp": layout.dp} | ({"tp": layout.tp} if layout.tp > 1 else {})
    stages = tuple(
        Stage(
            name=f"stage{number}",
            devices=names[number % layout.pp * per_rank :][:per_rank],
            ops=tuple(mine) if len(ops) > 1 else (),
            mesh=mesh,
            sharding=sharding,
            recompute=layout.recompute,
        )
        for number, mine in enumerate(ops)
    )
    plan = Plan.data_parallel(graph, cluster, job, names[:per_rank], settings=RANK_HOSTS)
    return msgspec.structs.replace(
        plan,
        stages=stages,
        microbatches=(job.batch or 1) // (layout.dp * layout.microbatch),
        schedule="interleaved" if layout.chunks > 1 else "1f1b",
        optimizer_sharding=layout.optimizer_sharding,
        buckets=AFTER_THE_BACKWARD,
    )


def split_groups(graph: OpGraph, *, sequence: bool) -> tuple[str, ...]:
    """Returns the names of the linkage groups that tensor parallelism splits."""
    names = [group.name for group in linkage_of(graph).groups]
    split = [name for name in names if name.endswith(_SPLIT)]
    return (*split, _POSITION) if sequence else tuple(split)


def stage_ops(graph: OpGraph, count: int) -> Sequence[Sequence[str]]:
    """Returns the placement units of each stage: equal numbers of layers, as far as they divide."""
    number = [_layer(unit) for unit in graph.unit_names]
    num_layers = max(layer for layer in number if layer is not None) + 1
    found: list[list[str]] = [[] for _ in range(count)]
    for unit, layer in zip(graph.unit_names, number, strict=True):
        if layer is not None:
            stage = layer * count // num_layers
        else:
            stage = 0 if unit.split(".")[0] in ("embedding", "input") else count - 1
        found[stage].append(unit)
    return found


def _layer(unit: str) -> int | None:
    parts = unit.split(".")
    return int(parts[1]) if parts[0] == "layers" else None
