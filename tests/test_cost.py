import numpy as np
import pytest

from simcore.cost import CostSource, assumptions, cost_table
from simcore.errors import JobError, ProfileError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase
from simcore.job import Job
from simcore.op_curves import predict
from simcore.profile_store import load_profile
from simcore.signature import Signature

V100, A100, T4 = "V100-SXM2-16GB", "A100-SXM4-80GB", "T4-16GB"
CPU = "CPU-2x-Xeon-E5-2698v4"
JOB = Job(batch=8)


def one_op(op_class, *, dtype="fp32", dims=(), traffic=(0, 0), elements=0):
    """A graph of one op of a class."""
    builder = GraphBuilder("one", batch=8)
    signature = Signature(op_class.name.lower(), dtype, dims, 1.0, traffic)
    phase = Phase.U if op_class == OpClass.UPDATE else Phase.F
    builder.op(
        "op", op_class=op_class, phase=phase, signature=signature, kernels=3, elements=elements
    )
    return builder.build()


def seconds(graph, kind=V100, job=JOB, batch=8):
    return cost_table(graph, job, (kind,), (batch,)).seconds[0, 0, 0]


def measured(cpu=float("nan"), measured_on=V100, batch=64):
    """A fixed graph: an input that costs nothing, then an op of two seconds."""
    builder = GraphBuilder("measured", batch=batch)
    first = builder.op("in", op_class=OpClass.INPUT, kernels=0, outputs=[Out(8)])
    builder.op("op", inputs=builder.outputs(first), seconds=2.0, cpu_seconds=cpu)
    return builder.build(measured_on=measured_on)


def test_a_large_matrix_product_takes_its_flops_at_the_achievable_rate():
    dims = (("m", 0, 512), ("n", 4096, 0), ("k", 4096, 0))
    graph = one_op(OpClass.MATMUL, dims=dims, traffic=(4, 4))
    assert seconds(graph, CPU) == pytest.approx(2 * 4096**3 / (0.6 * 2.81e12))  # has no curves


def test_a_pointwise_op_takes_its_bytes_at_the_achievable_bandwidth():
    dims = (("elements", 0, 1000),)
    graph = one_op(OpClass.POINTWISE, dims=dims, traffic=(1000, 10**8))
    assert seconds(graph, CPU) == pytest.approx((1000 + 8e8) / (0.6 * 153.6e9))


def test_cost_follows_the_batch_through_the_signature_and_not_by_scaling():
    dims = (("m", 0, 4), ("n", 64, 0), ("k", 64, 0))
    graph = one_op(OpClass.MATMUL, dims=dims, traffic=(10**9, 0))
    table = cost_table(graph, JOB, (CPU, V100), (8, 16))
    assert table.seconds[0, 0, 0] == table.seconds[0, 0, 1]  # memory-bound by its weights
    assert 1 <= table.seconds[0, 1, 1] / table.seconds[0, 1, 0] < 1.5  # a curve: nearly so


def test_the_dtype_of_the_signature_picks_the_peak():
    dims = (("m", 4096, 0), ("n", 4096, 0), ("k", 4096, 0))
    fp32, fp16, bf16 = (
        seconds(one_op(OpClass.MATMUL, dtype=d, dims=dims)) for d in ("fp32", "fp16", "bf16")
    )
    assert fp16 < fp32 / 4
    assert bf16 == fp32  # a V100 has no bf16


@pytest.mark.parametrize(
    ("op_class", "names"),
    [
        (OpClass.CONVOLUTION, ("n", "k", "out", "c", "filter")),
        (OpClass.ATTENTION, ("b", "h", "q", "kv", "d")),
        (OpClass.RNN, ("t", "b", "dirs", "gates", "h", "i")),
        (OpClass.BATCHED_MATMUL, ("b", "m", "n", "k")),
    ],
)
def test_compute_classes_are_bound_by_flops_or_traffic_whichever_is_larger(op_class, names):
    dims = tuple((name, 16, 0) for name in names)
    name = op_class.name.lower()
    flops = Signature(name, "fp32", dims).flops(8)
    rate = load_profile(CPU).flop_rate(name, "fp32")
    assert seconds(one_op(op_class, dims=dims, traffic=(4, 0)), CPU) == pytest.approx(flops / rate)
    slow = seconds(one_op(op_class, dims=dims, traffic=(9 * 10**9, 0)), CPU)
    assert slow == pytest.approx(9e9 / load_profile(CPU).byte_rate(name))


def test_an_update_moves_what_the_optimizer_reads_and_writes():
    graph = one_op(OpClass.UPDATE, elements=10**6)
    for job in (JOB, Job(batch=8, optimizer="sgd"), Job(batch=8, precision="fp16")):
        moved = 10**6 * job.update_traffic_per_element()
        expected = moved / load_profile(V100).byte_rate("update")
        assert seconds(graph, job=job) == pytest.approx(expected)


def test_views_inputs_and_ops_without_signature_cost_nothing():
    builder = GraphBuilder("free", batch=8)
    signature = Signature("view", "fp32", (("elements", 10**9, 0),), traffic=(10**9, 0))
    builder.op("view", op_class=OpClass.VIEW, signature=signature, kernels=0)
    builder.op("other")
    table = cost_table(builder.build(), JOB, (V100, CPU), (8,))
    assert not table.seconds.any()
    assert (table.source == CostSource.ZERO).all()
    assert (table.relative_error == 0).all()


def test_launch_is_kept_apart_and_counts_kernels():
    table = cost_table(one_op(OpClass.POINTWISE, traffic=(8, 0)), JOB, (V100, A100), (8,))
    assert table.launch.tolist() == [[pytest.approx(3 * 8e-6), pytest.approx(3 * 6e-6)]]


def test_costs_are_tagged_with_source_and_error():
    table = cost_table(one_op(OpClass.MATMUL, dims=_square()), JOB, (V100, CPU), (8,))
    assert table.source[0].tolist() == [CostSource.CURVE, CostSource.ROOFLINE]
    assert ((table.relative_error > 0.02) & (table.relative_error < 0.6)).all()


def test_each_op_of_a_graph_costs_what_it_costs_alone():
    builder = GraphBuilder("many", batch=8)
    signatures = [
        Signature("matmul", "fp32", (("m", 0, 64), ("n", 512, 0), ("k", 256, 0)), 1.0, (9, 9)),
        Signature("pointwise", "fp32", (("elements", 0, 999),), 1.0, (0, 10**6)),
    ]
    for index in (0, 1, 0):
        name = signatures[index].op_class.upper()
        builder.op(f"op{builder.num_ops}", op_class=OpClass[name], signature=signatures[index])
    table = cost_table(builder.build(), JOB, (V100, A100), (4, 8))
    for kind, device in enumerate((V100, A100)):
        for variant, batch in enumerate((4, 8)):
            alone = [predict(load_profile(device), signatures[index], batch) for index in (0, 1, 0)]
            assert table.seconds[:, kind, variant] == pytest.approx(alone, rel=1e-12)


def _square():
    return (("m", 64, 0), ("n", 64, 0), ("k", 64, 0))


def test_a_faster_device_is_faster_and_a_cpu_is_slower():
    dims = (("m", 4096, 0), ("n", 4096, 0), ("k", 4096, 0))
    graph = one_op(OpClass.MATMUL, dims=dims, traffic=(10**8, 0))
    cpu, t4, v100, h100 = (seconds(graph, kind) for kind in (CPU, T4, V100, "H100-SXM5-80GB"))
    assert h100 < v100 < t4 < cpu


def test_measured_seconds_are_used_as_they_are_on_their_kind_and_batch():
    table = cost_table(measured(), Job(batch=64), (V100,), (64,))
    assert table.seconds[:, 0, 0].tolist() == [0.0, 2.0]
    assert table.source[:, 0].tolist() == [CostSource.ZERO, CostSource.FIXED]
    assert cost_table(measured(), Job(batch=None), (V100,), (None,)).seconds[1, 0, 0] == 2.0


def test_another_batch_of_a_measured_graph_is_refused_unless_assumed_linear():
    with pytest.raises(JobError, match=r"measured at batch 64.*batch 32.*--assume-linear"):
        cost_table(measured(), Job(batch=32), (V100,), (32,))
    table = cost_table(measured(), Job(batch=32, assume_linear=True), (V100,), (64, 32))
    assert table.seconds[1, 0].tolist() == [2.0, 1.0]
    assert table.source[1, 0] == CostSource.SCALED
    assert table.relative_error[1, 0] == pytest.approx(0.3)


def test_a_file_without_batch_was_measured_at_the_job_batch():
    graph = measured(batch=None)
    table = cost_table(graph, Job(batch=16, assume_linear=True), (V100,), (16, 8))
    assert table.seconds[1, 0].tolist() == [2.0, 1.0]
    with pytest.raises(JobError, match="unknown batch"):
        cost_table(graph, Job(batch=None), (V100,), (8,))


def test_another_gpu_kind_is_refused_unless_assumed_linear():
    with pytest.raises(JobError, match=f"measured on {V100} and say nothing about {T4}"):
        cost_table(measured(), Job(batch=64), (V100, T4), (64,))
    table = cost_table(measured(), Job(batch=64, assume_linear=True), (V100, T4), (64,))
    assert table.seconds[1, :, 0].tolist() == [2.0, pytest.approx(2.0 * 15.7 / 8.1)]
    assert table.source[1].tolist() == [CostSource.FIXED, CostSource.SCALED]


def test_an_unknown_measured_kind_means_the_only_gpu_kind():
    graph = measured(measured_on=None)
    assert cost_table(graph, Job(batch=64), (T4, CPU), (64,)).seconds[1, 0, 0] == 2.0
    with pytest.raises(JobError, match="one unknown device kind"):
        cost_table(graph, Job(batch=64), (T4, V100), (64,))
    assert assumptions(graph, Job(), (T4, V100)) == []
    (one,) = assumptions(graph, Job(), (T4, CPU, T4))
    assert one.endswith(
        f"does not say on which device kind its seconds were measured; they are "
        f"taken as those of {T4}"
    )
    (two,) = assumptions(graph, Job(assume_linear=True), (T4, V100))
    assert two.endswith(f"{T4} and {V100}")
    assert assumptions(measured(), Job(), (V100,)) == []


def test_a_cpu_runs_a_measured_graph_only_where_the_file_has_cpu_seconds():
    without = cost_table(measured(), Job(batch=64), (V100, CPU), (64,))
    assert without.seconds[:, 1, 0].tolist() == [0.0, np.inf]
    assert without.source[1, 1] == CostSource.IMPOSSIBLE
    given = cost_table(measured(cpu=9.0), Job(batch=64), (V100, CPU), (64,))
    assert given.seconds[1, :, 0].tolist() == [2.0, 9.0]


def test_an_op_that_cannot_run_on_a_gpu_stays_impossible_there():
    graph = OpGraph.from_edges({"a": np.inf, "b": 1.0}, [("a", "b", 4)])
    table = cost_table(graph, Job(batch=None), (V100,), (None,))
    assert table.seconds[:, 0, 0].tolist() == [np.inf, 1.0]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ProfileError, match="unknown device kind 'V1000'"):
        cost_table(measured(), Job(batch=64), ("V1000",), (64,))


def test_cost_tables_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        cost_table(measured(), Job(batch=64), (V100,), (64,)).seconds[0] = 1
