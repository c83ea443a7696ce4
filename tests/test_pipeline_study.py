"""The pipeline study: what a cell may spend, what it is named after, what the report says."""

import argparse
import time

import numpy as np
import pytest

from agents.pipelines.env import PipelineTask, random_actions
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.refine import paid
from agents.planners.recorder import Budget
from bench.pipeline_methods import AGENTS, CHAINS, METHODS, SEEDED
from bench.pipeline_study import ROOT, SOURCES, budget_name, cells, code_hash, report
from tests.test_pipeline_planners import layers, space_of
from tests.test_planners import GPU, mesh


def options(**changes: object) -> argparse.Namespace:
    usual = {
        "models": ["two-tower", "vgg-16"], "clusters": ["4xP100-PCIe"], "methods": list(METHODS),
        "seeds": 2, "seconds": 60.0, "evaluations": None,
    }  # fmt: skip
    return argparse.Namespace(**usual | changes)


def test_a_budget_pays_for_every_simulation_and_ends_the_task() -> None:
    space = space_of(layers([1.0, 2.0, 1.0]), mesh(GPU, GPU))
    task = PipelineTask.build(Simulator(nodes=NodeGraph.build(space)))
    budget = Budget(evaluations=5, clock=time.process_time)
    bound = paid(task, budget)
    actions = random_actions(task, np.random.default_rng(0), 4)
    assert len(bound.evaluate(actions).reward) == 4
    assert len(bound.evaluate(actions).reward) == 1
    assert len(bound.evaluate(actions).reward) == 0
    assert budget.used == 5


def test_methods_without_chance_have_one_seed() -> None:
    made = list(cells(options()))
    assert len(set(made)) == len(made)
    assert {seed for *_, method, seed in made if method not in SEEDED} == {0}
    assert {seed for *_, method, seed in made if method in SEEDED} == {0, 1}
    assert set(CHAINS) < set(METHODS)


def test_cells_are_named_after_what_decides_them() -> None:
    assert len({code_hash(name) for name in ("agent", "agent_untaught", "chain")}) == 3
    assert set(SOURCES) == set(METHODS) - set(AGENTS)
    assert all(list(ROOT.glob(name)) for names in SOURCES.values() for name in names)
    assert budget_name(options()) == "60s"
    assert budget_name(options(evaluations=300)) == "300"


def test_the_report_compares_with_pipedream_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "two-tower": {"data_parallel": [8.0], "pipedream": [4.0], "chain": [3.0], "agent": [2.0]},
        "vgg-16": {"data_parallel": [1.0], "pipedream": [2.0], "agent": [0.9, 3.0]},
    }  # fmt: skip
    stored = {
        f"{model}/4xP100-PCIe/{method}/{seed}/60s": {"step_time_s": time, "bound_s": 0.5}
        for model, methods in times.items()
        for method, found in methods.items()
        for seed, time in enumerate(found)
    }
    report(options(), stored)
    out = capsys.readouterr().out
    assert "| two-tower | 4xP100-PCIe | 500.0 | 8000.0 (2.000) | 4000.0 (1.000) |" in out
    # every method may answer copies: 1 s for PipeDream, 0.9 and 1 s for the agent
    agent = next(line for line in out.splitlines() if line.startswith("agent:"))
    assert "4.00 at most; over pipedream" in agent
    assert "chains: median 0.950 of PipeDream's time, 100% of 2 cells at most 1.01" in agent
    assert "branches: beats all chain planners in 1 of 1" in agent
