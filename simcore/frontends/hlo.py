"""HLO and StableHLO text -> OpGraph and Job: training steps of JAX, and of all that lowers to XLA.

The file holds one step: from parameters, optimizer state and batch to new parameters, new state
and loss. What is what is found in it (`hlo_roles`), as is the batch (`hlo_batch`); nothing is run.
"""

import re

from simcore.errors import GraphError
from simcore.frontends.hlo_graph import graph_of_step
from simcore.frontends.hlo_step import lay_out
from simcore.frontends.hlo_text import decode_hlo
from simcore.frontends.stablehlo_text import decode_stablehlo
from simcore.graph import OpGraph
from simcore.job import Job

_HLO = re.compile(r"^\s*HloModule\b")
_STABLEHLO = re.compile(r"^\s*(?:#\w|//|module\b|func\.func\b|\"builtin\.module\")")
_DIALECTS = re.compile(r"\b(?:stablehlo|mhlo)\.")


def is_hlo(text: str) -> bool:
    """Whether a text is HLO or StableHLO."""
    return bool(_HLO.match(text)) or (_STABLEHLO.match(text) is not None and "func.func" in text)


def decode_step(text: str, source: str) -> tuple[OpGraph, Job]:
    """Returns the graph of a training step, and its job: batch, optimizer, precision.

    Args:
        text: HLO or StableHLO.
        source: path, for messages.

    Raises:
        GraphError: the text breaks its grammar, or is no training step; names file, line and op.
    """
    text = text.replace("\r\n", "\n")
    if _HLO.match(text):
        program = decode_hlo(text, source)
    elif _DIALECTS.search(text):
        program = decode_stablehlo(text, source)
    else:
        raise GraphError(f"{source}: a module of MLIR without ops of StableHLO")
    try:
        graph, job = graph_of_step(lay_out(program))
    except RecursionError:
        raise GraphError(f"{source}: functions that call each other without end") from None
    return graph, job
