"""The bytes of a graph at the samples that one device sees."""

import numpy as np

from simcore.errors import PlanError
from simcore.graph import MAX_TOTAL, OpGraph, Role, Sized
from simcore.job import Job

GROWING = (Role.ACTIVATION, Role.INPUT)  # of a measured minibatch, whose sizes have no slope


def sizes_at(graph: OpGraph, job: Job, batch: int | None) -> Sized:
    """Returns the sizes at a batch; those of a measured minibatch scale with its seconds."""
    sized = graph.at_batch(batch)
    measured = None if graph.fixed is None else graph.fixed.batch or job.batch
    if measured is None or batch in {None, measured} or graph.tensor_bytes[:, 1].any():
        return sized
    if float(sized.tensor_bytes.sum()) * batch > MAX_TOTAL:
        raise PlanError(f"{graph.name}: over 2**62 bytes at batch {batch}")
    grows = np.isin(graph.tensor_role, GROWING)
    scaled = -(-sized.tensor_bytes * batch // measured)
    tensor_bytes = np.where(grows, scaled, sized.tensor_bytes)
    return sized._replace(
        tensor_bytes=tensor_bytes, storage_bytes=graph.storage_bytes(tensor_bytes)
    )
