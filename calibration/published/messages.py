"""What messages between pipeline stages cost who sends them, beside the time on their way."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simcore.signature import Phase
from simcore.stages import StageTables


def with_messages(tables: Sequence[StageTables], floor: float) -> tuple[StageTables, ...]:
    """Returns tables in which a phase takes the host's time for each message it gets and sends.

    Args:
        tables: of each stage, [stage].
        floor: s of the host, of an op and of a message.
    """
    found = []
    for stage, table in enumerate(tables):
        messages = sum(stage in edge for edge in table.edges)
        seconds = table.seconds.copy()
        seconds[stage, [Phase.F, Phase.B]] += floor * messages
        found.append(replace(table, seconds=seconds))
    return tuple(found)


def with_sending(tables: Sequence[StageTables], rate: float) -> tuple[StageTables, ...]:
    """Returns tables in which a stage does nothing else while it sends, and nothing is on its way.

    Args:
        tables: of each stage, [stage].
        rate: bytes/s of a message.
    """
    found = []
    for stage, table in enumerate(tables):
        seconds = table.seconds.copy()
        for edge, (source, target) in enumerate(table.edges):
            if stage == source:
                seconds[stage, Phase.F] += table.forward_bytes[edge].sum() / rate
            if stage == target:
                seconds[stage, Phase.B] += table.backward_bytes[edge].sum() / rate
        none = np.zeros_like(table.forward_bytes)
        found.append(replace(table, seconds=seconds, forward_bytes=none, backward_bytes=none))
    return tuple(found)
