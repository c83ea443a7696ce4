"""A plan -> the fleet that runs it: what every rank does, on which device, over which backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from calibration.run.copies import CopyWork
from calibration.run.fleet import Fleet
from calibration.run.planned import place_ops
from calibration.run.shard_compile import shard_program
from calibration.run.sharded import ShardWork
from calibration.run.work import PlacedWork, Work
from simcore.cluster import Cluster
from simcore.errors import PlanError, RunError
from simcore.graph import OpGraph
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.shards import is_sharded

Backend = Literal["auto", "gloo", "nccl"]
DeviceType = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a plan is run.

    Attributes:
        backend: of torch.distributed; ``auto``: NCCL where every rank has a GPU of its own.
        device: where ranks run; ``auto``: a GPU for each GPU of the plan where there are as many.
        timeout: seconds after which a rank that does not answer ends the run.
        seed: of parameters and inputs.
    """

    backend: Backend = "auto"
    device: DeviceType = "auto"
    timeout: float = 60.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What the ranks of a plan do."""

    names: tuple[str, ...]  # device of the cluster, [rank]
    works: tuple[Work, ...]  # [rank]
    devices: tuple[str, ...]  # of torch, [rank]
    backend: str
    stands_in: bool  # a CPU process where the plan has a GPU

    def fleet(self, timeout: float) -> Fleet:
        """Returns the processes, not started."""
        return Fleet(self.devices, backend=self.backend, timeout=timeout)


def ranks_of(plan: Plan, graph: OpGraph, cluster: Cluster, source: str, launch: Launch) -> Ranks:
    """Returns what runs a plan.

    Args:
        plan: the plan.
        graph: its graph.
        cluster: its cluster.
        source: where the graph was captured from: a model by name or a factory.
        launch: how to run it.

    Raises:
        PlanError: the plan breaks a rule.
        RunError: the plan is of a kind that is not run, or this machine cannot run it.
    """
    if violations := plan.validate(graph, cluster, plan.job):
        raise PlanError(violations[0])
    _check(plan)
    works: tuple[Work, ...]
    if is_sharded(plan):
        names = plan.stages[0].devices
        works = (_shard_work(plan, graph, source, launch),) * len(names)
    elif not plan.is_pipeline and plan.stages[0].mesh is not None:
        names = plan.stages[0].devices
        if plan.job.batch is None or plan.job.batch % len(names):
            raise RunError(f"a batch of {plan.job.batch} does not divide by {len(names)} copies")
        work = CopyWork(source=source, job=plan.job, buckets=plan.buckets, seed=launch.seed)
        works = (work,) * len(names)
    else:
        placed = place_ops(plan, graph, cluster, source)
        names = placed.devices
        ranks = len(names) // placed.copies
        works = tuple(
            PlacedWork(
                script=script,
                recording=placed.recording,
                job=plan.job,
                source=source,
                num_microbatches=placed.num_microbatches,
                seed=launch.seed,
                copy=(rank // ranks, placed.copies),
            )
            for rank, script in enumerate(placed.scripts)
        )
    kinds = [cluster.devices[cluster.device_index(name)].kind for name in names]
    devices = _devices(kinds, launch.device)
    pairs = zip(kinds, devices, strict=True)
    return Ranks(
        names=names,
        works=works,
        devices=devices,
        backend=_backend(devices, launch.backend),
        stands_in=any(load_profile(k).is_cpu != d.startswith("cpu") for k, d in pairs),
    )


def _shard_work(plan: Plan, graph: OpGraph, source: str, launch: Launch) -> ShardWork:
    """Returns what every rank of a sharded plan does."""
    return ShardWork(
        program=shard_program(plan, graph, source),
        source=source,
        job=plan.job,
        seed=launch.seed,
    )


def _check(plan: Plan) -> None:
    """Refuses what is simulated, but not run."""
    job = plan.job
    if job.precision == "fp16" or job.loss_scaling:
        raise RunError("fp16 needs loss scaling, which a run does not do; bf16 and fp32 are run")
    if job.clip_norm is not None:
        raise RunError("the job clips gradients, which a run does not do")
    if plan.is_pipeline and is_sharded(plan):
        raise RunError("a pipeline whose stages are sharded is simulated, but not run for real")
    if plan.optimizer_sharding and any(len(stage.devices) > 1 for stage in plan.stages):
        raise RunError(
            f"optimizer_sharding {plan.optimizer_sharding} is simulated, but not run for real"
        )


def _devices(kinds: Sequence[str], wanted: DeviceType) -> tuple[str, ...]:
    """Returns torch's device of each rank."""
    is_gpu = [not load_profile(kind).is_cpu for kind in kinds]
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and sum(is_gpu) > found):
        return ("cpu",) * len(kinds)
    if sum(is_gpu) > found:
        raise RunError(f"the plan has {sum(is_gpu)} GPUs; this machine has {found}")
    numbers = iter(range(found))
    return tuple(f"cuda:{next(numbers)}" if gpu else "cpu" for gpu in is_gpu)


def _backend(devices: Sequence[str], wanted: Backend) -> str:
    on_gpus = all(device.startswith("cuda") for device in devices)
    if wanted == "nccl" and not on_gpus:
        raise RunError("--backend nccl: every rank needs a GPU of its own")
    return "nccl" if on_gpus and wanted in {"auto", "nccl"} else "gloo"
