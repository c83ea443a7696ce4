"""The job: what is trained beside the graph; plans are compared at equal job only."""

import hashlib
import math
from typing import Literal, get_args

import msgspec

from simcore.errors import JobError

Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
Precision = Literal["fp32", "bf16", "fp16"]

# fp32 state tensors an optimizer keeps per parameter element
_STATE_TENSORS: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training job.

    Attributes:
        batch: samples of one step over all devices; None where a measured graph does not say.
        sequence_length: tokens per sample (or the model's own length where it has one).
        optimizer: the optimizer, which decides state memory and update traffic.
        precision: dtype of parameters, activations and gradients. With 16 bits the optimizer keeps
            an fp32 master copy of the parameters, and its state stays fp32.
        assume_linear: scale the measured seconds of a fixed graph linearly to another batch.
        clip_norm: global gradient-norm limit; one more pass over the gradients.
        loss_scaling: gradients are checked and unscaled; one more pass over the gradients.
    """

    batch: int | None = None
    sequence_length: int | None = None
    optimizer: Optimizer = "adam"
    precision: Precision = "fp32"
    assume_linear: bool = False
    clip_norm: float | None = None
    loss_scaling: bool = False

    def __post_init__(self) -> None:
        for key in ("batch", "sequence_length"):
            value = getattr(self, key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise JobError(f"job: {key} must be a whole number, not {value!r}")
            if not 1 <= value <= 2**40:
                raise JobError(f"job: {key} must be between 1 and 2**40, not {value}")
        for key, known in (("optimizer", Optimizer), ("precision", Precision)):
            if getattr(self, key) not in get_args(known):
                raise JobError(
                    f"job: {key} must be one of {', '.join(get_args(known))}, "
                    f"not {getattr(self, key)!r}"
                )
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise JobError(f"job: clip_norm must be positive and finite, not {self.clip_norm}")
        if isinstance(self.clip_norm, int):  # 1 and 1.0 are one job, with one hash
            msgspec.structs.force_setattr(self, "clip_norm", float(self.clip_norm))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter element."""
        return 4 if self.precision == "fp32" else 2

    def state_bytes_per_element(self) -> int:
        """Returns bytes kept per parameter element beside parameter and gradient.

        fp32 Adam keeps 8 bytes; mixed-precision Adam 12 (two moments and the master copy), which
        with 2 + 2 bytes of parameter and gradient gives the usual 16 bytes per parameter.
        """
        master = 0 if self.precision == "fp32" else 4
        return 4 * _STATE_TENSORS[self.optimizer] + master

    def update_traffic_per_element(self) -> int:
        """Returns bytes that a fused update reads and writes per parameter element."""
        passes = 1 + (self.clip_norm is not None) + self.loss_scaling
        gradients = passes * self.parameter_bytes
        return 2 * (self.parameter_bytes + self.state_bytes_per_element()) + gradients

    def content_hash(self) -> str:
        """Returns 16 hex digits that change with any field."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def replace(self, **changes: object) -> "Job":
        """Returns a copy with the given fields changed, checked like a new one."""
        try:
            return msgspec.convert(msgspec.structs.asdict(self) | changes, Job)
        except msgspec.ValidationError as error:
            raise JobError(f"job: {error}") from None
