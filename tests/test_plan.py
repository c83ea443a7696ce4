"""Plan files: what is written is read back, and what is wrong is named."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import (
    MAX_FILE_BYTES,
    Buckets,
    Constraints,
    Plan,
    Predicted,
    Provenance,
    Settings,
    Stage,
)
from simcore.simulation import simulate

V100 = "V100-SXM2-16GB"
GRAPH = OpGraph.from_edges(
    [("a", 1.0), ("b", 2.0), ("c", 3.0)],
    [("a", "b", 10), ("b", "c", 20)],
    measured_on=V100,
    batch=8,
)
CLUSTER = Cluster.preset("4xV100-NVLink")
JOB = Job(batch=8)
PLACED = Plan.from_placement(GRAPH, CLUSTER, JOB, [0, 1, 1])
COPIED = Plan.data_parallel(GRAPH, CLUSTER, JOB, ["gpu0", "gpu3"])


def changed(plan: Plan = PLACED, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def with_stage(plan: Plan = PLACED, **fields: Any) -> Plan:
    return changed(plan, stages=(msgspec.structs.replace(plan.stages[0], **fields),))


def violations(plan: Plan) -> list[str]:
    return plan.validate(GRAPH, CLUSTER, JOB)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    return path


# making


def test_a_plan_from_a_placement_names_units_and_devices():
    assert PLACED.stages == (
        Stage(devices=("gpu0", "gpu1"), placement={"a": "gpu0", "b": "gpu1", "c": "gpu1"}),
    )
    assert PLACED.unit_devices(GRAPH, CLUSTER).tolist() == [0, 1, 1]
    assert PLACED.data_parallel_degree == 1
    assert violations(PLACED) == []


def test_a_data_parallel_plan_has_a_mesh_over_its_devices_in_their_order():
    assert COPIED.stages == (Stage(devices=("gpu0", "gpu3"), mesh={"dp": 2}),)
    assert COPIED.data_parallel_degree == 2
    assert COPIED.settings == Settings(host="per_rank")
    assert violations(COPIED) == []


def test_a_plan_with_a_mesh_has_no_device_of_a_unit():
    with pytest.raises(PlanError, match="a mesh, not a placement"):
        COPIED.unit_devices(GRAPH, CLUSTER)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ([0, 1], "placement of 2 units for a graph of 3 units"),
        ([0, 9, 0], "unit 'b': no device number 9"),
        (np.array([0, 0, -1]), "unit 'c': no device number -1"),
    ],
)
def test_a_placement_that_does_not_match_is_refused(placement, reason):
    with pytest.raises(PlanError, match=reason):
        Plan.from_placement(GRAPH, CLUSTER, JOB, placement)


# files


def full_plan() -> Plan:
    return changed(
        job_name="bert",
        priorities=(3, 1, -2),
        settings=Settings(order="ready", host="per_rank", launch="graph", contention="port"),
        constraints=Constraints(pins={"a": "gpu0"}, exclude=("gpu2",), reserve_memory_bytes=2**31),
        predicted=Predicted(
            step_time_s=0.1 + 0.2,
            throughput_samples_per_s=None,
            peak_memory_bytes={"gpu0": 2**40 + 1},
            lower_bound_s=1e-300,
            simulator="0.1.0",
            profiles={V100: "0123456789abcdef"},
        ),
        provenance=Provenance(
            strategy="heft",
            seed=7,
            evaluations=12,
            seconds=1.5,
            budget_s=60.0,
            baselines={"single": None, "round_robin": 2.0},
            baseline_notes={"single": "does not fit"},
        ),
        semantics=("ünïcode \x01 \"quoted\"",),
    )  # fmt: skip


@pytest.mark.parametrize("plan", [PLACED, COPIED, full_plan()], ids=["placed", "copied", "full"])
def test_a_plan_file_gives_the_plan_back(tmp_path, plan):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_saving_twice_gives_the_same_bytes_and_leaves_no_other_file(tmp_path):
    for name in ("one.json", "two.json", "two.json"):
        full_plan().save(tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["one.json", "two.json"]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLACED.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PlanError, match=r"plan\.json: cannot write the plan: No space left"):
        COPIED.save(path)
    assert Plan.load(path) == PLACED
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_is_saved_through_a_symbolic_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real" / "plan.json")
    PLACED.save(link)
    assert link.is_symlink()
    assert Plan.load(tmp_path / "real" / "plan.json") == PLACED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/plan.json", "No such file"),
        ("file/plan.json", "Not a directory"),
        ("folder", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_a_plan_that_cannot_be_written_says_why(tmp_path, name, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match=f"cannot write the plan: .*{reason}"):
        PLACED.save(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing.json", "No such file"), ("", "Is a directory"), ("a\0b", "null")],
)
def test_a_plan_that_cannot_be_read_says_why(tmp_path, name, reason):
    with pytest.raises(PlanError, match=f"cannot read the plan: .*{reason}"):
        Plan.load(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe{", b"garbage", b"\x00" * 100, b"null", b"3", b"{}x", b"[" * 100_000],
)
def test_garbage_is_not_a_plan(tmp_path, content):
    with pytest.raises(PlanError, match=r"plan\.json: not a plan file"):
        Plan.load(written(tmp_path, content))


def test_an_object_of_no_format_or_another_one_is_refused_by_its_format(tmp_path):
    with pytest.raises(PlanError, match="format None, expected 'placewright-plan/1'"):
        Plan.load(written(tmp_path, b"{}"))
    newer = msgspec.to_builtins(PLACED) | {"format": "placewright-plan/2", "sharding": {}}
    with pytest.raises(PlanError, match=r"plan\.json: format 'placewright-plan/2', expected"):
        Plan.load(written(tmp_path, msgspec.json.encode(newer)))


def test_a_plan_cut_off_anywhere_is_refused(tmp_path):
    PLACED.save(tmp_path / "whole.json")
    content = (tmp_path / "whole.json").read_bytes().rstrip()
    for length in range(len(content)):
        with pytest.raises(PlanError, match="not a plan file"):
            Plan.load(written(tmp_path, content[:length]))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = written(tmp_path, b"{")
    os.truncate(path, MAX_FILE_BYTES + 1)  # a hole: it takes no room
    with pytest.raises(PlanError, match="larger than 1 GiB"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        (("new",), 1, "unknown field `new`"),
        (("stages", 0, "units"), "all", r"unknown field `units` - at `\$.stages"),
        (("stages", 0, "recompute"), "some", "Invalid enum value 'some'"),
        (("settings", "speed"), 1, r"unknown field `speed` - at `\$.settings`"),
        (("constraints", "pin"), {}, "unknown field `pin`"),
        (("job", "batch_size"), 1, "unknown field `batch_size`"),
        (("graph", "file"), "x", "unknown field `file`"),
        (("job", "batch"), -3, "batch must be between 1"),
        (("job", "batch"), "8", "Expected `int"),
        (("settings", "contention"), "magic", "Invalid enum value 'magic'"),
        (("stages",), {}, "Expected `array`"),
        (("microbatches",), 1.5, "Expected `int`"),
        (("stages", 0, "placement", "a"), 3, "Expected `str`"),
        (("cluster", "hash"), None, "Expected `str`"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, where, value, reason):
    raw: Any = msgspec.to_builtins(PLACED)
    inner = raw
    for key in where[:-1]:
        if isinstance(inner[key], tuple):
            inner[key] = list(inner[key])
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(PlanError, match=rf"plan\.json: not a plan file: .*{reason}"):
        Plan.load(written(tmp_path, msgspec.json.encode(raw)))


@given(st.dictionaries(st.text(), st.text()), st.lists(st.integers(-(2**62), 2**62)))
def test_any_names_and_numbers_survive_the_file(tmp_path_factory, pins, priorities):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = changed(constraints=Constraints(pins=pins), priorities=tuple(priorities))
    plan.save(path)
    assert Plan.load(path) == plan


# validation


def test_a_plan_for_another_graph_cluster_or_job_says_which():
    other_graph = OpGraph.from_edges(
        [("a", 1.0), ("b", 2.0), ("c", 4.0)], [("a", "b", 10), ("b", "c", 20)], measured_on=V100
    )
    (graph,) = PLACED.validate(other_graph, CLUSTER, JOB)
    assert graph.startswith(f"plan is for graph 'graph' ({GRAPH.content_hash()}), not for this one")
    (cluster,) = PLACED.validate(GRAPH, Cluster.preset("8xV100-NVLink"), JOB)
    assert cluster.startswith("plan is for cluster '4xV100-NVLink'")
    (job,) = PLACED.validate(GRAPH, CLUSTER, Job(batch=16))
    assert job.startswith("plan is for job 'job'")
    assert len(PLACED.validate(other_graph, Cluster.preset("8xV100-NVLink"), Job(batch=16))) == 3


def test_a_job_that_was_changed_in_the_file_is_refused():
    other = changed(job=Job(batch=8, optimizer="sgd"))
    (job,) = other.validate(GRAPH, CLUSTER, other.job)
    assert job == f"plan was made for another job ({JOB.content_hash()}) than the one it states"


def test_names_do_not_decide_what_a_plan_is_for():
    refs = {key: getattr(PLACED, key) for key in ("graph", "cluster")}
    renamed = {key: msgspec.structs.replace(ref, name="other") for key, ref in refs.items()}
    assert violations(changed(**renamed)) == []


def test_a_plan_without_stages_or_with_two_of_one_name_is_refused_with_the_reason():
    assert violations(changed(stages=())) == ["plan has no stages"]
    with pytest.raises(PlanError, match="plan has no stages"):
        simulate(GRAPH, CLUSTER, JOB, changed(stages=()))
    copies = tuple(
        msgspec.structs.replace(s, mesh={"dp": 2}, placement=None) for s in PLACED.stages
    )
    found = violations(changed(stages=copies * 2, schedule="gpipe"))
    assert found == ["two stages are named 'stage0'"]


def test_stages_of_a_pipeline_have_meshes_and_a_schedule():
    first = Stage(devices=("gpu0",), name="s0", placement={"a": "gpu0"})
    second = Stage(devices=("gpu1",), name="s1", ops=("b", "c"), mesh={"dp": 1})
    assert violations(changed(stages=(first, second), schedule="1f1b"))[0] == (
        "stage 's0': a stage of a pipeline has a mesh, no placement"
    )
    assert violations(changed(stages=(second,) * 2))[0] == "plan has 2 stages, but no schedule"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"microbatches": 4}, "plan has microbatches or a sharded optimizer, but no schedule"),
        ({"microbatches": 0}, "plan has 0 microbatches"),
        (
            {"optimizer_sharding": 1},
            "plan has microbatches or a sharded optimizer, but no schedule",
        ),
        (
            {"schedule": "gpipe"},
            "stage 'stage0': a stage of a pipeline has a mesh, no placement",
        ),
        (
            {"semantics": ("async",)},
            "plan has semantics 'async'; known: asynchronous updates, batch norm per microbatch",
        ),
        ({"buckets": Buckets(num_bytes=-1)}, "plan has buckets of -1 bytes"),
        ({"buckets": Buckets(algorithm="star")}, "plan has no all-reduce by 'star'"),
        ({"priorities": (1, 2)}, "plan has 2 priorities for 3 ops"),
        ({"priorities": (1, 2**70, 3)}, "plan has a priority beyond 2**62"),
        (
            {"constraints": Constraints(reserve_memory_bytes=-1)},
            "plan has reserve_memory_bytes -1; it must be between 0 and 2**62",
        ),
        (
            {"constraints": Constraints(reserve_memory_bytes=2**70)},
            f"plan has reserve_memory_bytes {2**70}; it must be between 0 and 2**62",
        ),
    ],
)
def test_what_this_version_cannot_run_is_refused(fields, found):
    assert violations(changed(**fields)) == [found]


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        ({"a": "gpu0", "b": "gpu1"}, ["placement: op 'c' has no device"]),
        ({}, [f"placement: op {op!r} has no device" for op in "abc"]),
        (
            {"a": "gpu0", "b": "gpu1", "c": "gpu1", "d": "gpu0"},
            ["placement: no op 'd' in the graph"],
        ),
        (
            {"a": "gpu0", "b": "gpu1", "c": "gpu2"},
            ["placement: op 'c' is on 'gpu2', which the stage does not list"],
        ),
        (
            {"a": "gpu0", "b": "gpu1", "c": "tpu"},
            ["placement: op 'c' is on 'tpu', which the stage does not list"],
        ),
    ],
)
def test_a_placement_that_breaks_a_rule_names_op_and_device(placement, found):
    assert violations(with_stage(placement=placement)) == found


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (with_stage(devices=("gpu0", "gpu1", "tpu")), "stage 'stage0': no device 'tpu'"),
        (
            with_stage(devices=("gpu0", "gpu1", "gpu1")),
            "stage 'stage0': a device is listed twice",
        ),
        (with_stage(placement=None), "stage 'stage0': needs either a mesh or a placement"),
        (
            with_stage(mesh={"dp": 2}),
            "stage 'stage0': needs either a mesh or a placement",
        ),
        (
            with_stage(COPIED, devices=("gpu0", "gpu1", "gpu2")),
            "stage 'stage0': mesh {'dp': 2} does not cover its 3 devices",
        ),
        (
            with_stage(COPIED, mesh={"tp": 2}),
            "stage 'stage0': axis 'tp' splits nothing",
        ),
        (
            with_stage(COPIED, mesh={"dp": 1, "tp": 2}),
            "stage 'stage0': axis 'tp' splits nothing",
        ),
        (with_stage(COPIED, devices=(), mesh={"dp": 0}), "stage 'stage0': lists no devices"),
    ],
)
def test_a_stage_that_breaks_a_rule_is_named(plan, found):
    assert violations(plan) == [found]
    with pytest.raises(PlanError) as error:
        simulate(GRAPH, CLUSTER, JOB, plan)
    assert str(error.value) == found


def test_simulate_names_the_first_violation_and_counts_the_others():
    with pytest.raises(PlanError, match=r"op 'a' has no device \(and 2 more\)"):
        simulate(GRAPH, CLUSTER, JOB, with_stage(placement={}))
