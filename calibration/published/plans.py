"""Plans of published runs: tensor, pipeline and data parallel as Megatron-LM lays them out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.pipeline_build import semantics_of
from simcore.plan import CUSTOM, DEFAULT_BUCKETS, RANK_HOSTS, Buckets, Plan, Stage
from simcore.recompute import Recompute
from simcore.schedule import Action, Schedule
from simcore.shards import linkage_of
from simcore.signature import Phase

AFTER_THE_BACKWARD = Buckets(num_bytes=0, as_views=True)
_SPLIT = (  # linkage groups that tensor parallelism splits: of Megatron's models, Llama and OPT
    "query_key_value.weight:0",
    "dense_h_to_4h.weight:0",
    "word_embeddings.weight:0",
    "attention.query.weight:0",
    "mlp.gate.weight:0",
    "head.weight:0",
    "q_proj.weight:0",
    "fc1.weight:0",
    "embedding.words.weight:0",
)
_LAYER = re.compile(r"layers\.(?:part)?(\d+)(?:\.|$)")
_POSITIONS = ("embedding.arange:0:0", "input.input_ids:0:1")  # what sequence parallelism splits
# beside; the first that a graph has


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is shared out.

    Attributes:
        tp: devices that share a layer.
        pp: pipeline ranks.
        dp: copies.
        cp: devices that share the positions of a copy.
        chunks: stages of a rank.
        microbatch: samples of a microbatch, of one copy.
        sequence: whether what lies between the split layers is split by position.
        recompute: of all stages, or of every so many.
        recompute_every: stages of which one runs again.
        spares: whether the microbatch that is last forward and first backward runs nothing again,
            as in torchgpipe; in our schedules it is microbatch 0 that is first backward.
        optimizer_sharding: ZeRO's stage.
        schedule: by name; "" = what Megatron takes for as many chunks.
        stage_layers: of each stage; () = as equal as they divide. They may count what comes before
            and what comes after the layers as one each.
        overlap: whether gradients are summed in buckets beside the backward, as torch's DDP does;
            else in one piece after it.
        algorithm: of those sums, see `simcore.plan.Buckets`.
        blocks: parts of the model, one after the other, whose parameters are fetched and whose
            gradients are summed apart, as the units of FSDP are; needs one pipeline rank.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    chunks: int = 1
    microbatch: int = 1
    sequence: bool = False
    recompute: Recompute = "none"
    recompute_every: int = 1
    spares: bool = False
    optimizer_sharding: int = 0
    schedule: str = ""
    stage_layers: tuple[int, ...] = ()
    overlap: bool = False
    algorithm: str = "auto"
    blocks: int = 1

    @property
    def num_stages(self) -> int:
        """Stages, on all ranks."""
        return self.pp * self.chunks * self.blocks

    @property
    def schedule_name(self) -> str:
        """Of the schedule."""
        if self.blocks > 1:
            return CUSTOM
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def num_devices(self) -> int:
        """Devices that it needs."""
        return self.per_rank * self.pp

    @property
    def per_rank(self) -> int:
        """Devices of a pipeline rank."""
        return self.tp * self.dp * self.cp

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of the devices of a pipeline rank."""
        inside = {"cp": self.cp, "tp": self.tp}
        return {"dp": self.dp} | {axis: size for axis, size in inside.items() if size > 1}


def plan_of(graph: OpGraph, cluster: Cluster, job: Job, layout: Layout) -> Plan:
    """Returns the plan of a layout; devices of a tensor group are neighbours, then copies.

    Raises:
        PlanError: the graph has nothing to split.
    """
    names = cluster.device_names
    ops = stage_ops(graph, layout.num_stages, layout.stage_layers)
    per_rank, mesh = layout.per_rank, layout.mesh
    splits = {"cp": positions_of(graph), "tp": split_groups(graph, sequence=layout.sequence)}
    sharding = {axis: splits[axis] for axis in mesh if axis in splits}
    stages = tuple(
        Stage(
            name=f"stage{number}",
            devices=names[number % layout.pp * per_rank :][:per_rank],
            ops=tuple(mine) if len(ops) > 1 else (),
            mesh=mesh,
            sharding=sharding,
            recompute="none" if number % layout.recompute_every else layout.recompute,
        )
        for number, mine in enumerate(ops)
    )
    plan = Plan.data_parallel(graph, cluster, job, names[:per_rank], settings=RANK_HOSTS)
    count = (job.batch or 1) // (layout.dp * layout.microbatch)
    blocks = block_schedule(layout.blocks, count) if layout.blocks > 1 else None
    buckets = DEFAULT_BUCKETS if layout.overlap else AFTER_THE_BACKWARD
    plan = msgspec.structs.replace(
        plan,
        stages=stages,
        microbatches=count,
        schedule=layout.schedule_name,
        actions=tuple(tuple(map(str, row)) for row in blocks.actions) if blocks else (),
        optimizer_sharding=layout.optimizer_sharding,
        buckets=msgspec.structs.replace(buckets, algorithm=layout.algorithm),
    )
    return msgspec.structs.replace(plan, semantics=semantics_of(plan, graph))


def block_schedule(blocks: int, microbatches: int) -> Schedule:
    """Returns one rank that runs each microbatch forth and back through the blocks of a model."""
    forth = range(blocks)
    actions = [
        Action(block, phase, microbatch)
        for microbatch in range(microbatches)
        for phase, order in ((Phase.F, forth), (Phase.B, reversed(forth)))
        for block in order
    ]
    return Schedule(
        name=CUSTOM,
        num_ranks=1,
        num_stages=blocks,
        num_microbatches=microbatches,
        stage_rank=(0,) * blocks,
        actions=(tuple(actions),),
    )


def split_groups(graph: OpGraph, *, sequence: bool) -> tuple[str, ...]:
    """Returns the names of the linkage groups that tensor parallelism splits."""
    names = [group.name for group in linkage_of(graph).groups]
    split = [name for name in names if name.endswith(_SPLIT)]
    return (*split, *positions_of(graph)) if sequence else tuple(split)


def positions_of(graph: OpGraph) -> tuple[str, ...]:
    """Returns the name of the linkage group of positions, as the only one."""
    names = {group.name for group in linkage_of(graph).groups}
    return next(((name,) for name in _POSITIONS if name in names), _POSITIONS[:1])


def stage_ops(graph: OpGraph, count: int, sizes: Sequence[int] = ()) -> Sequence[Sequence[str]]:
    """Returns the placement units of each stage.

    Args:
        graph: its layers are modules ``layers.0`` or ``layers.part0``, and so on.
        count: of stages.
        sizes: layers of each, what comes before and after them counted or not; () = equal numbers
            of layers, as far as they divide.

    Raises:
        PlanError: sizes that are not those of the model.
    """
    number = [_layer(unit) for unit in graph.unit_names]
    num_layers = max((layer for layer in number if layer is not None), default=0) + 1
    stages = _stage_of_place(num_layers, count, sizes)
    found: list[list[str]] = [[] for _ in range(count)]
    for unit, layer in zip(graph.unit_names, number, strict=True):
        is_before = unit.split(".")[0] in ("embedding", "input")
        place = layer + 1 if layer is not None else 0 if is_before else num_layers + 1
        found[stages[place]].append(unit)
    return found


def _stage_of_place(num_layers: int, count: int, sizes: Sequence[int]) -> list[int]:
    """Returns the stage of what comes before the layers, of each layer, and of what comes after."""
    if not sizes:
        inside = [layer * count // num_layers for layer in range(num_layers)]
        return [0, *inside, count - 1]
    spread = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    if len(sizes) != count or len(spread) not in (num_layers, num_layers + 2):
        raise PlanError(f"stages of {tuple(sizes)} layers for a model of {num_layers}")
    return spread if len(spread) == num_layers + 2 else [0, *spread, count - 1]


def _layer(unit: str) -> int | None:
    found = _LAYER.match(unit)
    return int(found[1]) if found else None
