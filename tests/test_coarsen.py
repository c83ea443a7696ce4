from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore import Cluster, Problem, Settings, simulate_batch
from simcore.coarsen import Coarse, by_module, fuse, to_at_most
from simcore.cost import cost_table
from simcore.errors import GraphError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.signature import Signature

MODULES = ("", "net", "net.a", "net.a.x", "net.a.y", "net.b", "net.b.0.x", "net.b.1.x")
POINTWISE = Signature("pointwise", "fp32", (("elements", 0, 1000),), traffic=(0, 8000))
METHODS: dict[str, Callable[[OpGraph], Coarse]] = {
    "fuse": fuse,
    "by_module 0": lambda graph: by_module(graph, 0),
    "by_module 1": lambda graph: by_module(graph, 1),
    "by_module 2": lambda graph: by_module(graph, 2),
    "by_module 9": lambda graph: by_module(graph, 9),
    "to_at_most 1": lambda graph: to_at_most(graph, 1),
    "to_at_most 3": lambda graph: to_at_most(graph, 3),
    "to_at_most 99": lambda graph: to_at_most(graph, 99),
}


class Trainer:
    """Builds a training step as a frontend does: forward, mirrored backward, updates."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self.pick = pick  # pick(n) draws one of 0 .. n-1
        self.builder = GraphBuilder("random", batch=4)
        self.parameters: list[int] = []
        self.layers: list[tuple[int, list[int], tuple[int, ...], int | None]] = []
        self.gradients: dict[int, int] = {}  # activation -> its gradient so far
        self.bytes: dict[int, int] = {}  # activation -> c1

    def forward(self) -> None:
        pick, number = self.pick, len(self.layers)
        recent = [t for _, _, outputs, _ in self.layers for t in outputs][-5:]
        inputs = [recent[pick(len(recent))] for _ in range(1 + pick(2))] if recent else []
        parameter = None
        if pick(3) == 0:
            if not self.parameters or pick(3):
                name = f"w{len(self.parameters)}"
                self.parameters.append(self.builder.parameter(name, 100 + pick(50)))
            parameter = self.parameters[pick(len(self.parameters))]
        outputs = []
        for _ in range(1 + (pick(4) == 0)):
            base = inputs[0] if inputs and pick(4) == 0 else None
            outputs.append(Out((pick(9), 1 + pick(50)), storage_of=base))
        op = self.builder.op(
            f"f{number}",
            module=MODULES[pick(len(MODULES))],
            inputs=[*inputs, *([] if parameter is None else [parameter])],
            outputs=outputs,
            op_class=(OpClass.MATMUL, OpClass.POINTWISE, OpClass.VIEW)[pick(3)],
            signature=POINTWISE,
            kernels=pick(3),
            sync=pick(9) == 0,
            workspace=(pick(30), pick(3)),
            resident=pick(5),
            unit_of=self.layers[pick(number)][0] if number and pick(12) == 0 else None,
        )
        self.layers.append((op, inputs, self.builder.outputs(op), parameter))

    def backward(self) -> None:
        updates = {}
        for op, read, outputs, parameter in reversed(self.layers):
            arriving = [self.gradients[t] for t in outputs if t in self.gradients]
            inputs = list(dict.fromkeys(read))
            weight = [] if parameter is None else [Out(100, role=Role.GRADIENT)]
            back = self.builder.op(
                f"b{op}", phase=Phase.B, inputs=[*inputs, *arriving], signature=POINTWISE,
                outputs=[*(Out((0, 7)) for _ in inputs), *weight], unit_of=op,
            )  # fmt: skip
            for tensor, gradient in zip(inputs, self.builder.outputs(back), strict=False):
                self.gradients[tensor] = self.accumulated(tensor, gradient)
            if parameter is not None:
                updates[parameter] = (op, self.builder.outputs(back)[-1])
        for number, (parameter, (op, gradient)) in enumerate(updates.items()):
            self.builder.op(
                f"u{number}", phase=Phase.U, op_class=OpClass.UPDATE, unit_of=op, elements=25,
                inputs=[parameter, gradient], outputs=[Out(100, storage_of=parameter)],
            )  # fmt: skip

    def accumulated(self, tensor: int, gradient: int) -> int:
        """A second gradient of a tensor is added by an op that may have no forward op."""
        if tensor not in self.gradients:
            return gradient
        owner = next(op for op, _, outputs, _ in self.layers if tensor in outputs)
        total = self.builder.op(
            f"acc{gradient}",
            phase=Phase.B,
            inputs=[self.gradients[tensor], gradient],
            outputs=[Out((0, 7))],
            unit_of=owner if self.pick(2) else None,
        )
        return self.builder.outputs(total)[0]


def training_graph(pick: Callable[[int], int], num_layers: int) -> OpGraph:
    trainer = Trainer(pick)
    for _ in range(num_layers):
        trainer.forward()
    if pick(5):
        trainer.backward()
    return trainer.builder.build()


def edge_graph(pick: Callable[[int], int], num_ops: int) -> OpGraph:
    """A graph of one's own whose colocated ops may wait for each other both ways."""
    names = [f"o{op}" for op in range(num_ops)]
    edges = [
        (names[pick(op)], names[op], pick(4)) for op in range(1, num_ops) for _ in range(pick(3))
    ]
    colocate = {name: str(pick(4)) for name in names if pick(2)}
    return OpGraph.from_edges({name: 1.0 + pick(9) for name in names}, edges, colocate=colocate)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    def pick(options: int) -> int:
        return draw(st.integers(0, options - 1))

    make = draw(st.sampled_from([training_graph, edge_graph]))
    return make(pick, draw(st.integers(1, 9)))


def seeded_graph(seed: int, num_layers: int) -> OpGraph:
    rng = np.random.default_rng(seed)
    return training_graph(lambda options: int(rng.integers(options)), num_layers)


def crossings(graph: OpGraph, group: Any) -> Counter[tuple[int, tuple[int, int], frozenset[int]]]:
    """What travels if every group is on its own device: (from group, bytes, to groups)."""
    found: Counter[tuple[int, tuple[int, int], frozenset[int]]] = Counter()
    for tensor, op in enumerate(graph.tensor_producer):
        users = graph.consumers[graph.first_consumer[tensor] : graph.first_consumer[tensor + 1]]
        home = int(group[graph.unit[op]]) if op >= 0 else -1
        away = frozenset(group[graph.unit[users]].tolist()) - {home}
        if op >= 0 and away:
            c0, c1 = graph.tensor_bytes[tensor].tolist()
            found[home, (c0, c1), away] += 1
    return found


def quotient(graph: OpGraph, label: Any) -> "nx.DiGraph[int]":
    """The graph of labels of ops, without what links a label to itself."""
    producer, consumer, _ = graph.edges()
    pairs = zip(label[producer].tolist(), label[consumer].tolist(), strict=True)
    return nx.DiGraph([(a, b) for a, b in pairs if a != b])


@pytest.mark.parametrize("method", METHODS)
@given(graph=graphs())
@settings(max_examples=40)
def test_a_coarse_graph_is_the_fine_one_in_groups(method: str, graph: OpGraph) -> None:
    coarse = METHODS[method](graph)
    # every unit is in one group, every op in one op of that group and of its own phase
    assert sorted(set(coarse.group.tolist())) == list(range(coarse.graph.num_units))
    assert (coarse.graph.unit[coarse.op_group] == coarse.group[graph.unit]).all()
    assert (coarse.graph.phase[coarse.op_group] == graph.phase).all()
    assert set(coarse.op_group.tolist()) == set(range(coarse.graph.num_ops))
    # it is acyclic, and has the edges of the fine graph and no others
    fine_edges = quotient(graph, coarse.op_group)
    coarse_edges = quotient(coarse.graph, np.arange(coarse.graph.num_ops))
    assert nx.is_directed_acyclic_graph(fine_edges)
    assert set(fine_edges.edges) == set(coarse_edges.edges)
    # what travels between groups is the same, tensor by tensor
    same = np.arange(coarse.graph.num_units)
    assert crossings(graph, coarse.group) == crossings(coarse.graph, same)
    # what is summed is kept
    for field in ("kernels", "elements", "resident"):
        total = getattr(coarse.graph, field).sum(axis=0)
        assert (total == getattr(graph, field).sum(axis=0)).all()
    assert held(coarse.graph) == held(graph)


def held(graph: OpGraph) -> list[tuple[str, int]]:
    """Parameters and buffers with their bytes."""
    bytes_ = graph.at_batch(3).tensor_bytes
    owners = graph.tensor_producer < 0
    return [(graph.tensor_names[tensor], int(bytes_[tensor])) for tensor in np.flatnonzero(owners)]


@pytest.mark.parametrize("method", METHODS)
@given(graph=graphs())
@settings(max_examples=25)
def test_groups_are_convex_in_the_forward_pass(method: str, graph: OpGraph) -> None:
    coarse = METHODS[method](graph)
    producer, consumer, _ = graph.edges()
    # where units themselves feed each other both ways no grouping of them can be convex
    forward = (graph.phase[producer] == Phase.F) & (graph.phase[consumer] == Phase.F)
    units = nx.DiGraph(
        (a, b)
        for a, b in zip(graph.unit[producer[forward]], graph.unit[consumer[forward]], strict=True)
        if a != b
    )
    if nx.is_directed_acyclic_graph(units):
        groups = nx.DiGraph((coarse.group[a], coarse.group[b]) for a, b in units.edges)
        groups.remove_edges_from(list(nx.selfloop_edges(groups)))
        assert nx.is_directed_acyclic_graph(groups)


@given(graph=graphs(), n=st.integers(1, 12))
@settings(max_examples=40)
def test_there_are_at_most_n_groups(graph: OpGraph, n: int) -> None:
    coarse = to_at_most(graph, n)
    assert coarse.graph.num_units == min(n, graph.num_units)


@pytest.mark.parametrize("method", METHODS)
def test_seconds_and_launches_are_conserved(method: str) -> None:
    graph = seeded_graph(1, 40)
    coarse = METHODS[method](graph)
    fine = cost_table(graph, Job(batch=4), ["V100-SXM2-16GB", "T4-16GB"], (4, 8))
    table = coarse.cost(fine)
    assert table.seconds.shape == (coarse.graph.num_ops, 2, 2)
    np.testing.assert_allclose(table.seconds.sum(axis=0), fine.seconds.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(table.launch.sum(axis=0), fine.launch.sum(axis=0), rtol=1e-12)
    assert table.kinds == fine.kinds
    assert table.relative_error.max() <= fine.relative_error.max() * (1 + 1e-12)
    assert (table.source.max(axis=0) == fine.source.max(axis=0)).all()


def test_a_table_of_another_graph_is_refused() -> None:
    graph = seeded_graph(1, 10)
    fine = cost_table(graph, Job(batch=4), ["T4-16GB"], (4,))
    with pytest.raises(ValueError, match=r"expected \d+ ops, got \d"):
        to_at_most(graph, 2).cost(to_at_most(graph, 2).cost(fine))


def test_a_group_cannot_run_where_a_member_cannot() -> None:
    graph = OpGraph.from_edges({"a": 1.0, "b": np.inf, "c": 2.0}, [("a", "b", 1), ("b", "c", 1)])
    coarse = to_at_most(graph, 1)
    assert coarse.graph.fixed is not None
    assert coarse.graph.fixed.seconds.tolist() == [np.inf]


def test_measured_seconds_add_up() -> None:
    graph = OpGraph.from_edges(
        {"a": 1.0, "b": 2.0, "c": 4.0}, [("a", "b", 9), ("b", "c", 1)], measured_on="T4-16GB"
    )
    coarse = to_at_most(graph, 2)
    assert coarse.group.tolist() == [0, 0, 1]
    assert coarse.graph.op_names == ("a+1/F", "c/F")
    assert coarse.graph.fixed is not None
    assert coarse.graph.fixed.seconds.tolist() == [3.0, 4.0]
    assert coarse.graph.fixed.measured_on == "T4-16GB"


@given(graph=graphs(), data=st.data())
@settings(max_examples=25)
def test_an_expanded_plan_gives_every_group_one_device(graph: OpGraph, data: st.DataObject) -> None:
    coarse = to_at_most(graph, 3)
    devices = np.array([data.draw(st.integers(0, 7)) for _ in range(coarse.graph.num_units)])
    fine = coarse.expand(devices)
    assert fine.dtype == np.int32
    assert fine.tolist() == [devices[group] for group in coarse.group]
    assert coarse.expand(np.stack([devices, devices + 1])).tolist() == [
        fine.tolist(),
        (fine + 1).tolist(),
    ]


def test_a_plan_for_another_graph_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[..., 2\] devices, got \[3\]"):
        to_at_most(seeded_graph(1, 10), 2).expand(np.zeros(3, np.int32))


def test_the_same_graph_is_grouped_the_same() -> None:
    for method in METHODS.values():
        first, second = (method(seeded_graph(2, 60)) for _ in range(2))
        assert first.graph.content_hash() == second.graph.content_hash()
        assert first.group.tolist() == second.group.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_one_device_takes_as_long_and_needs_no_less_memory(seed: int) -> None:
    graph, job = seeded_graph(seed, 40), Job(batch=4)
    coarse = to_at_most(graph, 1)
    cluster = Cluster.preset("4xV100-NVLink")
    problem = Problem.build(graph, cluster, job, Settings(launch="graph"))
    rough = Problem.build(
        coarse.graph, cluster, job, Settings(launch="graph"), cost=coarse.cost(problem.cost)
    )
    device = next(d for d, device in enumerate(cluster.devices) if device.kind.startswith("V100"))
    devices = np.full((1, 1), device, np.int32)
    expected = simulate_batch(problem, problem.expand(coarse.expand(devices)))
    result = simulate_batch(rough, rough.expand(devices))
    assert result.step_time[0] == pytest.approx(expected.step_time[0], rel=1e-12)
    assert result.allocated[0, device] >= expected.allocated[0, device]


# fuse


def chain(*classes: OpClass, skip: tuple[int, int] | None = None) -> OpGraph:
    """Ops in a row, one unit each; ``skip`` adds an edge."""
    builder = GraphBuilder("chain")
    made: list[int] = []
    for number, op_class in enumerate(classes):
        inputs = made[-1:]
        if skip is not None and skip[1] == number:
            inputs = [*inputs, made[skip[0]]]
        op = builder.op(f"o{number}", op_class=op_class, inputs=inputs, outputs=[Out(8)])
        made += builder.outputs(op)
    return builder.build()


M, P, V = OpClass.MATMUL, OpClass.POINTWISE, OpClass.VIEW


def test_a_pointwise_chain_joins_its_producer() -> None:
    coarse = fuse(chain(M, P, V, P, M, P))
    assert coarse.group.tolist() == [0, 0, 0, 0, 1, 1]
    assert coarse.graph.op_names == ("o0+3/F", "o4+1/F")


def test_a_residual_add_joins_the_later_of_its_producers() -> None:
    assert fuse(chain(M, M, P, M, skip=(0, 2))).group.tolist() == [0, 1, 1, 2]


def test_a_pointwise_op_without_producer_stays_alone() -> None:
    assert fuse(chain(P, M)).group.tolist() == [0, 1]


# by_module


def modules(*paths: str) -> OpGraph:
    """Ops in a row, one unit each, of the given modules."""
    builder = GraphBuilder("modules")
    made: list[int] = []
    for number, path in enumerate(paths):
        op = builder.op(f"o{number}", module=path, inputs=made[-1:], outputs=[Out(8)])
        made += builder.outputs(op)
    return builder.build()


def test_a_group_is_a_module_at_the_given_depth() -> None:
    graph = modules("net.emb", "net.layer.0.attn", "net.layer.0.mlp", "net.layer.1.attn")
    assert by_module(graph, 0).group.tolist() == [0, 0, 0, 0]
    assert by_module(graph, 1).group.tolist() == [0, 0, 0, 0]
    assert by_module(graph, 2).group.tolist() == [0, 1, 1, 1]
    coarse = by_module(graph, 3)
    assert coarse.group.tolist() == [0, 1, 1, 2]
    assert coarse.graph.op_names == ("net.emb/F", "net.layer.0/F", "net.layer.1/F")
    assert coarse.graph.op_modules == ("net.emb", "net.layer.0", "net.layer.1.attn")
    assert coarse.split == ()


def test_a_module_around_another_is_split_and_said_so() -> None:
    coarse = by_module(modules("net", "net.a", "net", "net.b", "net.b.x", "net"), 2)
    assert coarse.group.tolist() == [0, 1, 2, 3, 3, 4]
    assert coarse.split == ("net",)
    assert coarse.graph.op_names == ("net/F", "net.a/F", "net#2/F", "net.b/F", "net#3/F")


def test_ops_of_no_module_belong_to_the_model() -> None:
    assert by_module(modules("", "a"), 1).graph.op_names == ("(model)/F", "a/F")


@pytest.mark.parametrize("make", [lambda g: by_module(g, -1), lambda g: to_at_most(g, 0)])
def test_an_impossible_number_is_refused(make: Callable[[OpGraph], Coarse]) -> None:
    with pytest.raises(GraphError, match=r"chain: .*must be at least [01], not"):
        make(chain(M))


# to_at_most


def test_heavy_links_are_kept_inside() -> None:
    graph = OpGraph.from_edges(
        dict.fromkeys("abcd", 1.0), [("a", "b", 1), ("b", "c", 100), ("c", "d", 1)]
    )
    assert to_at_most(graph, 3).group.tolist() == [0, 1, 1, 2]


def test_two_towers_become_two_groups() -> None:
    tower = [(f"{side}{k}", f"{side}{k + 1}", 100) for k in range(9) for side in "xy"]
    names = [f"{side}{k}" for k in range(10) for side in "xy"]
    graph = OpGraph.from_edges(dict.fromkeys(names, 1.0), tower)
    coarse = to_at_most(graph, 2)
    sides = {(int(coarse.group[unit]), name[0]) for unit, name in enumerate(graph.unit_names)}
    assert len(sides) == 2


def test_work_is_spread_over_the_groups() -> None:
    graph = chain(*[M] * 1000)
    assert max(Counter(to_at_most(graph, 10).group.tolist()).values()) <= 200


def test_given_seconds_decide_what_is_much_work() -> None:
    graph = chain(M, M, M, M)
    coarse = to_at_most(graph, 2, seconds=np.array([1.0, 1.0, 1.0, 9.0]))
    assert coarse.group.tolist() == [0, 0, 0, 1]


def test_a_star_of_thousands_is_grouped() -> None:
    edges = [("hub", f"leaf{leaf}", 8) for leaf in range(3000)]
    graph = OpGraph.from_edges({"hub": 1.0, **{leaf: 1.0 for _, leaf, _ in edges}}, edges)
    assert to_at_most(graph, 20).graph.num_units == 20


def test_unlinked_ops_are_grouped() -> None:
    graph = OpGraph.from_edges({f"o{op}": 0.0 for op in range(50)}, [])
    assert to_at_most(graph, 7).graph.num_units == 7


# the tensors of a coarse graph, worked by hand


def trained_pair() -> OpGraph:
    """Two layers: f0 -> f1 -> b1 -> b0; f0 and b0 share a unit and keep two activations."""
    builder = GraphBuilder("pair", batch=1)
    weight = builder.parameter("w", 40)
    f0 = builder.op("f0", inputs=[weight], outputs=[Out((0, 10)), Out(5)], workspace=100)
    f0b = builder.op("f0b", inputs=[builder.outputs(f0)[0]], outputs=[Out((3, 20)), Out((0, 7))],
                     unit_of=f0, workspace=50)  # fmt: skip
    f1 = builder.op("f1", inputs=[builder.outputs(f0b)[0]], outputs=[Out(1)])
    b1 = builder.op("b1", phase=Phase.B, inputs=builder.outputs(f1), outputs=[Out((0, 20))],
                    unit_of=f1)  # fmt: skip
    b0 = builder.op(
        "b0", phase=Phase.B, unit_of=f0, outputs=[Out(40, role=Role.GRADIENT)],
        inputs=[builder.outputs(f0)[0], builder.outputs(f0b)[1], *builder.outputs(b1)],
    )  # fmt: skip
    builder.op("u0", phase=Phase.U, unit_of=f0, inputs=[weight, *builder.outputs(b0)],
               outputs=[Out(40, storage_of=weight)], elements=10)  # fmt: skip
    return builder.build()


def test_activations_kept_for_the_backward_are_one_tensor() -> None:
    graph = to_at_most(trained_pair(), 2).graph
    assert graph.op_names == ("f0/F", "f1/F", "f1/B", "f0/B", "f0/U")
    assert dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True)) == {
        "w": [40, 0],
        "f0b:0": [3, 20],  # travels to f1
        "f0/F:activation": [0, 17],  # f0:0 and f0b:1, until f0/B
        "f1/F:activation": [1, 0],
        "b1:0": [0, 20],  # travels back
        "f0/B:gradient": [40, 0],  # until f0/U
    }
    assert graph.tensor_role[graph.tensor_names.index("f0/B:gradient")] == Role.GRADIENT
    assert graph.elements.tolist() == [0, 0, 0, 0, 10]


def test_tensors_that_die_inside_are_workspace() -> None:
    graph = to_at_most(trained_pair(), 2).graph
    # f0:1, 5 bytes, is there while f0 needs 100, and gone when f0b needs 50
    assert graph.workspace.tolist() == [[105, 0], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_a_view_that_travels_keeps_its_base_alive_at_home() -> None:
    builder = GraphBuilder("view")
    (base,) = builder.outputs(builder.op("a", outputs=[Out(100)]))
    view = builder.op("view", inputs=[base], outputs=[Out(10, storage_of=base)], unit_of=0)
    builder.op("b", inputs=builder.outputs(view), outputs=[Out(1)])
    graph = to_at_most(builder.build(), 2).graph
    assert graph.tensor_names == ("a:0", "view:0", "b:0")[: graph.num_tensors]
    assert graph.tensor_bytes.tolist() == [[100, 0], [10, 0]]
    assert graph.tensor_storage.tolist() == [0, 0]
    assert graph.inputs.tolist() == [1]


def test_a_group_of_one_op_keeps_its_signature() -> None:
    graph = seeded_graph(3, 20)
    coarse = to_at_most(graph, graph.num_units)
    alone = np.flatnonzero(np.bincount(coarse.op_group) == 1)
    assert len(alone) > 5
    for op in alone:
        fine = int(np.flatnonzero(coarse.op_group == op)[0])
        assert coarse.graph.op_class[op] == graph.op_class[fine]
        if graph.signature[fine] >= 0:
            assert coarse.graph.signature[op] >= 0


def test_ops_that_wait_for_each_other_both_ways_are_cut() -> None:
    # a colocated backward that calls itself forward: x and y feed each other
    graph = OpGraph.from_edges(
        {"f0": 1, "f1": 1, "b1": 1, "b0": 1},
        [("f0", "f1", 1), ("f1", "b1", 1), ("b1", "b0", 1)],
        colocate={"f0": "x", "b0": "x", "f1": "y", "b1": "y"},
    )
    coarse = to_at_most(graph, 2)
    assert coarse.graph.op_names == ("f0/F", "f1/F", "f0/F.2")
    assert coarse.graph.unit.tolist() == [0, 1, 0]


def test_five_thousand_units_become_128_groups() -> None:
    builder = GraphBuilder("long")
    made: list[int] = []
    for op in range(5000):
        inputs = [*made[-1:], *made[-4:-3]] if op % 3 == 0 else made[-1:]
        builder.op(f"o{op}", inputs=inputs, outputs=[Out(8 + op % 7)])
        made += builder.outputs(op)
    coarse = to_at_most(builder.build(), 128)
    assert coarse.graph.num_units == 128
    work = np.bincount(coarse.group)
    assert work.max() <= 2.5 * work.mean()
