"""Which tensor of a captured graph is which value on the tape of a recording of the same source."""

from collections.abc import Iterator

from calibration.run.recording import Recording, Ref, is_persistent
from simcore.errors import RunError
from simcore.frontends.torch_tape import ALL, Storage, TapeOp, Value
from simcore.graph import OpClass, OpGraph


class TapeTensors:
    """A graph's ops and tensors beside a recording's.

    Attributes:
        item: op of the tape of each op of the graph, -1 = a view, an update or a refresh, [op].
        storage: storage of the tape of each storage of the graph.
    """

    def __init__(self, graph: OpGraph, recording: Recording) -> None:
        """Finds everything.

        Raises:
            RunError: the recording has other ops than the graph.
        """
        self.graph, self.recording = graph, recording
        place = {name: op for op, name in enumerate(recording.names)}
        if missing := place.keys() - set(graph.op_names):
            raise RunError(f"at this batch the model runs {min(missing)}, which the graph lacks")
        self.item = [place.get(name, -1) for name in graph.op_names]
        self._of_item = {item: op for op, item in enumerate(self.item) if item >= 0}
        self._whole: dict[tuple[int, int], int] = {}  # (storage, version) -> tensor
        self._views: dict[tuple[int, ...], int] = {}
        self._writer: dict[tuple[int, int], int] = {}
        self.storage: dict[int, int] = {}
        self._find_whole()
        self._find_views()

    def tensor(self, op: int, value: Value) -> int:
        """Returns the tensor that an op of the graph reads or writes as a value."""
        if value.region == ALL:
            return self._whole[value[:2]]
        return self._views[self._view_key(op, value)]

    def record(self, op: int) -> TapeOp:
        """Returns the op of the tape that an op of the graph is."""
        return self.recording.tape.ops[self.item[op]]

    def read(self, op: int, ref: Ref) -> Value | None:
        """Returns the value that an argument of an op is, None where only its shape is read."""
        storage = self.recording.tape.storages[ref.storage]
        mine = [value for value in self.record(op).reads if value.storage == ref.storage]
        region = region_of(ref, storage)
        exact = [value for value in mine if value.region == region]
        whole = [value for value in mine if value.region == ALL]
        return next(iter(exact or whole), None)

    def region(self, tensor: int, dtype_of: Ref) -> Ref | None:
        """Returns the part of its storage that a view is, None = all of it."""
        for key, found in self._views.items():
            if found == tensor:
                regions = self.recording.tape.storages[key[0]].regions
                place = next(place for place, number in regions.items() if number == key[2])
                offset, itemsize, *dims = place
                return Ref(
                    key[0], dtype_of.dtype, tuple(size for _, size in dims),
                    tuple(stride for stride, _ in dims), offset // itemsize,
                )  # fmt: skip
        return None

    def _find_whole(self) -> None:
        graph, tape = self.graph, self.recording.tape
        by_name = {
            s.name: number for number, s in enumerate(tape.storages) if is_persistent(s.role)
        }
        for tensor in range(int(graph.first_output[0])):
            self._know((by_name[graph.tensor_names[tensor]], 0), tensor)
        for op, item in enumerate(self.item):
            if item < 0:
                continue
            first = int(graph.first_output[op])
            for position, value in enumerate(tape.ops[item].writes):
                self._know(value[:2], first + position)
                self._writer[value[:2]] = op

    def _know(self, key: tuple[int, int], tensor: int) -> None:
        self._whole[key] = tensor
        self.storage[int(self.graph.tensor_storage[tensor])] = key[0]

    def _find_views(self) -> None:
        """Numbers parts of storages as the capture does: in the order in which they are read."""
        graph = self.graph
        views = iter(op for op in range(graph.num_ops) if graph.op_class[op] == OpClass.VIEW)
        for item, record in enumerate(self.recording.tape.ops):
            op = self._of_item[item]
            for value in record.reads:
                self._add_view(op, value, views)
        trained = {each.name: each for each in self.recording.trained}
        for op in range(graph.num_ops):
            owner, _, what = graph.op_names[op].rpartition(".")
            if graph.op_class[op] == OpClass.UPDATE and what.startswith("update"):
                gradient = trained[owner].value
                self._add_view(self._writer[gradient[:2]], gradient, views)

    def _add_view(self, op: int, value: Value, views: Iterator[int]) -> None:
        if value.region == ALL or self._view_key(op, value) in self._views:
            return
        view = next(views, -1)
        if view < 0:
            name = self.recording.tape.storages[value.storage].name
            raise RunError(f"the model reads a part of {name} that the graph does not know")
        self._views[self._view_key(op, value)] = int(self.graph.first_output[view])

    def _view_key(self, op: int, value: Value) -> tuple[int, ...]:
        """A part of memory that nothing wrote is a view where it is used."""
        writer = self._writer.get(value[:2], op)
        return (*value[:3], int(self.graph.unit[writer]))


def region_of(ref: Ref, storage: Storage) -> int:
    """Returns which part of its storage a tensor is, ALL = all of it, -2 = none that is known."""
    itemsize = ref.dtype.itemsize
    axes: list[tuple[int, int]] = []
    count = 1
    pairs = zip(ref.stride, ref.size, strict=True)
    for stride, size in sorted(pairs, reverse=True):
        count *= size if stride or size == 0 else 1
        if size == 1 or stride == 0:
            continue
        if axes and axes[-1][0] == stride * size:
            axes[-1] = (stride, axes[-1][1] * size)
        else:
            axes.append((stride, size))
    if count * itemsize >= storage.bytes:
        return ALL
    return storage.regions.get((ref.offset * itemsize, itemsize, *axes), -2)
