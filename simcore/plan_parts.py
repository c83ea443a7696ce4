"""The parts of a plan: how it is simulated, its stages, what was asked for, who found it."""

from typing import Literal

import msgspec

from simcore.steady_state import SEMANTICS_ASYNC

NO_SCHEDULE = "none"
SEMANTICS_BATCH_NORM = "batch norm per microbatch"
SEMANTICS = (SEMANTICS_ASYNC, SEMANTICS_BATCH_NORM)  # what a plan may change, if it says so
CUSTOM = "custom"  # a schedule whose action lists are in the plan


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan is simulated; kept in the plan file.

    Attributes:
        order: ``program`` (a CUDA stream) or ``ready`` (a dataflow executor).
        host: ``one`` process drives all devices, or one ``per_rank``.
        launch: ``eager`` pays the launch overhead per kernel, ``graph`` does not.
        p2p: ``copy``: transfers run on a side stream; ``inline``: they occupy the compute streams
            of both devices, just before their first reader; ``rendezvous``: they start once the
            receiver's stream has come to their first reader. The last two need ``program`` order.
        contention: ``none`` (transfers hold nothing), ``port`` (the sender's port, in plan order),
            ``ordered`` (every channel, in plan order), ``fifo`` (every channel, by request) or
            ``fair`` (channels are shared, max-min fair).
        slow_down: whether compute and communication slow each other as the profiles say.
        granularity: of pipelines; ``task``: each phase of a stage is one task; ``op``: op by op.
    """

    order: Literal["program", "ready"] = "program"
    host: Literal["one", "per_rank"] = "one"
    launch: Literal["eager", "graph"] = "eager"
    p2p: Literal["copy", "inline", "rendezvous"] = "copy"
    contention: Literal["none", "port", "ordered", "fifo", "fair"] = "fair"
    slow_down: bool = True
    granularity: Literal["task", "op"] = "task"


ONE_HOST = Settings()
RANK_HOSTS = Settings(host="per_rank")
LIKE = {  # what other simulators do, to compare with what was found or trained on them
    # aravic/generalizable-device-placement: devices take ops as they become ready, a sender sends
    # one tensor at a time, and hosts take no time. There are no links: on a cluster with a wire for
    # each pair of devices times are the same, but that there one send serves all devices that read
    # a tensor, and here each gets its own.
    "placeto": Settings(order="ready", launch="graph", contention="fifo", slow_down=False),
}


class Ref(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan belongs to: a name for people, a hash that decides, a source to find it again."""

    name: str
    hash: str
    source: str = ""


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ops that one ordered device list executes.

    Attributes:
        devices: device names, in order; stages with the same list share a pipeline rank.
        ops: placement units (their first ops' names); none = all ops, of the only stage.
        mesh: named axes over the list, for example ``{"dp": 4, "tp": 2}``, the last one fastest;
            excludes a placement.
        sharding: axis other than ``dp`` -> linkage groups that it splits, in the order in which an
            op takes the first that it has.
        placement: placement unit -> device name; only where there is one stage.
        recompute: what the backward computes again instead of keeping it: nothing, the attention
            core of each block, or all of each block but its inputs.
    """

    devices: tuple[str, ...]
    name: str = "stage0"
    ops: tuple[str, ...] = ()
    mesh: dict[str, int] | None = None
    sharding: dict[str, tuple[str, ...]] = {}
    placement: dict[str, str] | None = None
    recompute: Literal["none", "selective", "full"] = "none"


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asked for."""

    pins: dict[str, str] = {}
    exclude: tuple[str, ...] = ()
    reserve_memory_bytes: int = 0


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulator said when the plan was made."""

    step_time_s: float
    throughput_samples_per_s: float | None
    peak_memory_bytes: dict[str, int]
    lower_bound_s: float
    simulator: str
    profiles: dict[str, str] = {}  # device kind -> hash of its hardware profile


class Buckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients are put together before copies of the model sum them.

    Attributes:
        num_bytes: a bucket is closed once it has as many; 0 = one bucket, after the backward.
        as_views: gradients live in the buckets; otherwise each bucket is a copy of them.
        algorithm: of the all-reduce; ``auto`` = the fastest on an idle network.
    """

    num_bytes: int = 25 * 2**20  # what torch's DistributedDataParallel takes
    as_views: bool = False
    algorithm: str = "auto"


DEFAULT_BUCKETS = Buckets()


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who found the plan, and with what effort."""

    strategy: str
    seed: int
    evaluations: int
    seconds: float
    budget_s: float | None = None
    baselines: dict[str, float | None] = {}  # step time in s, None = could not run
    baseline_notes: dict[str, str] = {}
