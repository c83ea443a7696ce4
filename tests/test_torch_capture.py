"""Capture: toys counted by hand, cases that other tools get wrong, and the messages of refusals."""

import math
import sys
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from simcore.errors import CaptureError  # noqa: E402
from simcore.frontends.torch_capture import capture, capture_report, load_factory  # noqa: E402
from simcore.graph import OpClass, Phase, Role  # noqa: E402
from simcore.graph_file import decode_graph, encode_graph  # noqa: E402
from simcore.job import Job  # noqa: E402

THIS_FILE = "test_torch_capture.py"


def flops(graph, phase, *classes, batch=None):
    """FLOPs of one phase, of some op classes (none given = all)."""
    chosen = graph.phase == phase
    if classes:
        chosen &= np.isin(graph.op_class, classes)
    return float(graph.at_batch(batch).flops[chosen].sum())


def inputs_of(graph, op):
    used = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
    return [graph.tensor_names[tensor] for tensor in used]


def outputs_of(graph, op):
    return range(graph.first_output[op], graph.first_output[op + 1])


def op_named(graph, name):
    return graph.op_names.index(name)


def persistent_bytes(graph, role):
    """Bytes of distinct storages that hold a tensor of a role."""
    sizes = graph.at_batch(None).storage_bytes
    held = np.unique(graph.tensor_storage[graph.tensor_role == role])
    return int(sizes[held].sum())


def module(forward, **parts):
    """A module of some parts (modules, parameters, buffers) and a forward function."""

    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, nn.Module | nn.Parameter):
                    setattr(self, name, part)
                else:
                    self.register_buffer(name, part)

        def forward(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

    return Toy()


def mlp():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


# --- worked by hand -------------------------------------------------------------------------------


def test_backward_of_an_mlp_costs_twice_its_forward_without_the_first_input_gradient():
    graph = capture(mlp(), (torch.zeros(8, 10),), Job(), name="mlp")
    forward = 2 * 8 * (10 * 20 + 20 * 5)
    assert flops(graph, Phase.F, OpClass.MATMUL) == forward
    assert flops(graph, Phase.B, OpClass.MATMUL) == 2 * forward - 2 * 8 * 10 * 20


def test_flops_and_bytes_of_convolution_norm_and_relu_are_those_counted_by_hand():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    graph = capture(model, (torch.zeros(4, 3, 10, 10),), Job(), name="conv")
    conv = 2 * 4 * 8 * (8 * 8) * 3 * 9
    assert flops(graph, Phase.F, OpClass.CONVOLUTION) == conv
    assert flops(graph, Phase.B, OpClass.CONVOLUTION) == conv  # the input wants no gradient
    sizes = graph.at_batch(4)
    op = op_named(graph, "0.convolution")
    data, weight, out = 4 * 3 * 100 * 4, 8 * 3 * 9 * 4, 4 * 8 * 64 * 4
    assert sizes.traffic[op] == data + weight + out
    assert [sizes.tensor_bytes[t] for t in outputs_of(graph, op)] == [out]
    assert flops(graph, Phase.F, OpClass.NORMALISATION) == 4 * 8 * 64


def test_both_gradients_of_a_convolution_cost_twice_its_forward():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, groups=2, stride=2, bias=False))
    graph = capture(model, (torch.zeros(2, 3, 9, 9),), Job(), name="conv")
    forward = 2 * 2 * 6 * (4 * 4) * 2 * 9
    sizes = graph.at_batch(2)
    assert sizes.flops[op_named(graph, "1.convolution")] == forward
    assert sizes.flops[op_named(graph, "1.convolution.backward")] == 2 * forward


def test_a_transposed_convolution_counts_its_input_positions():
    graph = capture(nn.ConvTranspose2d(3, 4, 2, stride=2), (torch.zeros(2, 3, 5, 5),), name="up")
    assert flops(graph, Phase.F, OpClass.CONVOLUTION) == 2 * 2 * 3 * 25 * 4 * 4


def test_embedding_moves_its_rows_and_not_its_table():
    graph = capture(nn.Embedding(1000, 16), (torch.zeros(4, 7, dtype=torch.long),), name="table")
    op = op_named(graph, "embedding")
    assert graph.at_batch(4).traffic[op] == 4 * 7 * 8 + 2 * (4 * 7 * 16 * 4)


# --- shape of the graph ---------------------------------------------------------------------------


def test_a_unit_is_a_forward_op_its_backward_and_the_update_of_its_parameters():
    graph = capture(mlp(), (torch.zeros(8, 10),), Job(), name="mlp")
    unit = graph.unit[op_named(graph, "2.addmm")]
    names = {graph.op_names[op] for op in np.flatnonzero(graph.unit == unit)}
    assert names == {
        "2.addmm",
        "2.addmm.backward.mm",
        "2.addmm.backward.mm.1",
        "2.addmm.backward.sum",
        "2.weight.update",
        "2.bias.update",
    }
    assert graph.num_units == 4  # two linear layers, the activation, the stand-in for a loss


def test_ops_know_their_module_forward_backward_and_update():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    graph = capture(model, (torch.zeros(3, 4),), name="nested")
    modules = {graph.op_modules[op] for op in np.flatnonzero(graph.unit == graph.unit[1])}
    assert modules == {"", "0.0"}  # "" is the input, which lives with its first user
    assert graph.op_modules[op_named(graph, "1.tanh.backward")] == "1"


def test_every_trainable_parameter_is_updated_with_its_own_gradient():
    model = mlp()
    graph = capture(model, (torch.zeros(8, 10),), Job(), name="mlp")
    updates = np.flatnonzero(graph.phase == Phase.U)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert {graph.op_names[op]: graph.elements[op] for op in updates} == {
        f"{name}.update": size for name, size in sizes.items()
    }
    for op in updates:
        parameter, gradient = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
        assert graph.tensor_role[parameter] == Role.PARAMETER
        assert graph.tensor_role[gradient] == Role.GRADIENT
        (after,) = outputs_of(graph, op)
        assert graph.tensor_storage[after] == graph.tensor_storage[parameter]


def test_sizes_are_affine_in_the_batch():
    graph = capture(mlp(), lambda b: (torch.zeros(b, 10),), Job(batch=4), name="mlp")
    again = capture(mlp(), (torch.zeros(64, 10),), Job(), name="mlp")
    small, large = graph.at_batch(64), again.at_batch(64)
    for a, b in zip(small, large, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (graph.batch, again.batch) == (4, 64)


def test_two_captures_of_one_model_are_equal_and_survive_json():
    first, second = (capture(mlp(), (torch.zeros(8, 10),), Job(), name="mlp") for _ in range(2))
    assert first.content_hash() == second.content_hash()
    again = decode_graph(encode_graph(first), "mlp.json")
    assert again.content_hash() == first.content_hash()


def test_an_activation_in_place_shares_the_storage_of_what_it_overwrites():
    sizes = {}
    for in_place in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=in_place), nn.Linear(4, 4))
        graph = capture(model, (torch.zeros(8, 4),), name="relu")
        kept = graph.at_batch(8).storage_bytes[~graph.persistent_storage]
        sizes[in_place] = int(kept.sum())
    assert sizes[False] - sizes[True] == 8 * 4 * 4


def test_whole_views_vanish_and_parts_are_free_ops_on_the_same_storage():
    def forward(self, x):
        halves = self.linear(x).view(-1, 2, 4).transpose(0, 1)
        return halves[0] * halves[1]

    graph = capture(module(forward, linear=nn.Linear(8, 8)), (torch.zeros(3, 8),), name="halves")
    views = np.flatnonzero(graph.op_class == OpClass.VIEW)
    assert len(views) == 2
    assert not graph.kernels[views].any()
    (base,) = outputs_of(graph, op_named(graph, "linear.addmm"))
    for op in views:
        (part,) = outputs_of(graph, op)
        assert graph.tensor_storage[part] == graph.tensor_storage[base]
        assert tuple(graph.tensor_bytes[part]) == (0, 16)
        assert graph.unit[op] == graph.unit[op_named(graph, "linear.addmm")]


def test_a_broadcast_is_read_as_often_as_it_has_elements():
    graph = capture(
        module(lambda self, x: x * self.scale.expand(3, 4), scale=nn.Parameter(torch.ones(1, 4))),
        lambda batch: (torch.zeros(batch, 3, 4),),
        name="scale",
    )
    assert graph.at_batch(2).traffic[op_named(graph, "mul")] == 2 * (2 * 3 * 4 * 4) + 4 * 4


def test_numbers_are_no_tensors():
    model = module(lambda self, x: self.a(x) * 0.5 + 1, a=nn.Linear(4, 4))
    graph = capture(model, torch.zeros(3, 4), name="numbers")
    assert [name for name in graph.tensor_names if name.startswith("constant")] == []


def test_what_is_made_of_nothing_lives_with_its_first_user():
    def forward(self, x):
        return self.linear(x) + torch.arange(4)

    graph = capture(module(forward, linear=nn.Linear(4, 4)), (torch.zeros(3, 4),), name="arange")
    assert graph.unit[op_named(graph, "arange")] == graph.unit[op_named(graph, "add")]


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    graph = capture(model, (torch.zeros(8, 4),), name="dropout")
    out, mask = outputs_of(graph, op_named(graph, "1.native_dropout"))
    assert graph.at_batch(8).tensor_bytes[[out, mask]].tolist() == [8 * 4 * 4, 8 * 4]


def test_half_precision_halves_parameters_and_activations():
    graphs = [
        capture(mlp(), (torch.zeros(8, 10),), Job(precision=precision), name="mlp")
        for precision in ("fp32", "bf16")
    ]
    full, half = (graph.at_batch(8).tensor_bytes for graph in graphs)
    np.testing.assert_array_equal(full, 2 * half)
    dtypes = {s.dtype for s in graphs[1].signatures}
    assert dtypes == {"bf16"}


def test_the_order_of_reading_and_overwriting_is_kept_by_an_edge():
    def forward(self, x):
        h = self.linear(x)
        y = h.sum()
        h.add_(1)
        return h.mean() + y

    graph = capture(module(forward, linear=nn.Linear(4, 4)), (torch.zeros(3, 4),), name="order")
    assert "sum:done" in inputs_of(graph, op_named(graph, "add_"))


def test_a_forward_that_is_run_again_belongs_to_the_units_of_the_first():
    from torch.utils.checkpoint import checkpoint

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    graph = capture(module(forward, block=block), (torch.zeros(3, 4),), name="checkpoint")
    again = op_named(graph, "block.0.addmm.backward.addmm")
    assert graph.phase[again] == Phase.B
    assert graph.unit[again] == graph.unit[op_named(graph, "block.0.addmm")]


# --- against torch's own memory tracker ----------------------------------------------------------


def peak_before_updates(graph, batch):
    """The most bytes held at once on one device from the first op to the last gradient."""
    sizes = graph.at_batch(batch)
    ends = int(np.argmax(graph.phase == Phase.U))
    held = np.zeros(ends + 1, np.int64)
    for storage in np.flatnonzero(~graph.persistent_storage):
        tensors = np.flatnonzero(graph.tensor_storage == storage)
        uses = [
            op for t in tensors for op in graph.consumers[slice(*graph.first_consumer[t : t + 2])]
        ]
        first = graph.tensor_producer[tensors].min()
        last = min(ends - 1, max([*uses, *graph.tensor_producer[tensors]]))
        held[first] += sizes.storage_bytes[storage]
        held[last + 1] -= sizes.storage_bytes[storage]
    return int(np.cumsum(held).max()) + int(sizes.storage_bytes[graph.persistent_storage].sum())


class Block(nn.Module):
    """A residual block of a convolutional network, with activations in place."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return functional.relu(self.norm(self.conv(x)) + x, inplace=True)


@pytest.mark.parametrize("batch", [4, 32])
def test_peak_memory_is_what_torchs_tracker_sees(batch):
    mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    from torch._subclasses.fake_tensor import FakeTensorMode

    def build():
        layers = [nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16), Block(16)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 300), nn.LogSoftmax(1)]
        return nn.Sequential(*layers, *head)

    graph = capture(build(), lambda b: (torch.zeros(b, 3, 32, 32),), name="blocks")
    with FakeTensorMode():
        model, data = build(), torch.zeros(batch, 3, 32, 32)
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model, data)
        with tracker:
            model(data).mean().backward()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    # the tracker rounds every storage up to a block of the CUDA allocator
    # the scalar loss, which the caller still holds there, and its gradient
    assert snapshot["Total"] - peak_before_updates(graph, batch) == 2 * 4


# --- recurrent layers and attention ---------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 40, 80])
def test_an_lstm_is_one_op_whose_flops_grow_with_its_length(length):
    graph = capture(nn.LSTM(800, 800), lambda b: (torch.zeros(length, b, 800),), name="lstm")
    assert flops(graph, Phase.F, batch=8) == pytest.approx(1.638e9 * length / 20, rel=0.02)
    assert int(graph.elements.sum()) == 5_126_400
    recurrent = np.flatnonzero(graph.op_class == OpClass.RNN)
    assert [graph.phase[op] for op in recurrent] == [Phase.F, Phase.B]
    assert graph.kernels[recurrent].tolist() == [length, length]


def test_the_size_of_an_lstm_graph_does_not_depend_on_its_length():
    graphs = [
        capture(nn.LSTM(8, 8), lambda b, t=length: (torch.zeros(t, b, 8),), name="lstm")
        for length in (20, 40)
    ]
    assert graphs[0].num_ops == graphs[1].num_ops
    assert graphs[0].num_ops < 40


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_have_one_unit_of_weights_a_layer(kind):
    model = kind(6, 4, num_layers=3, bidirectional=True, batch_first=True, dropout=0.1)
    graph = capture(model, (torch.zeros(5, 7, 6),), name="rnn")
    layers = np.flatnonzero((graph.op_class == OpClass.RNN) & (graph.phase == Phase.F))
    assert len(set(graph.unit[layers])) == len(layers) == 3
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    counted = [2 * 7 * 5 * 2 * gates * 4 * (4 + width) for width in (6, 8, 8)]
    assert graph.at_batch(5).flops[layers].tolist() == counted


def test_a_cell_in_a_loop_is_one_op_a_step():
    def forward(self, x):
        state = None
        for step in range(3):
            state = self.cell(x[:, step], state)
        return state[0]

    graph = capture(module(forward, cell=nn.LSTMCell(4, 4)), (torch.zeros(2, 3, 4),), name="cell")
    assert Counter(graph.op_class)[OpClass.RNN] == 6
    refreshes = [name for name in graph.op_names if name.startswith("cell.weight_hh.refresh")]
    assert len(refreshes) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_op_forward_and_one_backward(dropout, causal):
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    parts = {"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}
    graph = capture(module(forward, **parts), (torch.zeros(4, 10, 16),), name="attention")
    products = 2 * (2 * 4 * 2 * 10 * 10 * 8)
    assert flops(graph, Phase.F, OpClass.ATTENTION) == products
    assert flops(graph, Phase.B, OpClass.ATTENTION) == 2.5 * products
    assert Counter(graph.op_class)[OpClass.ATTENTION] == 2
    assert "clone" not in graph.op_targets


def test_torchs_own_attention_module_is_seen_whole():
    model = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
    graph = capture(
        model,
        lambda b: (
            {k: torch.zeros(b, 5, 8) for k in ("query", "key", "value")} | {"need_weights": False}
        ),
        name="mha",
    )
    assert Counter(graph.op_class)[OpClass.ATTENTION] == 2


# --- state, ties, gradients -----------------------------------------------------------------------


def add_to_a_buffer(self, x):
    self.foo += x.mean(0)
    return self.linear(x) + self.foo


def write_one_element(self, x):
    self.cache[0, 1] = x.sum()
    return self.linear(x) * self.cache.sum()


def normalise(self, x):
    return self.bn(self.conv(x.view(-1, 4, 1, 2)))


def zero_a_statistic(self, x):
    self.bn.running_mean.zero_()
    return self.bn(self.linear(x).view(-1, 8, 1, 1))


def write_to_the_input(self, x):
    x[:, 4:] = 0
    return self.linear(x)


@pytest.mark.parametrize(
    ("forward", "num_changed"),
    [
        (add_to_a_buffer, 1),
        (write_one_element, 1),
        (normalise, 3),
        (zero_a_statistic, 3),
        (write_to_the_input, 0),
    ],
)
def test_state_that_changes_in_the_forward_is_captured(forward, num_changed):
    model = module(
        forward,
        linear=nn.Linear(8, 8),
        conv=nn.Conv2d(4, 8, 1),
        bn=nn.BatchNorm2d(8),
        foo=torch.zeros(8),
        cache=torch.zeros(4, 4),
    )
    graph = capture(model, (torch.zeros(6, 8),), name=forward.__name__)
    held = sum(b.numel() * b.element_size() for b in model.buffers())
    assert persistent_bytes(graph, Role.BUFFER) == held
    buffers = np.flatnonzero(graph.tensor_role == Role.BUFFER)
    changed = 0
    for buffer in buffers:
        versions = np.flatnonzero(graph.tensor_storage == graph.tensor_storage[buffer])
        writers = graph.tensor_producer[versions[1:]]
        changed += len(writers) > 0
        start, end = graph.first_consumer[buffer : buffer + 2]
        touching = [*graph.consumers[start:end], *writers]
        assert len({graph.unit[op] for op in touching}) <= 1
    assert changed == num_changed


def test_who_reads_a_changed_buffer_waits_for_the_change():
    model = module(add_to_a_buffer, linear=nn.Linear(8, 8), foo=torch.zeros(8))
    graph = capture(model, (torch.zeros(6, 8),), name="foo")
    assert "add_:0" in inputs_of(graph, op_named(graph, "add"))


def test_the_model_given_is_not_touched():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    capture(model, (torch.ones(3, 4),), name="untouched")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks


def tied():
    embedding, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    head.weight = embedding.weight
    return module(lambda self, x: self.head(self.embedding(x)), embedding=embedding, head=head)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_weight_is_counted_once_updated_once_and_refreshed_elsewhere(device):
    with torch.device(device):
        model = tied()
    graph = capture(model, (torch.zeros(4, 5, dtype=torch.long),), name="tied")
    assert persistent_bytes(graph, Role.PARAMETER) == 800 * 4
    assert int(graph.elements.sum()) == 800
    lookup, head = op_named(graph, "embedding.embedding"), op_named(graph, "head.mm")
    assert graph.unit[lookup] != graph.unit[head]
    update, refresh = (
        op_named(graph, f"embedding.weight.{what}") for what in ("update", "refresh.0")
    )
    assert graph.unit[update] == graph.unit[lookup]
    assert graph.unit[refresh] == graph.unit[head]
    assert inputs_of(graph, refresh) == ["embedding.weight.update:0"]
    (gradient,) = (name for name in inputs_of(graph, update) if name != "embedding.weight")
    total = graph.tensor_producer[graph.tensor_names.index(gradient)]
    assert graph.op_targets[total] == "aten.add"
    assert graph.unit[total] == graph.unit[lookup]


def test_two_parameters_in_one_storage_are_held_once():
    weight = torch.zeros(8, 8)
    model = module(
        lambda self, x: x @ self.a @ self.b, a=nn.Parameter(weight), b=nn.Parameter(weight.t())
    )
    graph = capture(model, (torch.zeros(3, 8),), name="transposed")
    assert persistent_bytes(graph, Role.PARAMETER) == 8 * 8 * 4


def test_parameters_without_gradient_are_named_and_not_updated():
    parts = {name: nn.Linear(4, 4) for name in ("used", "unused", "frozen")}
    parts["frozen"].requires_grad_(False)
    model = module(lambda self, x: self.frozen(self.used(x)), **parts)
    graph, report = capture_report(model, (torch.zeros(3, 4),), name="unused")
    assert report.missing_gradients == ("unused.weight", "unused.bias")
    updated = {n for n, phase in zip(graph.op_names, graph.phase, strict=True) if phase == Phase.U}
    assert updated == {"used.weight.update", "used.bias.update"}
    assert report.torch_version == torch.__version__
    assert report.batches == (3, 6, 9)


# --- losses and inputs ----------------------------------------------------------------------------


def test_several_outputs_all_count_in_the_stand_in_for_a_loss():
    model = module(
        lambda self, x: (self.a(x), {"b": self.b(x)}), a=nn.Linear(4, 2), b=nn.Linear(4, 3)
    )
    graph, report = capture_report(model, (torch.zeros(3, 4),), name="two heads")
    assert report.missing_gradients == ()
    assert graph.op_targets.count("aten.mean") == 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, y: loss,
        lambda loss, y: {"loss": loss, "logits": y},
        lambda loss, y: (loss, y),
    ],
)
def test_the_models_own_loss_is_used(wrap):
    def forward(self, data, labels):
        y = self.linear(data)
        return wrap(functional.cross_entropy(y, labels), y)

    example = {"data": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.long)}
    graph = capture(module(forward, linear=nn.Linear(4, 5)), example, name="loss")
    assert Counter(graph.op_class)[OpClass.LOSS] == 2
    assert "aten.mean" not in graph.op_targets
    assert {"input.data", "input.labels"} <= set(graph.op_names)


def test_a_factory_may_say_the_loss_and_want_the_batch():
    def factory(batch):
        return nn.Linear(4, 4), (torch.zeros(batch, 4),), {"loss": lambda y: y.pow(2).sum()}

    graph, report = capture_report(factory, None, Job(batch=32), name="factory")
    assert report.batches == (32, 64, 96)
    assert "aten.pow" in graph.op_targets
    assert report.route.startswith("built on meta")


def test_a_factory_that_reads_values_while_building_is_run_as_it_is():
    def factory():
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[1])), (torch.zeros(3, 4),)

    _, report = capture_report(factory, name="rates")
    assert report.route.startswith("built as it is")


def test_a_batch_in_another_dimension_is_given_by_a_callable():
    graph = capture(nn.Linear(4, 4), lambda batch: (torch.zeros(7, batch, 4),), name="second")
    assert flops(graph, Phase.F, OpClass.MATMUL, batch=5) == 2 * 7 * 5 * 16


def test_a_model_far_too_large_for_memory_is_captured():
    def factory():
        return nn.Sequential(*(nn.Linear(2**17, 2**17) for _ in range(4))), (torch.zeros(2, 2**17),)

    graph = capture(factory, name="large")
    assert int(graph.elements.sum()) == 4 * (2**34 + 2**17)


# --- refusals: one line each ----------------------------------------------------------------------


def refusal(model, inputs=None, job=None, name="m"):
    with pytest.raises(CaptureError) as caught:
        capture(model, inputs, job, name=name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name}: ")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_a_branch_on_a_value_is_refused_with_its_place(capfd):
    def forward(self, x):
        x = self.linear(x)
        return x if x.sum() > 0 else -x

    inner = module(forward, linear=nn.Linear(4, 4))
    message = refusal(nn.Sequential(inner), (torch.zeros(3, 4),))
    line = forward.__code__.co_firstlineno + 2
    assert "depends on the values of tensors" in message
    assert "in module 0" in message
    assert f"{THIS_FILE}:{line}" in message
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("read", [lambda x: x.max().item(), lambda x: x.nonzero().sum()])
def test_reading_a_value_is_refused(read):
    model = module(lambda self, x: self.a(x) * read(x), a=nn.Linear(4, 4))
    assert "depends on the values of tensors" in refusal(model, (torch.zeros(3, 4),))


def test_what_the_model_raises_is_told_in_one_line_with_its_place(capfd):
    def forward(self, x):
        raise ValueError("bad\nshape")

    message = refusal(module(forward, a=nn.Linear(4, 4)), (torch.zeros(3, 4),))
    assert "ValueError: bad shape" in message
    assert f"{THIS_FILE}:{forward.__code__.co_firstlineno + 1}" in message
    message = refusal(nn.Sequential(nn.Linear(5, 4)), (torch.zeros(3, 4),))
    assert "aten.addmm" in message
    assert "in module 0" in message
    assert capfd.readouterr().err == ""


def test_a_model_that_exits_is_refused():
    message = refusal(module(lambda self, x: sys.exit("enough"), a=nn.Linear(4, 4)), torch.ones(2))
    assert message.startswith("m: the model raised SystemExit: enough (")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    assert "hides its ops" in refusal(torch.jit.script(nn.Linear(4, 4)), torch.zeros(2, 4))


def test_a_length_that_the_factory_does_not_take_is_refused():
    message = refusal(lambda: (nn.Linear(4, 4), torch.zeros(2, 4)), job=Job(sequence_length=8))
    assert "no parameter sequence_length" in message


def test_other_ops_at_another_batch_are_refused_by_name():
    def forward(self, x):
        y = self.a(x)
        return y.relu() if len(x) > 5 else y.tanh()

    message = refusal(module(forward, a=nn.Linear(4, 4)), (torch.zeros(4, 4),))
    assert "other ops at batch 8 than at 4" in message
    assert "first that differs is tanh" in message


def test_a_size_that_is_not_affine_in_the_batch_is_refused_by_name():
    model = module(lambda self, x: self.a(x) @ self.a(x).t(), a=nn.Linear(4, 4))
    message = refusal(model, (torch.zeros(4, 4),))
    assert "op mm: bytes is" in message
    assert "at batch 4, 8, 12" in message


def test_no_gradient_at_all_is_refused():
    model = module(lambda self, x: self.a(x).detach(), a=nn.Linear(4, 4))
    assert "no parameter gets a gradient" in refusal(model, (torch.zeros(3, 4),))
    assert "no parameter gets a gradient" in refusal(nn.ReLU(), (torch.zeros(3, 4),))


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (nn.Linear(4, 4), None, "no example inputs"),
        (nn.Linear(4, 4), 3, "not int"),
        (3, None, "neither a model nor a factory"),
        (lambda: 3, None, "must return (model, example_inputs)"),
        (lambda: 1 / 0, None, "the factory raised ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), None, "the factory raised SystemExit: 3"),
        (nn.Linear(4, 4), torch.zeros(4), "at batch 8: the model raised"),
        (lambda: (nn.Linear(1, 1), torch.zeros(2, 1), {"los": 1}), None, "option 'los'"),
        (nn.Linear(4, 4), lambda batch: 1 / 0, "example inputs for batch 2 raised ZeroDivision"),
        (nn.Embedding(9, 4, sparse=True), torch.zeros(4, dtype=torch.long), "use sparse=False"),
    ],
)
def test_wrong_uses_are_refused_with_the_reason(model, inputs, reason):
    assert reason in refusal(model, inputs)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_module_without_shapes_is_refused():
    assert "has no shape yet" in refusal(nn.LazyLinear(4), (torch.zeros(3, 4),))


# --- custom ops -----------------------------------------------------------------------------------


def test_a_custom_op_is_refused_until_it_has_a_shape_rule_and_then_has_a_cost():
    from torch.utils.flop_counter import register_flop_formula

    @torch.library.custom_op("placewright_test::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    def forward(self, x):
        return scan(self.a(x))

    model = nn.Sequential(module(forward, a=nn.Linear(4, 4)))
    message = refusal(model, (torch.zeros(3, 4),))
    for part in (
        "op placewright_test::scan in module 0",
        'torch.library.register_fake("placewright_test::scan")',
        "register_flop_formula(torch.ops.placewright_test.scan)",
    ):
        assert part in message
    scan.register_fake(torch.empty_like)
    scan.register_autograd(lambda ctx, grad: scan(grad))
    graph = capture(model, (torch.zeros(3, 4),), name="scan")
    op = op_named(graph, "0.placewright_test.scan")
    assert graph.at_batch(3).traffic[op] == 2 * 3 * 4 * 4
    assert graph.at_batch(3).flops[op] > 0
    register_flop_formula(torch.ops.placewright_test.scan)(
        lambda shape, out_shape=None, **kwargs: 7 * math.prod(shape)
    )
    graph = capture(model, (torch.zeros(3, 4),), name="scan")
    assert graph.at_batch(3).flops[op] == 7 * 12


# --- factories by name ----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with modules that define factories; forgotten afterwards."""
    (tmp_path / "placewright_zoo.py").write_text(
        "import torch\n"
        "def net(): return torch.nn.Linear(4, 4), (torch.zeros(3, 4),)\n"
        "class Nested: net = staticmethod(net)\n"
        "number = 3\n"
    )
    (tmp_path / "placewright_broken.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "placewright_needy.py").write_text("import placewright_absent\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("placewright_")]:
        del sys.modules[name]


@pytest.mark.parametrize("attribute", ["net", "Nested.net"])
def test_a_factory_is_found_by_name_in_the_given_folder(package, attribute):
    factory = load_factory(f"placewright_zoo:{attribute}", package)
    assert capture(factory, name="zoo").num_units == 2


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("placewright_zoo", "package.module:factory"),
        ("placewright_nowhere:net", "no module named 'placewright_nowhere'"),
        ("placewright_zoo.deeper:net", "no module named 'placewright_zoo.deeper'"),
        ("placewright_zoo:absent", "placewright_zoo has no attribute 'absent'"),
        ("placewright_zoo:number", "number is a int, not callable"),
        ("placewright_broken:net", "importing it raised RuntimeError: at import"),
        ("placewright_needy:net", "importing it needs 'placewright_absent'"),
    ],
)
def test_a_factory_that_cannot_be_loaded_is_refused_by_name(package, spec, reason):
    with pytest.raises(CaptureError) as caught:
        load_factory(spec, package)
    assert reason in str(caught.value)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- models of others -----------------------------------------------------------------------------

VOCABULARY = 512
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}


def text_inputs(batch):
    ids = torch.randint(0, VOCABULARY, (batch, 16))
    return {"input_ids": ids, "labels": ids}


def image_inputs(batch):
    return {"pixel_values": torch.zeros(batch, 3, 32, 32), "labels": torch.zeros(batch).long()}


def hugging_face(name):
    """One small model by name: (factory, inputs, precision)."""
    t = pytest.importorskip("transformers")
    experts = {"intermediate_size": 64, "num_key_value_heads": 1}
    models = {
        "bert": (t.BertForMaskedLM, t.BertConfig, SMALL | {"intermediate_size": 64}),
        "gpt2": (
            t.GPT2LMHeadModel,
            t.GPT2Config,
            {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2},
        ),
        "t5": (
            t.T5ForConditionalGeneration,
            t.T5Config,
            {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "num_heads": 2}
            | {"decoder_start_token_id": 0, "pad_token_id": 0},
        ),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, SMALL | experts),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig, SMALL | experts),
        "vit": (
            t.ViTForImageClassification,
            t.ViTConfig,
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            | {"image_size": 32, "patch_size": 8},
        ),
    }
    kind, configuration, sizes = models[name]
    inputs = image_inputs if name == "vit" else text_inputs
    return (lambda: (kind(configuration(**sizes)), inputs)), "bf16" if name == "mixtral" else "fp32"


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "mixtral", "vit"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_are_captured_from_bare_configurations(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    factory, precision = hugging_face(name)
    graph, report = capture_report(factory, None, Job(batch=4, precision=precision), name=name)
    model, _ = factory()
    unique = {id(p): p.numel() for p in model.parameters()}
    assert int(graph.elements.sum()) == sum(unique.values())
    width = 2 if precision == "bf16" else 4
    assert persistent_bytes(graph, Role.PARAMETER) == width * sum(unique.values())
    assert report.missing_gradients == ()
    layers = {"t5": 6}.get(name, 2)
    assert Counter(graph.op_class)[OpClass.ATTENTION] == 2 * layers
    other = [t for t, c in zip(graph.op_targets, graph.op_class, strict=True) if c == OpClass.OTHER]
    assert other == []
    assert graph.loops is not None
    ops = zip(graph.op_targets, graph.op_class, graph.loops, strict=True)
    bare = {target for target, kind, loops in ops if loops is None and kind != OpClass.VIEW}
    assert bare <= {"aten.copy_", "aten.fill_"}  # T5 shifts its labels by writing to parts


@pytest.mark.filterwarnings("ignore")
def test_mixtral_in_single_precision_is_refused_with_the_op_and_the_reason(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    factory, _ = hugging_face("mixtral")
    message = refusal(factory, None, Job(batch=4))
    assert "aten._grouped_mm in module model.layers.0.mlp.experts" in message


@pytest.mark.filterwarnings("ignore")
def test_gpt2_small_has_124_million_parameters(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    t = pytest.importorskip("transformers")
    factory = lambda: (t.GPT2LMHeadModel(t.GPT2Config()), text_inputs)  # noqa: E731
    graph = capture(factory, None, Job(batch=4), name="gpt2")
    assert persistent_bytes(graph, Role.PARAMETER) == 4 * 124_439_808
