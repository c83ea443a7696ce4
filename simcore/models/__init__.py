"""Models by name: what each is, how to build it, and the job it is planned for by default.

Importing this package does not import torch; building a model does. The modules are our own,
faithful to the published architectures down to the parameter count, and `module(**inputs(batch))`
is the training loss. They are built in fp32; a job's precision is the capture's to apply.
"""

import difflib
import importlib
from typing import TYPE_CHECKING

from simcore.errors import GraphError, JobError
from simcore.job import Job
from simcore.models.specs import SPECS, ModelSpec

if TYPE_CHECKING:
    from simcore.models.inputs import Built

__all__ = ["ModelSpec", "build", "model_names", "model_spec"]


def model_names() -> list[str]:
    """Returns the names of all models, in alphabetical order."""
    return sorted(SPECS)


def model_spec(name: str) -> ModelSpec:
    """Returns the model of a name.

    Raises:
        GraphError: there is none; says which is meant and which there are.
    """
    if name in SPECS:
        return SPECS[name]
    key = name.lower().replace("_", "-").replace(" ", "-")
    close = difflib.get_close_matches(key, SPECS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise GraphError(f"model {name!r} is unknown{hint} (models: {', '.join(model_names())})")


def model_size(name: str, job: Job) -> int:
    """Returns the size a model is built for under a job: tokens, or pixels of an image's side.

    Raises:
        GraphError: there is no such model.
        JobError: the model cannot have that size.
    """
    spec = model_spec(name)
    size = job.sequence_length or spec.default_job.sequence_length
    least, greatest = spec.sizes
    if size is None or not least <= size <= greatest:
        raise JobError(
            f"model {name}: sequence_length must be {least} to {greatest} {spec.unit}, not {size}"
        )
    return size


def build(name: str, job: Job) -> "Built":
    """Builds a model on the meta device, and the maker of its inputs.

    Args:
        name: one of `model_names()`.
        job: its `sequence_length`, where given, replaces the default size (for image models: pixels
            of a side). Nothing else of it is used.

    Returns:
        (module, inputs): `module(**inputs(batch))` is a scalar loss. The inputs are made on the
        ambient device and in the ambient fake mode.

    Raises:
        GraphError: there is no such model.
        JobError: the model cannot have that size.
    """
    size = model_size(name, job)
    import torch

    file, _, function = SPECS[name].factory.partition(":")
    factory = getattr(importlib.import_module(f"{__name__}.{file}"), function)
    with torch.device("meta"):
        built: Built = factory(size)
    return built
