"""Importers against rows worked out by hand, and traces that are damaged."""

import csv
import gzip
import json
import shutil
from pathlib import Path

import pytest

from calibration.importers import IMPORTERS, import_folder
from calibration.importers.json_stream import CHUNK, stream_trace
from calibration.importers.kineto import read_trace
from calibration.importers.source import Importer
from calibration.predict import signature_of
from simcore.errors import MeasurementError, UsageError
from simcore.profile_store import load_profile

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
MIB = 2**20


@pytest.fixture
def data():
    if not DATA.is_dir():
        pytest.skip("the public data sets are not at ../shared/data")
    return DATA


def write(folder, name, header, *rows):
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *(row.split() for row in rows)])
    return folder


def only(found, **fields):
    chosen = [r for r in found.records if all(getattr(r, k) == v for k, v in fields.items())]
    assert len(chosen) == 1, chosen
    return chosen[0]


ACESO = (
    "model micro_batch tp tp_algo op_name forward_us backward_us input_mb output_mb weights_mb "
    "activations_mb fwd_reserved_mb bwd_reserved_mb"
)


def test_aceso_products_have_the_shapes_of_their_shard(tmp_path):
    folder = write(
        tmp_path / "aceso_v100", "ops_gpt_350M.csv", ACESO,
        "gpt_350M 2 4 0 enc-MLP-GEMM-1 210.327 631.241 8 7 1.5 3 0 16",
        "gpt_350M 2 4 0 enc-MLP-GEMM-2 382.972 130.876 8 8 2 4 0 20",
        "gpt_350M 2 1 0 enc-attention-qkv 665.723 237.986 5 16 1.5 12 0 82",
    )  # fmt: skip
    found = import_folder("aceso_v100", folder)
    first, second = found.records
    assert first.dims == {"m": 2 * 2048, "n": 4 * 1024 // 4, "k": 1024}
    assert (first.phase, first.seconds) == ("F", pytest.approx(210.327e-6))
    assert second.dims == {"m": 2 * 2048, "n": 1024, "k": 4 * 1024 // 4}
    assert (second.phase, second.factor) == ("B", 2.0)
    assert second.seconds == pytest.approx(130.876e-6)
    assert found.skipped == {
        ("op", "contains a collective over the tensor-parallel group"): 2,
        ("op", "several ops in one row (product, bias and copies)"): 2,
    }


@pytest.mark.parametrize(("source", "norm"), [("aceso_v100", 8), ("sailor", 6)])
def test_rows_of_a_layer_count_what_they_do_beside_their_op(tmp_path, source, norm):
    """Sums of bias gradients and residuals; where weights have gradients, theirs as well."""
    one = "1 1 enc-1st-layernorm 100 200 1 1 1 1", "1 1 enc-MLP-gelu 100 200 1 1 1 1"
    last = "1 1 enc-post-MLP-dropout 100 200 1 1 1 1"
    if source == "sailor":
        header = "model gpu precision micro_batch tp op_name forward_us backward_us input_mb"
        columns = f"{header} output_mb weights_mb activations_mb"
        rows = [f"OPT-350 V100-16 fp16 {row}" for row in (*one, last)]
        folder = write(tmp_path / source, "ops_OPT-350_mixed.csv", columns, *rows)
    else:
        rows = [f"gpt_350M {row} 0 0".replace("1 1 enc", "1 1 0 enc") for row in (*one, last)]
        folder = write(tmp_path / source, "ops_gpt_350M.csv", ACESO, *rows)
    found = import_folder(source, folder)
    states = 2048 * 1024 * 2  # bytes
    passes = {
        ("enc-1st-layernorm", "F"): 2, ("enc-1st-layernorm", "B"): norm,
        ("enc-MLP-gelu", "F"): 2 * 4, ("enc-MLP-gelu", "B"): 4 * 4,
        ("enc-post-MLP-dropout", "F"): 7.5, ("enc-post-MLP-dropout", "B"): 4.5,
    }  # fmt: skip
    assert {(r.target, r.phase): r.traffic / states for r in found.records} == passes


def test_with_these_passes_the_ops_of_a_layer_are_about_as_fast_as_its_dropout(data):
    """Of every GPU of both sources, at the largest size: what a row holds shows in its rate."""
    for name in ("aceso_v100", "sailor"):
        largest = {}
        for row in import_folder(name, data / name).records:
            key = row.device, row.dtype, row.target, row.phase
            if row.op_class == "pointwise" and row.target.startswith("enc-"):
                largest[key] = max(largest.get(key, row), row, key=lambda each: each.traffic)
        rates = {key: row.traffic / row.seconds for key, row in largest.items()}
        assert rates
        for (device, dtype, target, phase), rate in rates.items():
            dropout = rates[device, dtype, "enc-attention-dropout", phase]
            assert 0.7 < rate / dropout < 1.35, (device, dtype, target, phase)


def test_aceso_attention_is_batched_over_the_heads_of_a_shard(tmp_path):
    folder = write(
        tmp_path / "aceso_v100", "ops_gpt_350M.csv", ACESO,
        "gpt_350M 1 2 0 enc-attention-score 130 260 1 1 0 1 0 0",
        "gpt_350M 1 2 0 enc-attention-softmax 150 200 1 1 0 1 0 0",
    )  # fmt: skip
    found = import_folder("aceso_v100", folder)
    score = only(found, op_class="batched_matmul", phase="F")
    assert score.dims == {"b": 8, "m": 2048, "n": 2048, "k": 64}
    softmax = only(found, op_class="softmax", phase="F")
    assert softmax.dims == {"elements": 8 * 2048 * 2048, "rows": 8 * 2048, "cols": 2048}
    assert softmax.traffic == 1.5 * 2 * 8 * 2048 * 2048  # half of what is read is masked


def test_aceso_convolutions_follow_from_the_width_and_fit_their_weights(tmp_path):
    folder = write(
        tmp_path / "aceso_v100", "ops_resnet_500M.csv", ACESO,
        "resnet_500M 16 1 0 conv1 2604.358 3907.543 9.188 171.500 0.126 172 344 0",
        "resnet_500M 16 1 0 block-1-0-conv2 7213.893 14499.953 257.25 214.375 13.781 42.9 45.1 86",
        "resnet_500M 16 1 0 block-2-0-conv2 7213.893 14499.953 257.25 214.375 13.781 42.9 45.1 86",
        "resnet_500M 16 2 0 block-1-0-conv2 4888.018 10192.397 257.25 214.375 6.891 42.9 45.1 130",
        "resnet_500M 16 1 0 fc 63.958 126.719 0.438 0.062 28.004 0.062 0 28",
    )  # fmt: skip
    found = import_folder("aceso_v100", folder)
    stem = only(found, target="conv1", phase="F")
    assert stem.dims["k"] == 224
    assert (stem.dims["out"], stem.dims["c"], stem.dims["filter"]) == (112**2, 3, 49)
    conv = only(found, target="block-1-0-conv2", phase="B")
    expected = {"n": 16, "k": 896, "c": 448, "out": 28**2, "filter": 9, "h": 56, "stride": 2}
    assert expected.items() <= conv.dims.items()
    assert conv.seconds == pytest.approx(14.499953e-3)
    last = only(found, target="fc", phase="F")
    assert last.dims == {"m": 16, "n": 1024, "k": 32 * 224}
    reasons = {reason: rows for (_, reason), rows in found.skipped.items()}
    assert reasons["weights do not fit the shape that the name says"] == 2
    assert reasons["contains a collective over the tensor-parallel group"] == 2


def test_aceso_gathers_count_one_member_and_links_gibibytes(tmp_path):
    folder = write(
        tmp_path / "aceso_v100", "collectives.csv", "collective gpus data_size_mb time_ms",
        "all_gather 4 2 0.5", "all_reduce 4 2 0.25", "all_reduce 4 0 0.06",
    )  # fmt: skip
    write(folder, "p2p_bandwidth.csv", "scope data_size_mb bandwidth_gib_per_s", "inter_node 2 4")
    found = import_folder("aceso_v100", folder)
    assert only(found, collective="all_gather").bytes == 8 * MIB
    assert only(found, collective="all_reduce").bytes == 2 * MIB
    assert only(found, collective="all_reduce").seconds == 0.25e-3
    assert found.skipped == {("collective", "size rounded to 0 MB"): 1}
    link = only(found, kind="link")
    assert link.seconds == pytest.approx(2 * MIB / (4 * 2**30))


def test_aiconfigurator_rows_are_milliseconds(tmp_path):
    folder = write(
        tmp_path / "aiconfigurator", "gemm_bf16_h100_sxm.csv", "m n k latency_ms", "3 5 7 0.25"
    )
    write(folder, "gemm_bf16_marvel_9.csv", "m n k latency_ms", "3 5 7 0.25", "3 5 8 0.25")
    write(
        folder, "context_attention_bf16_a100_sxm.csv",
        "batch seq_len num_heads num_kv_heads head_dim latency_ms", "2 8 4 1 64 0.5",
    )  # fmt: skip
    write(
        folder, "nccl_half_h100_sxm.csv", "collective num_gpus elements bytes latency_ms",
        "alltoall 8 256 512 0.0125",
    )  # fmt: skip
    found = import_folder("aiconfigurator", folder)
    product = only(found, op_class="matmul")
    assert (product.device, product.seconds, product.dtype) == ("H100-SXM5-80GB", 0.25e-3, "bf16")
    assert product.dims == {"m": 3, "n": 5, "k": 7}
    assert product.traffic == 2 * (3 * 7 + 7 * 5 + 3 * 5)
    attention = only(found, op_class="attention")
    assert attention.dims == {
        "b": 2, "h": 4, "q": 8, "kv": 8, "d": 64, "kv_heads": 1, "causal": 1,
    }  # fmt: skip
    exchange = only(found, collective="all_to_all")
    assert (exchange.bytes, exchange.group, exchange.seconds) == (512, 8, 12.5e-6)
    assert found.skipped == {("op", "unknown device (gemm_bf16_marvel_9.csv)"): 2}


def test_neusight_elementwise_ops_count_their_operands(tmp_path):
    folder = tmp_path / "neusight"
    folder.mkdir()
    (folder / "ops_fp32_Tesla_T4.csv").write_text(
        "op,B,M,N,K,H,latency_ms\nadd,8,,,,100,0.5\naddu,8,,,,100,0.4\nbmm,2,3,4,5,,0.1\n"
        "linear,1,3,4,5,,0.2\nln,8,,,,100,0.3\n"
    )
    found = import_folder("neusight", folder)
    assert only(found, target="add").traffic == 3 * 4 * 800
    assert only(found, target="addu").traffic == 2 * 4 * 800
    assert only(found, target="bmm").dims == {"b": 2, "m": 3, "n": 4, "k": 5}
    assert only(found, target="linear").dims == {"m": 3, "n": 4, "k": 5}
    assert only(found, target="ln").dims == {"elements": 800, "rows": 8, "cols": 100}
    assert {record.device for record in found.records} == {"T4-16GB"}


def test_deepbench_positions_are_those_of_the_output(tmp_path):
    folder = tmp_path / "deepbench"
    folder.mkdir()
    (folder / "conv.csv").write_text(
        "gpu,precision,source,w,h,c,n,k,s_filter_w,r_filter_h,pad_w,pad_h,stride_w,stride_h,"
        "forward_ms,backward_input_ms,backward_params_ms\n"
        "P100,fp16_mixed,,700,161,1,4,32,20,5,0,0,2,2,0.5,,2.5\n"
    )
    found = import_folder("deepbench", folder)
    forward = only(found, phase="F")
    assert forward.dims["out"] == ((700 - 20) // 2 + 1) * ((161 - 5) // 2 + 1)
    assert forward.dims["filter"] == 100
    assert (forward.dtype, forward.seconds) == ("fp16", 0.5e-3)
    assert only(found, phase="W").seconds == 2.5e-3
    assert found.skipped == {("op", "not run (empty)"): 1}


def test_deepbench_pads_what_tensor_cores_want_in_eights(tmp_path):
    folder = tmp_path / "deepbench"
    folder.mkdir()
    (folder / "gemm.csv").write_text(
        "gpu,precision,source,m,n,k,a_transpose,b_transpose,time_ms\n"
        "V100,fp16_mixed,,5124,9124,1530,N,N,2\nV100,fp32,,5124,9124,1530,N,N,9\n"
    )
    found = import_folder("deepbench", folder)
    assert only(found, dtype="fp16").dims == {"m": 5128, "n": 9128, "k": 1536}
    assert only(found, dtype="fp32").dims == {"m": 5124, "n": 9124, "k": 1530}


def test_deepbench_totals_are_both_gradients(tmp_path):
    folder = tmp_path / "deepbench"
    folder.mkdir()
    (folder / "rnn.csv").write_text(
        "gpu,precision,cell,hidden,batch,timesteps,forward_ms,backward_inputs_or_total_ms,"
        "backward_weights_ms,n_backward_columns\n"
        "M40,fp32,lstm,512,16,25,1,3,,1\nM40,fp32,gru,512,16,25,1,2,1,2\n"
    )
    found = import_folder("deepbench", folder)
    assert only(found, target="lstm", phase="B").factor == 2.0
    weights = only(found, target="gru", phase="W")
    assert weights.dims["gates"] == 3
    assert weights.traffic == 4 * (3 * 512**2 + 25 * 16 * 512 * 4)


VIDUR = (
    "n_head n_kv_head n_embd n_expanded_embd vocab_size use_gated_mlp num_tokens "
    "num_tensor_parallel_workers"
)


def test_vidur_products_follow_from_heads_and_gates(tmp_path):
    columns = " attn_pre_proj_median_ms attn_pre_proj_std_ms mlp_up_proj_median_ms"
    folder = write(
        tmp_path / "vidur", "compute_a100_model.csv", VIDUR + columns,
        "64 8 8192 28672 32768 True 4096 2 2.5 0.125 8",
    )  # fmt: skip
    found = import_folder("vidur", folder)
    queries = only(found, target="attn_pre_proj")
    assert queries.dims == {"m": 4096, "n": (64 // 2 + 2 * 8 // 2) * 128, "k": 8192}
    assert (queries.seconds, queries.spread) == (2.5e-3, 0.125e-3)
    assert only(found, target="mlp_up_proj").dims["n"] == 28672


@pytest.mark.parametrize(("model", "additions"), [("microsoft_phi-2", 2), ("meta-llama_x", 1)])
def test_vidur_counts_both_additions_of_parallel_blocks_and_bytes_moved_one_by_one(
    tmp_path, model, additions
):
    columns = " add_median_ms attn_rope_median_ms mlp_act_median_ms"
    folder = write(
        tmp_path / "vidur", f"compute_a100_{model}.csv", VIDUR + columns,
        "32 8 4096 16384 32768 True 1000 2 1 1 1",
    )  # fmt: skip
    found = import_folder("vidur", folder)
    assert only(found, target="add").traffic == additions * 3 * 2 * 1000 * 4096
    heads = (32 // 2 + 8 // 2) * 128
    assert only(found, target="attn_rope").traffic == 2 * 4 * 1000 * heads
    assert only(found, target="mlp_act").traffic == 3 * 4 * 1000 * 16384 // 2


def test_vidur_workers_beyond_a_node_are_on_several(tmp_path):
    folder = write(
        tmp_path / "vidur", "network_a100_dgx_all_reduce.csv",
        "network collective num_workers devices_per_node max_devices_per_node size_bytes median_ms "
        "min_ms max_ms n_ranks_averaged",
        "a100_dgx all_reduce 16 8 8 2048 0.25 0.2 0.3 1",
        "a100_dgx send_recv 2 2 8 2048 0.008 0.008 0.008 1",
    )  # fmt: skip
    found = import_folder("vidur", folder)
    assert only(found, kind="collective").topology.startswith("2 nodes, A100-SXM4-80GB, network")
    assert only(found, kind="link").scope == "intra_node"


def test_small_network_tables_are_in_their_own_units(tmp_path):
    write(
        tmp_path / "vtrain", "allreduce_v100_8gpu.csv",
        "size_bytes out_of_place_ns out_of_place_busbw_gb_s in_place_ns in_place_busbw_gb_s",
        "1048576 79930 22.96 78610 23.34",
    )  # fmt: skip
    (reduced,) = import_folder("vtrain", tmp_path / "vtrain").records
    assert (reduced.bytes, reduced.group, reduced.seconds) == (MIB, 8, pytest.approx(79.93e-6))
    bus = 2 * 7 / 8 * reduced.bytes / reduced.seconds
    assert bus == pytest.approx(22.96e9, rel=1e-3)  # the file's own number
    write(
        tmp_path / "ml_engineering", "allreduce_busbw.csv",
        "machine n_nodes gpus_per_node_used payload busbw_GB_per_s", "8xH200 1 8 2GiB 480",
    )  # fmt: skip
    table = tmp_path / "ml_engineering" / "allreduce_busbw.csv"
    table.write_text(table.read_text().replace("8xH200", "8x H200 node"))
    (quoted,) = import_folder("ml_engineering", tmp_path / "ml_engineering").records
    assert quoted.seconds == pytest.approx(2 * 7 / 8 * 2**31 / 480e9)


def test_taccl_is_read_from_the_files_in_plain_units(tmp_path):
    folder = tmp_path / "taccl"
    folder.mkdir()
    content = {
        "alpha": 0.5, "node_betas_list": [23, 46], "node_invbws_list": [23, 46],
        "remote_alpha": 2.5, "remote_beta": 105,
    }  # fmt: skip
    for name in ("topo-ndv2-1MB", "topo-ndv2-1KB"):
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = import_folder("taccl", folder)
    assert [round(r.seconds * 1e6, 6) for r in found.records] == [23.5, 46.5, 107.5]
    assert found.skipped.total() == 1


def test_pipedream_layers_are_milliseconds_and_the_input_is_dropped(tmp_path):
    folder = tmp_path / "pipedream"
    folder.mkdir()
    line = (
        "node{} -- {} -- forward_compute_time={}, backward_compute_time={}, "
        "activation_size=4.000, parameter_size=0.000\n"
    )
    (folder / "net.graph.txt").write_text(
        line.format(1, "Input0", "636.000", "0.000")
        + line.format(2, "Conv2d(3, 64)", "4.500", "0.000")
        + "\tnode1 -- node2\n"
    )
    found = import_folder("pipedream", folder)
    assert only(found, phase="F").seconds == pytest.approx(4.5e-3)
    assert found.skipped.total() == 3


@pytest.mark.parametrize("name", ["aceso_v100", "aiconfigurator", "sailor", "triosim", "vidur"])
def test_no_product_is_faster_than_its_gpu(data, name):
    """Wrong shapes, units or dtypes show here; clocks may be a fifth above the sheet's."""
    for row in import_folder(name, data / name).records:
        if row.op_class in ("matmul", "batched_matmul"):
            rate = signature_of(row).flops(1) / row.seconds
            assert rate < 1.2 * load_profile(row.device).peak(row.dtype), row


def test_a_softmax_is_one_kernel_in_16_bits_and_in_blocks_of_four_heads(tmp_path):
    folder = write(
        tmp_path / "sailor", "ops_OPT-30_mixed.csv",
        "model gpu precision micro_batch tp op_name forward_us backward_us input_mb output_mb "
        "weights_mb activations_mb",
        "OPT-30 A100-40 fp16 1 2 enc-attention-softmax 100 200 1 1 1 1",  # 28 heads
        "OPT-30 A100-40 fp16 1 4 enc-attention-softmax 1000 2000 1 1 1 1",  # 14
        "OPT-30 A100-40 fp32 1 2 enc-attention-softmax 400 800 1 1 1 1",
    )  # fmt: skip
    found = import_folder("sailor", folder)
    assert [r.seconds for r in found.records] == [pytest.approx(1e-4), pytest.approx(2e-4)]
    assert found.skipped == {
        ("op", "several ops in one row (scores scaled, masked and softmax apart)"): 4
    }


def test_sailor_ops_of_ten_seconds_were_not_run(tmp_path):
    folder = write(
        tmp_path / "sailor", "ops_OPT-350_mixed.csv",
        "model gpu precision micro_batch tp op_name forward_us backward_us input_mb output_mb "
        "weights_mb activations_mb",
        "OPT-350 A100-40 fp16 1 1 enc-attention-softmax 10000000.000 9999999 1 1 1 1",
    )  # fmt: skip
    found = import_folder("sailor", folder)
    assert only(found).phase == "B"
    assert found.skipped == {("op", "a placeholder: too large to run"): 1}


def test_sailor_products_have_one_gradient_and_tf32_where_there_is(tmp_path):
    folder = write(
        tmp_path / "sailor", "ops_OPT-350_mixed.csv",
        "model gpu precision micro_batch tp op_name forward_us backward_us input_mb output_mb "
        "weights_mb activations_mb",
        "OPT-350 A100-40 fp32 1 1 enc-attention-dense 100 110 1 1 1 1",
        "OPT-350 V100-16 fp32 1 1 enc-attention-dense 100 110 1 1 1 1",
        "OPT-350 A100-40 fp32 1 1 enc-MLP-gelu 100 110 1 1 1 1",
    )  # fmt: skip
    found = import_folder("sailor", folder)
    ampere = only(found, device="A100-SXM4-40GB", op_class="matmul", phase="I")
    assert (ampere.dtype, ampere.factor, ampere.seconds) == ("tf32", 1.0, pytest.approx(110e-6))
    assert only(found, device="V100-SXM2-16GB", phase="F").dtype == "fp32"
    assert only(found, op_class="pointwise", phase="B").dtype == "fp32"


def test_nodes_of_a_graph_are_known_by_shape_and_module(tmp_path):
    folder = tmp_path / "neusight" / "opgraphs" / "Tesla_T4"
    folder.mkdir(parents=True)
    (folder / "net-train-8-2.csv").write_text(
        "name,op,target,inputs,input_shapes,output_shape,dtype,fw_ms,bw_ms,acc_ms\n"
        'q,call_module,h.0.query,x,"[[2, 8, 16]]","(2, 8, 32)",float32,0.5,1.5,0\n'
        "m,call_function,<built-in method matmul of type object at 0x7>,a b,"
        '"[[2, 4, 8, 3], [2, 4, 3, 8]]","(2, 4, 8, 8)",float32,0.25,0,0\n'
        'a,call_function,<built-in function add>,a b,"[[8, 4], [8, 4]]","(8, 4)",float32,1,0,0\n'
        's,call_method,size,x,"[[2, 8]]","(1,)",,0.01,0,0\n'
    )
    found = import_folder("neusight_graphs", tmp_path / "neusight")
    query = only(found, op_class="matmul", phase="F")
    assert (query.dims, query.seconds) == ({"m": 16, "n": 32, "k": 16}, 0.5e-3)
    both = only(found, op_class="matmul", phase="B")
    assert (both.factor, both.seconds) == (2.0, 1.5e-3)
    assert only(found, op_class="batched_matmul").dims == {"b": 8, "m": 8, "n": 8, "k": 3}
    assert only(found, op_class="pointwise").traffic == 3 * 4 * 32
    assert found.skipped.total() == 1


def test_triosim_tensors_give_an_op_its_shape(tmp_path):
    folder = tmp_path / "triosim"
    folder.mkdir()
    (folder / "vgg_tensor.csv").write_text(
        "Index,TensorID,TensorShape,TensorNumElement,TensorEachByte,TensorType,TensorStorgeid,gpuid\n"
        '0,4,"[2, 3, 9, 9]",486,4,input,5,0\n1,6,"[5, 3, 3, 3]",135,4,weight,7,0\n'
        '2,8,"[2, 5, 9, 9]",810,4,output,9,0\n'
    )
    (folder / "vgg_trace.csv").write_text(
        "OperatorID,OperatorName,Operator_input,Operator_output,Operator_cudatime,"
        "Operator_cudatimenooverlap,InputSize,OutputSize,gpuid,stage,tpflag\n"
        "1,aten::conv2d,[4; 6],[8],2673,2671,[486; 135],[810],0,forward,1\n"
        "2,autograd: ReluBackward0,[8],[8],10,10,[810],[810],0,backward,0\n"
    )
    found = import_folder("triosim", folder)
    conv = only(found, op_class="convolution")
    assert (conv.dims["out"], conv.dims["c"], conv.dims["stride"]) == (81, 3, 1)
    assert conv.seconds == pytest.approx(2.673e-3)
    assert found.skipped.total() == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m,n,k,latency_ms,colour\n", "unknown column 'colour'"),
        ("m,n,k\n", "no column 'latency_ms'"),
        ("m,n,n,k,latency_ms\n", "a column comes twice"),
        ("m,n,k,latency_ms\n1,2,3\n", ":2: 3 fields, not 4"),
        ("m,n,k,latency_ms\n1,2,3,fast\n", ":2: latency_ms: 'fast' is not a number"),
        ("m,n,k,latency_ms\n1,2,3,-1\n", ":2: latency_ms: '-1' is not a number >= 0"),
        ("m,n,k,latency_ms\n1,2,3,nan\n", ":2: latency_ms: 'nan' is not a number"),
        ("m,n,k,latency_ms\n1.5,2,3,1\n", ":2: m: '1.5' is not whole"),
        ("", "no column"),
    ],
)
def test_a_malformed_table_is_refused_with_file_and_place(tmp_path, text, reason):
    folder = tmp_path / "aiconfigurator"
    folder.mkdir()
    (folder / "gemm_bf16_l40s.csv").write_text(text)
    with pytest.raises(MeasurementError) as caught:
        import_folder("aiconfigurator", folder)
    assert str(caught.value).startswith("aiconfigurator/gemm_bf16_l40s.csv")
    assert reason in str(caught.value)


def test_every_importer_says_what_its_seconds_contain():
    assert all(isinstance(importer, Importer) for importer in IMPORTERS.values())
    assert {importer.contains for importer in IMPORTERS.values()} == {
        "kernel", "kernel+launch", "kernel+launch+sync",
    }  # fmt: skip


def test_an_unknown_importer_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'vtrain'"):
        import_folder("vtrian", tmp_path)


@pytest.mark.parametrize("name", sorted(IMPORTERS))
def test_the_public_tables_are_read_whole(data, name):
    found = import_folder(name, IMPORTERS[name].place(data))
    assert found.files
    assert found.records
    assert all(record.folder == name for record in found.records)


def test_a_gap_in_a_folder_is_no_error(data, tmp_path):
    shutil.copy(data / "aceso_v100" / "collectives.csv", tmp_path)
    assert import_folder("aceso_v100", tmp_path).files == ["collectives.csv"]


# traces of the torch profiler


def op(number, name, shapes, types, **args):
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 5,
        "args": {"External id": number, "Input Dims": shapes, "Input type": types, **args},
    }  # fmt: skip


def kernel(number, microseconds, name="gemm"):
    return {
        "ph": "X", "cat": "kernel", "name": name, "ts": 2, "dur": microseconds,
        "args": {"External id": number, "stream": 7},
    }  # fmt: skip


EVENTS = [
    op(1, "aten::addmm", [[8], [4, 16], [16, 8]], ["float", "float", "float"]),
    kernel(1, 3.5),
    kernel(1, 1.5, "split_k_reduce"),
    op(2, "aten::relu", [[4, 8]], ["c10::Half"]),
    kernel(2, 2.0),
    op(
        3, "aten::cudnn_convolution", [[2, 3, 9, 9], [5, 3, 3, 3]], ["float", "float"],
        **{"Concrete Inputs": ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]},
    ),
    kernel(3, 4.0),
    kernel(9, 1.0),
    {
        "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1, "dur": 2,
        "args": {"bytes": 4096},
    },
    {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 1, "dur": 20,
        "args": {
            "Collective name": "allreduce", "In msg nelems": 1000, "Group size": 8, "dtype": "Half",
        },
    },
]  # fmt: skip


def trace_file(tmp_path, text=None, events=EVENTS):
    path = tmp_path / "trace.json"
    document = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": events}
    path.write_bytes(json.dumps(document | {"end": 1}).encode() if text is None else text)
    return path


def test_kernels_of_an_op_are_summed_and_get_its_shape(tmp_path):
    found = read_trace(trace_file(tmp_path))
    product = only(found, op_class="matmul")
    assert product.dims == {"m": 4, "n": 8, "k": 16}
    assert product.seconds == pytest.approx(5e-6)
    assert (product.device, product.dtype, product.contains) == ("A100-SXM4-80GB", "fp32", "kernel")
    assert only(found, op_class="pointwise").traffic == 2 * 2 * 32
    conv = only(found, op_class="convolution")
    assert conv.dims["out"] == 25
    copied = only(found, kind="link")
    assert (copied.direction, copied.bytes, copied.seconds) == ("h2d", 4096, pytest.approx(2e-6))
    reduced = only(found, kind="collective")
    assert (reduced.bytes, reduced.group) == (2000, 8)
    assert found.skipped.total() == 1


def test_a_list_of_events_is_a_trace_too(tmp_path):
    found = read_trace(trace_file(tmp_path, json.dumps(EVENTS).encode()), device="T4-16GB")
    assert only(found, op_class="matmul").device == "T4-16GB"


def test_a_gzipped_trace_is_read_and_a_broken_one_refused(tmp_path):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(trace_file(tmp_path).read_bytes()))
    assert only(read_trace(packed), op_class="matmul").dims["k"] == 16
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(MeasurementError, match=r"trace\.json\.gz: cannot be read"):
        read_trace(packed)


def test_a_control_character_inside_a_name_is_read_as_it_is(tmp_path):
    good = trace_file(tmp_path).read_bytes()
    found = read_trace(trace_file(tmp_path, good.replace(b"aten::relu", b"aten::relu\x01")))
    assert found.skipped["op", "op aten::relu\x01"] == 1
    assert only(found, op_class="matmul").seconds == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("damage", "reason", "near"),
    [
        (lambda t: t.replace(b"aten::relu", b'aten::"relu'), "damaged or written", b"aten::relu"),
        (lambda t: t[: t.index(b"aten::relu") + 4], "cut off", b"aten::relu"),
        (lambda t: t[: t.index(b"split_k") - 30], "cut off", b"split_k"),
        (
            lambda t: t.replace(b'{"External id": 2', b'{"External {"name": 1}', 1),
            "damaged",
            b"ReLU",
        ),
        (lambda t: t + t, "more after the end of the trace", b""),
        (lambda t: t.replace(b"}, {", b"} {", 1), "damaged or written by two", b""),
        (lambda _: b"", "a trace begins with", b""),
        (lambda _: b"not json", "a trace begins with", b""),
        (lambda _: b'{"traceEvents": [1]}', "an event must be an object", b""),
    ],
)
def test_a_damaged_trace_is_refused_with_the_byte(tmp_path, damage, reason, near):
    good = trace_file(tmp_path).read_bytes()
    path = trace_file(tmp_path, damage(good))
    with pytest.raises(MeasurementError, match=r"trace\.json: byte \d+: ") as caught:
        read_trace(path)
    assert reason in str(caught.value)
    if near in good and near:
        byte = int(str(caught.value).split("byte ")[1].split(":")[0])
        assert abs(byte - good.index(near)) < 200


def test_damage_far_behind_the_first_chunk_is_placed_right(tmp_path):
    filler = [kernel(1, 1.0, "x" * 1000) for _ in range(4000)]
    text = json.dumps(filler).encode()
    at = text.index(b'"cat"', 3 * CHUNK)
    path = trace_file(tmp_path, text[:at] + b'"' + text[at:])
    with pytest.raises(MeasurementError) as caught:
        read_trace(path)
    byte = int(str(caught.value).split("byte ")[1].split(":")[0])
    assert abs(byte - at) < 20


def test_events_come_one_by_one_and_progress_is_told(tmp_path):
    filler = [kernel(1, 1.0, "ü" * 500) for _ in range(4000)]
    told: list[int] = []
    path = trace_file(tmp_path, json.dumps(filler, ensure_ascii=False).encode())
    assert sum(1 for _ in stream_trace(path, told.append)) == 4000
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size


@pytest.mark.slow
def test_a_trace_of_300_megabytes_is_read_in_bounded_memory(tmp_path):
    import resource
    import subprocess
    import sys

    path = tmp_path / "big.json"
    pair = [op(1, "aten::mm", [[4, 16], [16, 8]], ["float", "float"]), kernel(1, 2.0)]
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        size = number = 0
        while size < 300_000_000:
            number += 1
            for event in pair:
                event["args"]["External id"] = number
            text = ("," if number > 1 else "") + json.dumps(pair)[1:-1]
            size += file.write(text)
        file.write("]}")
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from calibration.importers.kineto import read_trace\n"
        "found = read_trace(Path(sys.argv[1]), 'T4-16GB')\n"
        "print(len(found.records), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    assert resource.RUSAGE_SELF == 0
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    records, kilobytes = map(int, done.stdout.split())
    assert records == number
    assert kilobytes < 2 * 2**20
