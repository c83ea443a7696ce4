"""What messages between pipeline stages cost a host that waits for each op."""

from collections.abc import Sequence
from dataclasses import replace

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
