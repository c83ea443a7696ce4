"""Scripts of a pipeline -> scripts of several copies of it, which average their gradients.

Each copy is a pipeline of its own with its share of every microbatch. Ranks of one stage in all
copies average gradients bucket by bucket, each as soon as the rank has the last gradient of it.
"""

from collections.abc import Sequence

import numpy as np

from calibration.run.recording import Recording
from calibration.run.script import STEP, Do, Instruction, Message, Script
from simcore.buckets import close_buckets
from simcore.plan import Buckets

_ABOUT_MESSAGES = {Do.POST, Do.TAKE, Do.SEND}


def copy_scripts(
    scripts: Sequence[Script], recording: Recording, copies: int, buckets: Buckets
) -> list[Script]:
    """Returns the scripts of all copies: those of the first copy, then those of the second, ….

    Args:
        scripts: of one copy, [rank].
        recording: what the scripts' items are.
        copies: how many.
        buckets: how gradients are put together.
    """
    count = len(scripts)
    messages = tuple(
        _moved(message, copy * count) for copy in range(copies) for message in scripts[0].messages
    )
    partners = tuple(tuple(range(rank, copies * count, count)) for rank in range(count))
    found = []
    for copy in range(copies):
        ahead = copy * len(scripts[0].messages)
        for script in scripts:
            instructions, sums = _with_sums(script, recording, buckets)
            found.append(
                Script(
                    script.rank + copy * count,
                    tuple(
                        each._replace(what=each.what + ahead)
                        if each.do in _ABOUT_MESSAGES
                        else each
                        for each in instructions
                    ),
                    messages,
                    sums,
                    partners,
                )
            )
    return found


def _moved(message: Message, ranks: int) -> Message:
    return message._replace(source=message.source + ranks, target=message.target + ranks)


def _with_sums(
    script: Script, recording: Recording, buckets: Buckets
) -> tuple[list[Instruction], tuple[tuple[int, ...], ...]]:
    """Returns the instructions with sums among them, and the parameters of each sum.

    What other ranks add to (a tied parameter's gradient) is complete after updates have begun, and
    is summed by itself.
    """
    ready = _ready(script, recording)
    order = sorted(ready, key=lambda number: ready[number])
    begin = [each.do for each in script.instructions].index(Do.UPDATE) if ready else 0
    early = np.array([number for number in order if ready[number] < begin], np.int64)
    sizes = np.array([each.value.bytes for each in recording.trained], np.int64)
    sums = tuple(
        tuple(bucket.tolist())
        for bucket in (close_buckets(early, sizes, buckets) if len(early) else ())
    ) + tuple((number,) for number in order if ready[number] >= begin)
    after: dict[int, list[Instruction]] = {}
    for number, bucket in enumerate(sums):
        position = max(ready[each] for each in bucket)
        name = f"sum of bucket {number}"
        after.setdefault(position, []).append(Instruction(Do.SUM, number, STEP, name))
    found: list[Instruction] = []
    for position, instruction in enumerate(script.instructions):
        found += [instruction, *after.get(position, ())]
    return found, sums


def _ready(script: Script, recording: Recording) -> dict[int, int]:
    """Returns the instruction after which the gradient of each updated parameter is complete."""
    last: dict[int, int] = {}  # by storage
    ready: dict[int, int] = {}
    for position, each in enumerate(script.instructions):
        if each.do == Do.SETTLE:
            last[each.what] = position
        elif each.do == Do.TAKE and each.microbatch == STEP:
            last[script.messages[each.what].storage] = position
        elif each.do == Do.RUN and each.microbatch == STEP and each.what >= 0:
            last |= {value.storage: position for value in recording.tape.ops[each.what].writes}
        elif each.do == Do.UPDATE:
            ready[each.what] = last[recording.trained[each.what].gradient.storage]
    return ready
