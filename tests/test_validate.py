"""Validation of shipped profiles: what is scored, what is not, and the command."""

import csv
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from calibration.importers import IMPORTERS
from calibration.pictures import draw
from calibration.predict import op_seconds, predict
from calibration.records import Record, read_records
from calibration.splits import errors
from calibration.validate import validate
from simcore.cli import main
from simcore.curves import Curve, CurveKey, CurveTable
from simcore.errors import MeasurementError, UsageError
from simcore.op_curves import Query, op_costs
from simcore.profile import parse_profile
from simcore.profile_store import find_file, load_profile
from simcore.signature import Phase, Signature

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


def write(folder, name, header, *rows):
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *(row.split() for row in rows)])


@pytest.fixture
def small(tmp_path):
    """A folder with a few rows of three sources."""
    folder = tmp_path / "data"
    write(
        folder / "aiconfigurator", "gemm_bf16_a100_sxm.csv", "m n k latency_ms",
        "1024 1024 1024 0.02", "1024 1024 1024 0.04", "4096 4096 4096 0.6",
    )  # fmt: skip
    write(
        folder / "aiconfigurator", "nccl_half_a100_sxm.csv",
        "collective num_gpus elements bytes latency_ms", "all_reduce 8 524288 1048576 0.05",
    )  # fmt: skip
    write(
        folder / "vtrain", "allreduce_a100_8gpu.csv",
        "size_bytes out_of_place_ns out_of_place_busbw_gb_s in_place_ns in_place_busbw_gb_s",
        "1048576 92790 19.78 92150 19.91",
    )  # fmt: skip
    write(
        folder / "sailor", "layers_OPT-30_A100-40.csv",
        "model gpu micro_batch tp layer forward_s backward_s update_s",
        "OPT-30 A100-40 1 1 1 0.14 0.29 0.01",
    )  # fmt: skip
    return folder


def record(**changes):
    fields = {
        "kind": "op", "device": "A100-SXM4-80GB", "seconds": 1e-3, "contains": "kernel",
        "how": "made up", "source": "tests/made_up", "op_class": "matmul", "dtype": "bf16",
        "dims": {"m": 512, "n": 512, "k": 512}, "phase": "F", "traffic": 3 * 2 * 512**2,
    }  # fmt: skip
    return Record(**(fields | changes))


def test_errors_are_fractions_of_what_was_measured_and_bias_is_signed():
    found = errors(np.array([1.0, 3.0, 2.0, 2.0]), np.full(4, 2.0))
    assert found.median == pytest.approx(0.25)
    assert found.mean == pytest.approx(0.25)
    assert found.bias == pytest.approx(0.0)
    assert found.p90 == pytest.approx(0.5)
    assert np.isnan(errors(np.zeros(0), np.zeros(0)).median)


def test_an_op_is_predicted_as_the_simulator_costs_it_and_launched_where_it_was():
    profile = load_profile("A100-SXM4-80GB")
    signature = Signature(
        "matmul", "bf16", (("m", 512, 0), ("n", 512, 0), ("k", 512, 0)), 1.0, (3 * 2 * 512**2, 0)
    )
    kernel = op_costs(profile, [Query(signature, "", Phase.F)], 1).seconds[0]
    alone, launched = op_seconds(profile, [record(), record(contains="kernel+launch")])
    assert alone == kernel
    assert launched == pytest.approx(kernel + profile.launch_overhead)


def test_a_loop_of_calls_cannot_be_shorter_than_its_host():
    tiny = record(
        device="V100-SXM2-32GB", contains="kernel+launch+sync", source="aceso_v100/ops_gpt.csv",
        dims={"m": 1, "n": 1, "k": 1}, traffic=6,
    )  # fmt: skip
    (seconds,) = op_seconds(load_profile(tiny.device), [tiny])
    assert seconds == IMPORTERS["aceso_v100"].floor["F"]


@pytest.mark.parametrize("source", ["aceso_v100", "deepbench", "sailor"])
def test_in_a_loop_of_calls_the_host_launches_beside_the_kernels(source):
    profile = load_profile("V100-SXM2-32GB")
    large = record(
        device=profile.kind, contains="kernel+launch+sync", source=f"{source}/x.csv", dtype="fp16",
        dims={"m": 4096, "n": 4096, "k": 4096},
    )  # fmt: skip
    (kernel,) = op_seconds(profile, [msgspec.structs.replace(large, contains="kernel")])
    assert op_seconds(profile, [large]) == [kernel]


def test_a_curve_of_the_machine_goes_before_that_of_its_kind():
    label = "1 node, A100-SXM4-80GB, NVLink3-NVSwitch"
    sizes = np.array([1.0, 1e9])
    curves = {
        CurveKey("all_reduce", "auto", 8, label): Curve(sizes, np.array([2.0, 3.0])),
        CurveKey("all_reduce", "auto", 8, f"{label}; here"): Curve(sizes, np.array([5.0, 6.0])),
    }
    rows = [
        record(
            kind="collective", collective="all_reduce", group=8, bytes=1, algorithm="auto",
            topology=name, op_class="", dtype="", dims={}, phase="",
        )
        for name in (f"{label}; here", f"{label}; there", "1 node, T4-16GB, PCIe3x16")
    ]  # fmt: skip
    here, there, nowhere = predict(rows, CurveTable(curves))
    assert (here, there) == (pytest.approx(5.0), pytest.approx(2.0))
    assert nowhere == "no curve of all_reduce for 1 node, T4-16GB, PCIe3x16"


def test_what_cannot_be_predicted_says_why():
    rows = [record(device="Abacus"), record(dims={}, op_class="other", traffic=0)]
    assert predict(rows, CurveTable({})) == [
        "no profile of Abacus", "a whole layer or an op without dims",
    ]  # fmt: skip


def test_a_folder_is_scored_source_by_source(small):
    found = validate(small)
    assert set(found.scores) == {
        "ops/aiconfigurator", "collectives/aiconfigurator", "collectives/vtrain", "ops/sailor",
    }  # fmt: skip
    assert set(found.absent) == set(IMPORTERS) - {"aiconfigurator", "vtrain", "sailor"}
    result = found.result()["sources"]
    ops = result["ops/aiconfigurator"]
    assert (ops["cases"], ops["distinct"], ops["coverage"]) == (3, 2, 1.0)
    assert ops["classes"]["matmul bf16"]["cases"] == 3
    assert ops["devices"]["A100-SXM4-80GB"]["median"] == ops["median"]
    layers = result["ops/sailor"]
    assert (layers["cases"], layers["coverage"], layers["median"]) == (0, 0.0, None)
    assert layers["not_expressible"] == {"a whole layer or an op without dims": 3}
    assert result["collectives/vtrain"]["median"] < 0.05


def test_the_error_of_a_case_is_that_of_its_row(small):
    found = validate(small).scores["ops/aiconfigurator"]
    first, second, _ = found.predicted
    assert first == second
    assert found.measured[:2] == [2e-5, 4e-5]
    expected = np.abs(np.array(found.predicted) / np.array(found.measured) - 1)
    assert found.result()["mean"] == pytest.approx(expected.mean())


def test_an_unknown_column_is_refused_with_its_file(small):
    write(small / "vtrain", "allreduce_a100_4gpu.csv", "size_bytes colour", "1 red")
    with pytest.raises(MeasurementError, match=r"vtrain/allreduce_a100_4gpu\.csv: .*'colour'"):
        validate(small)


def test_a_folder_that_is_absent_is_refused(tmp_path):
    with pytest.raises(MeasurementError, match="no such folder"):
        validate(tmp_path / "absent")


def test_the_command_prints_one_object(small, capsys):
    assert main(["calibrate", "validate", "--data", str(small), "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["sources"]["collectives/vtrain"]["cases"] == 1
    assert "bigscience_jeanzay" in data["absent"]
    assert "nothing of aceso_v100" in captured.err


def test_the_command_shows_a_table(small, capsys):
    assert main(["calibrate", "validate", "--data", str(small)]) == 0
    assert "collectives/vtrain" in capsys.readouterr().out


def test_a_folder_without_anything_known_fails(tmp_path, capsys):
    assert main(["calibrate", "validate", "--data", str(tmp_path)]) == 1
    capsys.readouterr()


def test_pictures_need_matplotlib_and_say_so(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"placewright\[plot\]"):
        draw(validate(small), tmp_path / "pictures")


def test_a_picture_is_drawn_for_each_source(small, tmp_path):
    pytest.importorskip("matplotlib")
    paths = draw(validate(small), tmp_path / "pictures")
    assert [path.name for path in paths] == [
        "collectives-aiconfigurator.png", "collectives-vtrain.png", "ops-aiconfigurator.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_an_import_that_finds_nothing_keeps_the_file(tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    out.write_text("what was there\n")
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    trace = str(tmp_path / "trace.json")
    assert main(["calibrate", "import", "kineto", trace, "--out", str(out)]) == 1
    assert "found no records" in capsys.readouterr().err
    assert out.read_text() == "what was there\n"


def test_import_writes_records(small, tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    folder = str(small / "aiconfigurator")
    assert main(["calibrate", "import", "aiconfigurator", folder, "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["records"] == 4
    assert data["sources"]["aiconfigurator"]["records"] == {"op": 3, "link": 0, "collective": 1}
    assert len(list(read_records(out))) == 4
    assert main(["calibrate", "import", "--all", str(small), "--merge", "--out", str(out)]) == 0
    assert len(list(read_records(out))) == 3 + 1 + 3
    capsys.readouterr()


def test_fit_reads_records_and_writes_curves(tmp_path, capsys):
    folder, out = tmp_path / "vtrain", tmp_path / "curves"
    rows = [f"{size} {50000 + size // 100} 1 1 1" for size in range(2**20, 2**26, 2**21)]
    write(
        folder, "allreduce_a100_8gpu.csv",
        "size_bytes out_of_place_ns out_of_place_busbw_gb_s in_place_ns in_place_busbw_gb_s", *rows,
    )  # fmt: skip
    records = tmp_path / "records.jsonl"
    assert main(["calibrate", "import", "vtrain", str(folder), "--out", str(records)]) == 0
    capsys.readouterr()
    assert main(["calibrate", "fit", str(records), "--out", str(out), "--json"]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["curves"]
    assert (curve["num_members"], curve["num_samples"]) == (8, len(rows))
    assert curve["held_out_sizes"]["median"] < 0.05
    assert len(list(out.glob("*.json"))) == 1


def test_fit_replaces_the_op_curves_of_given_profiles(tmp_path, capsys):
    rows = [f"bmm,{b},{m},{m},{m},,{b * m**3 * 2 / 4e9 + 0.005}" for b in (4, 16) for m in
            range(256, 1280, 64)]  # fmt: skip
    folder = tmp_path / "data" / "neusight"
    folder.mkdir(parents=True)
    (folder / "ops_fp32_Tesla_T4.csv").write_text("\n".join(["op,B,M,N,K,H,latency_ms", *rows]))
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    shipped = find_file("devices", "T4-16GB.json").read_bytes()
    (profiles / "T4-16GB.json").write_bytes(shipped)
    arguments = ["--data", str(tmp_path / "data"), "--profiles", str(profiles), "--json"]
    assert main(["calibrate", "fit", *arguments]) == 0
    (fitted,) = json.loads(capsys.readouterr().out)["ops"]
    assert (fitted["device"], fitted["op_class"]) == ("T4-16GB", "batched_matmul")
    profile = parse_profile((profiles / "T4-16GB.json").read_bytes(), "T4-16GB.json")
    made = record(device="T4-16GB", op_class="batched_matmul", dtype="fp32", traffic=0,
                  dims={"b": 8, "m": 640, "n": 640, "k": 640})  # fmt: skip
    (seconds,) = op_seconds(profile, [made])
    assert seconds == pytest.approx(8 * 640**3 * 2 / 4e12 + 5e-6, rel=0.25)


def test_collect_has_its_options_though_help_loads_nothing(capsys):
    assert main(["calibrate", "collect", "--minutes", "0"]) == 2
    assert "--minutes must be positive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", "collect", "--help"])
    assert "--models" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["import"],
        ["import", "vtrain"],
        ["import", "vtrian", "."],
        ["import", "vtrain", "absent-folder"],
        ["import", "--all", "absent-folder"],
        ["fit"],
        ["nothing"],
    ],
)
def test_wrong_usage_is_status_2(arguments, capsys):
    assert main(["calibrate", *arguments]) == 2
    capsys.readouterr()


@pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not at ../shared/data")
@pytest.mark.slow
def test_collectives_inside_a_node_are_within_the_target_on_the_public_data():
    sources = validate(DATA).result()["sources"]
    for name in ("aiconfigurator", "vtrain", "nnscaler_mi200", "vidur", "deepbench"):
        assert sources[f"collectives/{name}"]["median"] < 0.08, name
