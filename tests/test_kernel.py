"""The kernel's promises that no result shows: records, cache folder, memory, forms."""

import heapq
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from simcore import kernel
from simcore.kernel import compiled, heap, records
from simcore.kernel.records import Count, Status, make_outcome, make_records, make_scratch
from simcore.lower import Problem
from simcore.plan import Settings
from simcore.simulation import run_placement, simulate_batch
from tests.strategies import (
    ALL_SETTINGS,
    Network,
    build_cluster,
    build_cost,
    compiled_problem,
    draw_busy_case,
    draw_placement,
    random_case,
    seeded,
)

DTYPES = {
    name: value for name, value in vars(records).items() if isinstance(value, np.dtype)
}  # fmt: skip
SOURCES = sorted(Path(compiled.__file__).parent.glob("*.py"))


# records


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_no_field_hides_behind_an_attribute_of_numpys_scalars(name):
    fields = DTYPES[name].names
    assert fields
    for field in fields:
        for scalar in (np.record, np.void, np.generic):
            assert not hasattr(scalar, field), f"{name}.{field}"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_field_can_be_set_and_read_as_an_attribute_of_a_record(name):
    table = make_records(2, DTYPES[name])
    for number, field in enumerate(DTYPES[name].names):
        setattr(table[1], field, number + 1)
    for number, field in enumerate(DTYPES[name].names):
        assert getattr(table[1], field) == number + 1
        assert table[field].tolist() == [0, number + 1]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_fields_are_eight_bytes_wide_so_that_records_are_aligned(name):
    dtype = DTYPES[name]
    assert {dtype[field].itemsize for field in dtype.names} == {8}
    assert dtype.itemsize == 8 * len(dtype.names)


def test_status_numbers_are_what_agents_may_rely_on():
    assert [(status.name, status.value) for status in Status] == [
        ("OK", 0),
        ("OUT_OF_MEMORY", 1),
        ("ILLEGAL_DEVICE", 2),
        ("SPLIT_UNIT", 3),
        ("UNREACHABLE", 4),
        ("DEADLOCK", 5),
    ]


def test_outcomes_begin_as_illegal_and_empty():
    out = make_outcome(3, 2)
    assert np.isinf(out.step_time).all()
    assert out.allocated.shape == out.used.shape == (3, 2)
    assert out.culprit.tolist() == [-1, -1, -1]
    assert not out.allocated.any()


# cache


def test_the_cache_folder_is_named_by_the_sources(tmp_path, monkeypatch):
    for source in SOURCES:
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    seen = {compiled.cache_folder().name}
    assert seen == {compiled.cache_folder().name}
    for source in SOURCES:  # an edit in any file
        path = tmp_path / source.name
        path.write_bytes(path.read_bytes() + b"# edited\n")
        seen.add(compiled.cache_folder().name)
    (tmp_path / "new.py").touch()
    seen.add(compiled.cache_folder().name)
    (tmp_path / "new.py").rename(tmp_path / "renamed.py")
    seen.add(compiled.cache_folder().name)
    assert len(seen) == len(SOURCES) + 3


def test_the_cache_folder_does_not_depend_on_where_the_sources_lie(tmp_path, monkeypatch):
    before = compiled.cache_folder().name
    for source in SOURCES:
        shutil.copy(source, tmp_path)
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    assert compiled.cache_folder().name == before


def test_the_cache_goes_into_numbas_own_folder_where_one_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled.cache_folder().parent == tmp_path


def test_the_cache_goes_to_the_temporary_folder_where_the_package_is_read_only(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled.os, "access", lambda *_: False)
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiled.cache_folder().parent == tmp_path / f"placewright-{os.getuid()}"


def test_numbas_cache_folder_is_set_inside_the_block_only(monkeypatch):
    config = compiled.numba.config
    monkeypatch.setattr(config, "CACHE_DIR", "before")
    inside = str(compiled.cache_folder())
    with compiled.keyed_cache():
        assert inside == config.CACHE_DIR
    assert config.CACHE_DIR == "before"


def test_numbas_cache_folder_is_restored_after_an_error(monkeypatch):
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", "before")
    with suppress(ZeroDivisionError), compiled.keyed_cache():
        raise ZeroDivisionError
    assert compiled.numba.config.CACHE_DIR == "before"


def test_importing_the_kernel_compiles_nothing_and_imports_no_torch():
    script = (
        "import sys, simcore.kernel as k; assert 'torch' not in sys.modules; "
        "assert not getattr(k.run_events, 'signatures', [])"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# heaps


def empty_scratch(num_events: int) -> records.Scratch:
    rng = np.random.default_rng(1)
    scratch = make_scratch(compiled_problem(random_case(rng)).tables)
    return scratch._replace(
        heap=make_records(num_events, records.EVENT), line=make_records(20, records.EVENT)
    )


@compiled.compiled_entry
def push_event(scratch, time, item):
    heap.push_event(scratch, time, item)


@compiled.compiled_entry
def pop_event(scratch):
    return heap.pop_event(scratch)


def form(entry, function, request_python: bool):
    """A kernel function as compiled code (through an entry) or as Python."""
    return getattr(function, "py_func", function) if request_python else entry


@pytest.mark.parametrize("python", [False, True], ids=["compiled", "python"])
def test_events_come_out_by_time(python):
    push = form(push_event, heap.push_event, python)
    pop = form(pop_event, heap.pop_event, python)
    rng = np.random.default_rng(5)
    scratch, expected = empty_scratch(200), []
    for item in range(200):
        time = float(rng.integers(0, 40))
        push(scratch, time, item)
        heapq.heappush(expected, time)
        if rng.random() < 0.4:
            assert scratch.heap[0].time == heapq.heappop(expected)
            pop(scratch)
    while scratch.counts[int(Count.HEAP)]:
        assert scratch.heap[0].time == heapq.heappop(expected)
        pop(scratch)
    assert not expected


@compiled.compiled_entry
def line_up(scratch, time, item):
    heap.line_up(scratch, time, item)


@compiled.compiled_entry
def next_time(scratch):
    return heap.next_time(scratch)


@compiled.compiled_entry
def take_event(scratch, now):
    return heap.take_event(scratch, now)


def in_python(monkeypatch):
    """Lets the functions of the heap call each other as Python."""
    for name in ("push_event", "pop_event", "line_up", "next_time", "take_event"):
        function = getattr(heap, name)
        monkeypatch.setattr(heap, name, getattr(function, "py_func", function))


@pytest.mark.parametrize("python", [False, True], ids=["compiled", "python"])
def test_events_in_line_and_in_the_heap_come_out_by_time(python, monkeypatch):
    if python:
        in_python(monkeypatch)
    adds = [form(push_event, heap.push_event, python), form(line_up, heap.line_up, python)]
    following = form(next_time, heap.next_time, python)
    take = form(take_event, heap.take_event, python)
    rng = np.random.default_rng(6)
    scratch, expected, now = empty_scratch(300), [], 0.0
    for item in range(300):
        time = now + float(rng.integers(0, 6))
        adds[int(rng.random() < 0.8)](scratch, time, item)
        heapq.heappush(expected, time)
        if rng.random() < 0.6:
            now = following(scratch)
            assert now == expected[0]
            while take(scratch, now) != records.NONE:
                assert heapq.heappop(expected) == now
    while expected:
        now = following(scratch)
        assert take(scratch, now) != records.NONE
        assert heapq.heappop(expected) == now
    assert following(scratch) == np.inf


# whole runs


def spread_cases() -> list[tuple[list[float], list[int]]]:
    """(step times, allocated bytes) of random problems, their units spread over the devices."""
    found, drawn = [], []
    for index in range(len(ALL_SETTINGS)):
        case = random_case(np.random.default_rng([29, index]))
        drawn.append(case._replace(settings=ALL_SETTINGS[index]))
        contention = ("none", "port", "ordered", "fifo", "fair")[index % 5]
        drawn.append(draw_busy_case(seeded(np.random.default_rng([31, index])), contention))
    for case in drawn:
        problem = compiled_problem(case)
        units = np.arange(case.graph.num_units)
        shifted = [(units + k) % len(case.network.kinds) for k in range(9)]
        batch = simulate_batch(problem, problem.expand(np.stack(shifted)))
        found.append((batch.step_time.tolist(), batch.allocated.ravel().tolist()))
    return found


def test_plain_python_gives_the_same_and_never_leaves_an_array():
    """Without the JIT an index beyond an array raises; compiled code would read on."""
    script = "from tests.test_kernel import spread_cases; print(spread_cases())"
    plain = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert plain.stdout == f"{spread_cases()}\n"


def test_a_scratch_carries_nothing_over_to_the_next_placement():
    rng = np.random.default_rng(17)
    for options in ALL_SETTINGS:
        case = random_case(rng)._replace(settings=options)
        problem, draws = compiled_problem(case), seeded(rng)
        num_devices = len(case.network.kinds)
        plans = np.stack([draw_placement(draws, case.graph, num_devices) for _ in range(12)])
        together = simulate_batch(problem, plans, threads=1)
        alone = [simulate_batch(problem, plan[None], threads=1) for plan in plans]
        assert together.step_time.tolist() == [float(one.step_time[0]) for one in alone]
        assert together.allocated.tolist() == [one.allocated[0].tolist() for one in alone]


@pytest.mark.parametrize("num_devices", [63, 64, 65])
@pytest.mark.parametrize("options", ALL_SETTINGS, ids=lambda s: f"{s.order}-{s.contention}")
def test_many_devices_are_a_batch_like_any_other(options: Settings, num_devices: int):
    case = random_case(np.random.default_rng(23))
    links = tuple((f"d{device}", "s0", 1.0, 1.0) for device in range(num_devices))
    kinds = case.network.kinds[:1]
    job = case.job
    num_ops = case.graph.num_ops
    cost = build_cost([[1.0]] * num_ops, [[0.0]] * num_ops, kinds, job)
    cluster = build_cluster(Network(kinds * num_devices, False, 1, links))
    problem = Problem.build(case.graph, cluster, job, options, cost=cost)
    units = np.random.default_rng(2).integers(0, num_devices, (20, case.graph.num_units))
    batch = simulate_batch(problem, problem.expand(units))
    assert (batch.step_time >= 1.0).all()
    assert (batch.step_time <= num_ops + 1e3).all()
    for plan in (0, 19):
        run = run_placement(problem, problem.expand(units[plan]))
        assert run.step_time == batch.step_time[plan]
        assert run.allocated.tolist() == batch.allocated[plan].tolist()


def test_the_kernel_names_everything_that_its_users_need():
    assert sorted(kernel.__all__) == sorted(set(kernel.__all__))
    for name in kernel.__all__:
        assert hasattr(kernel, name)
