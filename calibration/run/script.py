"""A plan and a recording -> one `Script` per rank: what a process does in a step, in order.

A rank runs its ops in the plan's order. A tensor goes once to each rank that reads it, right after
it is made; a receive is posted early (at the start of the step, or one action ahead in a pipeline)
and waited for just before the first reader. Gradients of microbatches are added up where they are
made, as soon as they are there; what a parameter's update reads runs once a step.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from calibration.run.recording import Recording, is_persistent
from simcore.errors import RunError
from simcore.frontends.torch_tape import ALL, Value
from simcore.signature import OpClass

STEP = -1  # the microbatch of what is there once a step


class Do(IntEnum):
    """What an instruction is."""

    RUN = 0  # item, microbatch
    INPUT = 1  # item, microbatch: takes samples of the batch, or a constant
    SETTLE = 2  # storage, microbatch: adds a gradient to those of earlier microbatches
    UPDATE = 3  # number of a trained parameter
    LOSS = 4  # microbatch
    POST = 5  # message
    TAKE = 6  # message
    SEND = 7  # message
    FREE = 8  # storage, microbatch
    SUM = 9  # bucket: gradients that are averaged over copies


class Instruction(NamedTuple):
    """One thing that a rank does."""

    do: Do
    what: int
    microbatch: int = STEP
    name: str = ""  # for people: op, tensor


class Message(NamedTuple):
    """A tensor, or a part of it, that goes from one rank to another."""

    source: int
    target: int
    storage: int
    region: tuple[int, ...]  # (byte offset, bytes of an element, stride, size, ...); () = all
    num_bytes: int
    microbatch: int
    is_overwritten: bool  # the sender writes the memory again, so it sends a copy
    name: str


class Script(NamedTuple):
    """What one rank does in a step."""

    rank: int
    instructions: tuple[Instruction, ...]
    messages: tuple[Message, ...]  # of all ranks; an index is a tag
    sums: tuple[tuple[int, ...], ...] = ()  # trained parameters of each bucket
    partners: tuple[tuple[int, ...], ...] = ()  # ranks that average together


class Event(NamedTuple):
    """One op in the order of the plan."""

    item: int  # op of the tape, or behind these a pseudo-op; see `items_of`
    rank: int
    microbatch: int
    action: int = 0  # of the rank's action list; receives are posted one action ahead
    again: bool = False


class Item(NamedTuple):
    """An op of the tape, the update of a parameter, or the refresh of a tied one."""

    name: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    do: Do
    what: int  # op, or number of the trained parameter


def items_of(recording: Recording, op_names: Sequence[str]) -> list[Item]:
    """Returns what the ops of a graph do, by the names of the graph's ops, [item].

    Views have no item: they are parts of storages here.

    Args:
        recording: of the same source.
        op_names: names of the graph's ops, in program order.

    Raises:
        RunError: the recording has other ops than the graph.
    """
    items = [
        Item(name, op.reads, op.writes, Do.INPUT if _is_input(op.kind.op_class) else Do.RUN, index)
        for index, (name, op) in enumerate(zip(recording.names, recording.tape.ops, strict=True))
    ]
    known = set(op_names)
    for item in items:
        if item.name not in known:
            raise RunError(
                f"at the plan's microbatch the model runs {item.name}, which the graph lacks"
            )
    trained = {each.name: number for number, each in enumerate(recording.trained)}
    for name in op_names:
        owner, _, what = name.rpartition(".")
        if what == "update" and owner in trained:
            items.append(_update(recording, name, trained[owner]))
        owner = name.rpartition(".refresh.")[0]
        if owner in trained:
            after = _updated(recording, trained[owner])
            items.append(Item(name, (after,), (), Do.RUN, -1))
    return items


def _is_input(op_class: OpClass) -> bool:
    return op_class is OpClass.INPUT


def _updated(recording: Recording, number: int) -> Value:
    trained = recording.trained[number]
    storage = trained.parameter.storage
    num_bytes = recording.tape.storages[storage].bytes
    return Value(storage, trained.version + 1, ALL, num_bytes)


def _update(recording: Recording, name: str, number: int) -> Item:
    after = _updated(recording, number)
    gradient = recording.trained[number].value
    before = after._replace(version=after.version - 1)
    return Item(name, (before, gradient), (after,), Do.UPDATE, number)


class _Made(NamedTuple):
    """Where a value is made."""

    rank: int
    position: int  # index of the event that makes it, or makes it complete


class Scripter:
    """Writes the scripts of all ranks."""

    def __init__(self, recording: Recording, items: Sequence[Item], events: list[Event]) -> None:
        self.items, self.events = items, events
        self.storages = recording.tape.storages
        self.loss = recording.loss_value
        self.messages: list[Message] = []
        self.sends: dict[int, list[int]] = defaultdict(list)  # event -> messages after it
        self.takes: dict[int, list[int]] = defaultdict(list)  # event -> messages before it
        self.late = {e.item for e in events if e.microbatch == STEP}
        self.settled = self._settled()
        self.made = self._made()
        self.last_version = self._last_versions()

    def scripts(self, num_ranks: int, *, ahead: int | None) -> list[Script]:
        """Returns what each rank does.

        Args:
            num_ranks: ranks.
            ahead: how many actions before its reader's a receive is posted; None = all at the
                start of the step.
        """
        self._plan_messages()
        messages = tuple(self.messages)
        return [
            Script(rank, tuple(self._freeing(self._instructions(rank, ahead))), messages)
            for rank in range(num_ranks)
        ]

    def _settled(self) -> set[tuple[int, int]]:
        """Returns (storage, version) of what microbatches make and an op of the step reads."""
        made = {
            value[:2]
            for index, item in enumerate(self.items)
            if index not in self.late
            for value in item.writes
        }
        read = {value[:2] for index in self.late for value in self.items[index].reads}
        return {key for key in made & read if not is_persistent(self.storages[key[0]].role)}

    def _made(self) -> dict[tuple[int, int, int], _Made]:
        """Returns where every value is made, by storage, version and microbatch."""
        made: dict[tuple[int, int, int], _Made] = {}
        for position, event in enumerate(self.events):
            for value in self.items[event.item].writes:
                here = _Made(event.rank, position)
                if event.again:
                    continue
                made[value.storage, value.version, event.microbatch] = here
                if value[:2] in self.settled:
                    made[value.storage, value.version, STEP] = here
        return made

    def _last_versions(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for item in self.items:
            for value in item.writes:
                last[value.storage] = max(last.get(value.storage, 0), value.version)
        return last

    def _plan_messages(self) -> None:
        has: set[tuple[int, ...]] = set()
        for position, event in enumerate(self.events):
            for value in self.items[event.item].reads:
                maker = self.made.get((value.storage, value.version, event.microbatch))
                if maker is None or maker.rank == event.rank:
                    continue
                key = (event.rank, value.storage, value.version, event.microbatch)
                if (*key, ALL) in has or (*key, value.region) in has:
                    continue
                has.add((*key, value.region))
                self.sends[maker.position].append(len(self.messages))
                self.takes[position].append(len(self.messages))
                self.messages.append(self._message(value, maker.rank, event))

    def _message(self, value: Value, source: int, event: Event) -> Message:
        storage = self.storages[value.storage]
        region: tuple[int, ...] = ()
        if value.region != ALL:
            key = next(key for key, number in storage.regions.items() if number == value.region)
            offset, size, *axes = key
            region = (offset, size, *(number for axis in axes for number in axis))
        writes_again = self.last_version.get(value.storage, 0) > value.version
        name = f"{storage.name} {source}->{event.rank}"
        return Message(
            source, event.rank, value.storage, region, value.bytes, event.microbatch,
            writes_again or is_persistent(storage.role), name,
        )  # fmt: skip

    def _instructions(self, rank: int, ahead: int | None) -> Iterator[Instruction]:
        mine = [(n, event) for n, event in enumerate(self.events) if event.rank == rank]
        action_of = {m: event.action for n, event in mine for m in self.takes[n]}
        posts = sorted(action_of, key=lambda message: (action_of[message], message))
        settled: set[tuple[int, int]] = set()
        for number, event in mine:
            while posts and (ahead is None or action_of[posts[0]] <= event.action + ahead):
                yield self._about(Do.POST, posts.pop(0))
            for message in self.takes[number]:
                yield self._about(Do.TAKE, message)
            yield from self._run(event, settled)
            for message in self.sends[number]:
                yield self._about(Do.SEND, message)

    def _about(self, do: Do, message: int) -> Instruction:
        spec = self.messages[message]
        return Instruction(do, message, spec.microbatch, spec.name)

    def _run(self, event: Event, settled: set[tuple[int, int]]) -> Iterator[Instruction]:
        item = self.items[event.item]
        if item.do == Do.UPDATE or item.what >= 0:
            yield Instruction(item.do, item.what, event.microbatch, item.name)
        for value in item.writes:
            if value[:2] == self.loss[:2] and not event.again:
                yield Instruction(Do.LOSS, value.storage, event.microbatch, "loss")
            key = value.storage, event.microbatch
            if value[:2] in self.settled and event.microbatch != STEP and key not in settled:
                settled.add(key)
                yield Instruction(Do.SETTLE, value.storage, event.microbatch, item.name)

    def _freeing(self, instructions: Iterator[Instruction]) -> list[Instruction]:
        """Adds what lets go of memory after its last use, or before it is made again."""
        found = list(instructions)
        uses: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
        for position, instruction in enumerate(found):
            for key, is_fresh in self._touches(instruction):
                uses[key].append((position, is_fresh))
        free: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for key, touched in uses.items():
            followers = [*(fresh for _, fresh in touched[1:]), True]
            for (position, _), is_last in zip(touched, followers, strict=True):
                if is_last:
                    free[position].append(key)
        result: list[Instruction] = []
        for position, instruction in enumerate(found):
            result.append(instruction)
            result += [Instruction(Do.FREE, *key) for key in free[position]]
        return result

    def _touches(self, instruction: Instruction) -> Iterator[tuple[tuple[int, int], bool]]:
        """Yields (storage, microbatch) of memory in use, and whether it is made anew."""
        do, what, microbatch, _ = instruction
        if do in {Do.TAKE, Do.SEND}:
            storage = self.messages[what].storage
            if not is_persistent(self.storages[storage].role):
                yield (storage, microbatch), False
        elif do in {Do.SETTLE, Do.LOSS}:
            yield (what, microbatch), False
            if do == Do.SETTLE:
                yield (what, STEP), False
        elif do in {Do.RUN, Do.INPUT, Do.UPDATE}:
            item = self._item(do, what)
            read = {value.storage for value in item.reads}
            for storage in read | {value.storage for value in item.writes}:
                if not is_persistent(self.storages[storage].role):
                    yield (storage, microbatch), storage not in read

    def _item(self, do: Do, what: int) -> Item:
        if do != Do.UPDATE:
            return self.items[what]
        return next(item for item in self.items if item.do == do and item.what == what)
