"""PPO: its parts by hand, resumption bit for bit, interruption, files; the toy's optimum."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from agents import checkpoint
from agents.command_line import best_in_full, check_options
from agents.command_line import run as run_command
from agents.diagnostics import FILE, Diagnostics, Journal
from agents.finalists import Finalists
from agents.planners.policy_gradient import PolicyGradient
from agents.planners.recorder import Budget, Recorder
from agents.policy import sample
from agents.ppo import (
    Config,
    Learner,
    Policy,
    Samples,
    TrainResult,
    advantages,
    rollout,
    train,
    update,
)
from agents.task import TOY_OPTIMUM, Evaluation, PlacementTask, toy
from simcore.errors import PlacewrightError
from tests.conftest import ROOT
from tests.learning import meets_optimum

EVALUATIONS = 8192  # random placements find the toy's optimum within as many once in four times
SHORT = Config(evaluations=20 * 16, placements=16, checkpoint_every=10)


def evaluation(*rewards: float, fits: tuple[bool, ...] = ()) -> Evaluation:
    count = len(rewards)
    flags = np.array(fits or (True,) * count)
    return Evaluation(
        np.array(rewards),
        flags,
        np.exp(-np.array(rewards)),
        np.where(flags, 0, 1).astype(np.int64),
        np.zeros(count, np.uint8),
    )


def samples(actions, found: Evaluation) -> Samples:
    """Placements of groups with two devices, sampled uniformly and with no values."""
    shape = np.array(actions).shape
    return Samples(torch.tensor(actions), torch.zeros(shape), math.log(2), found, np.array(actions))


def new(config: Config = SHORT, shape: tuple[int, int] = (2, 2)) -> Learner:
    class Env:
        allowed = np.ones(shape, np.bool_)

    return Learner.new(config, Env(), None)


def recorded(result: TrainResult) -> list[dict[str, float]]:
    """The curve of a run, without the clock, so that NaN equals NaN."""
    rows = [row._replace(evaluations_per_second=0.0)._asdict() for row in result.history]
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def raising(at: int) -> Callable[[Diagnostics], None]:
    def listen(row: Diagnostics) -> None:
        if row.iteration == at:
            raise KeyboardInterrupt

    return listen


# the policy


def test_actions_are_as_frequent_as_they_are_probable_and_never_masked():
    allowed = torch.tensor([[False, True, True, False], [True, True, True, True]])
    probabilities = torch.tensor([[0.0, 0.25, 0.75, 0.0], [0.1, 0.2, 0.3, 0.4]])
    generator = torch.Generator().manual_seed(0)
    drawn = sample(probabilities.log(), allowed, 20_000, generator).numpy()
    frequent = [np.bincount(column, minlength=4) / 20_000 for column in drawn.T]
    assert_allclose(frequent, probabilities, atol=0.01)
    short = sample((0.5 * probabilities).log(), allowed, 1000, generator)  # sums below 1
    assert set(short[:, 0].tolist()) == {1, 2}


def test_a_policy_leans_to_a_start():
    policy = Policy(torch.tensor([[True, True, False], [True, True, True]]))
    policy.lean(torch.tensor([0, 2]), 0.7)
    assert_allclose(policy().exp().detach(), [[0.85, 0.15, 0], [0.1, 0.1, 0.8]], rtol=1e-5)


def test_the_value_before_a_group_knows_the_groups_before_it_only():
    policy = Policy(torch.ones(3, 2, dtype=torch.bool))
    with torch.no_grad():
        policy.start.fill_(1.0)
        policy.change.copy_(torch.tensor([[0.0, 10.0], [0.0, 100.0], [0.0, 1000.0]]))
        found = policy.values(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    assert found.tolist() == [[1, 1, 101], [1, 11, 11]]


# rollout, advantages, update


def test_a_rollout_holds_what_was_sampled_and_what_became_of_it():
    task = toy()
    learner = Learner.new(SHORT, task, None)
    found = rollout(learner, task, 7)
    assert found.actions.shape == found.values.shape == (7, 11)
    assert found.placements.tolist() == found.actions.tolist()
    assert found.entropy == pytest.approx(math.log(3))
    again = task.evaluate(found.actions.numpy())
    assert found.found.reward.tolist() == again.reward.tolist()


def test_advantages_are_standardised_rewards():
    credit = advantages(SHORT, new(), samples([[0, 0], [1, 1]], evaluation(1.0, 3.0)))
    assert credit.advantage.tolist() == [[-1, -1], [1, 1]]
    assert credit.explained_variance == 0.0


def test_what_does_not_fit_enters_no_average_and_is_far_below_what_does():
    learner = new()
    found = evaluation(1.0, 3.0, -100.0, fits=(True, True, False))
    credit = advantages(SHORT, learner, samples([[0, 0], [1, 1], [0, 1]], found))
    assert credit.advantage[:, 0].tolist() == [-1, 1, -SHORT.advantage_limit]
    assert credit.counts.tolist() == [True, True, False]
    assert learner.averages == (2.0, 1.0)


def test_where_nothing_fits_the_less_over_is_the_better_and_no_average_moves():
    learner = new()
    found = evaluation(-101.0, -100.0, fits=(False, False))
    credit = advantages(SHORT, learner, samples([[0, 0], [1, 1]], found))
    assert credit.advantage[:, 0].tolist() == [-1, 1]
    assert learner.averages is None


def test_averages_of_rewards_move_slowly():
    learner = new()
    for rewards in ((1.0, 3.0), (5.0, 9.0)):
        advantages(SHORT, learner, samples([[0, 0], [1, 1]], evaluation(*rewards)))
    assert learner.averages == pytest.approx((0.9 * 2 + 0.1 * 7, 0.9 * 1 + 0.1 * 2))


def test_without_centring_rewards_are_compared_with_the_moving_average():
    config = dataclasses.replace(SHORT, centre=False)
    learner = new(config)
    learner.averages = (2.0, 1.0)
    credit = advantages(config, learner, samples([[0, 0], [1, 1]], evaluation(3.0, 4.0)))
    assert_allclose(credit.advantage[:, 0], [2.0, 4.0])  # 1 and 2 over their deviation 0.5


def test_values_of_the_steps_are_the_baseline_where_they_are_asked_for():
    config = dataclasses.replace(SHORT, baseline="value", lambda_=0.0, centre=False)
    learner = new(config)
    learner.averages = (0.0, 1.0)
    given = samples([[0, 0], [1, 1]], evaluation(1.0, 3.0))
    given = given._replace(values=torch.tensor([[0.0, 1.0], [0.0, 2.0]]))
    credit = advantages(config, learner, given)
    # errors: first group 1 - 0 and 2 - 0, second 1 - 1 and 3 - 2; their deviation is sqrt(1/2)
    assert_allclose(credit.advantage, np.sqrt(2) * np.array([[1, 0], [2, 1]]), rtol=1e-6)
    assert_allclose(credit.target, [[1, 1], [2, 3]])


@pytest.mark.parametrize("baseline", ["ema", "value"])
def test_an_update_makes_what_was_better_more_probable(baseline):
    config = dataclasses.replace(SHORT, baseline=baseline, kl_limit=10.0)
    learner = new(config)
    given = samples([[0, 1], [1, 0]], evaluation(1.0, 3.0))
    done = update(config, learner, given, advantages(config, learner, given))
    probabilities = learner.policy().exp().detach()
    assert (probabilities[[0, 1], [1, 0]] > 0.5).all()
    assert done.epochs == config.epochs
    assert done.approx_kl > 0


def test_an_update_stops_once_the_policy_has_moved_too_far():
    config = dataclasses.replace(SHORT, kl_limit=1e-4, epochs=50)
    learner = new(config)
    given = samples([[0, 1], [1, 0]], evaluation(1.0, 3.0))
    assert update(config, learner, given, advantages(config, learner, given)).epochs == 1


# runs


@pytest.mark.parametrize(("baseline", "seeds"), [("ema", 10), ("value", 2)])
def test_it_finds_the_optimum_of_the_toy_in_nine_of_ten_seeds(baseline, seeds):
    task = toy()
    found = 0
    for seed in range(seeds):
        best = []

        def score(placements, best=best):
            outcome = task.score(placements[: 0 if best else None])  # enough is enough
            best += [t for t in outcome.step_time if t < TOY_OPTIMUM * (1 + 1e-9)]
            return outcome

        train(
            Config(evaluations=EVALUATIONS, seed=seed, baseline=baseline),
            dataclasses.replace(task, score=score),
        )
        found += bool(best)
    assert found >= 0.9 * seeds


@pytest.mark.parametrize("baseline", ["ema", "value"])
def test_twenty_iterations_are_ten_and_ten_resumed_bit_for_bit(baseline, tmp_path):
    config = dataclasses.replace(SHORT, baseline=baseline, patience=4)
    whole = train(config, toy(), folder=tmp_path / "whole")
    half = train(config, toy(), folder=tmp_path / "parts", listener=raising(13))
    assert half.interrupted
    assert len(half.history) == 13
    rest = train(config, toy(), folder=tmp_path / "parts", resume=True)  # from iteration 10
    assert len(whole.history) == 20
    assert recorded(half)[:10] + recorded(rest) == recorded(whole)
    assert max(row.life for row in whole.history) > 1  # a new life began on the way
    assert rest.finalists == whole.finalists
    for name, values in whole.policy.state_dict().items():
        assert torch.equal(values, rest.policy.state_dict()[name])
    lines = [(tmp_path / run / FILE).read_text().splitlines() for run in ("whole", "parts")]
    for a, b in zip(*lines, strict=True):
        assert json.loads(a) | {"evaluations_per_second": 0} == json.loads(b) | {
            "evaluations_per_second": 0
        }


def test_a_finished_run_may_be_made_longer(tmp_path):
    longer = dataclasses.replace(SHORT, evaluations=30 * 16)
    train(SHORT, toy(), folder=tmp_path)
    rest = train(longer, toy(), folder=tmp_path, resume=True)
    assert recorded(rest) == recorded(train(longer, toy()))[20:]
    assert (rest.iterations, rest.evaluations) == (30, 480)


@pytest.mark.parametrize("other", ["configuration", "task"])
def test_a_checkpoint_of_another_run_is_refused(other, tmp_path):
    train(SHORT, toy(), folder=tmp_path)
    config = dataclasses.replace(SHORT, seed=1) if other == "configuration" else SHORT
    task = toy()
    if other == "task":
        task = PlacementTask.build(task.grouping.space, num_groups=5)
    with pytest.raises(PlacewrightError, match=f"its {other} is not that of this run"):
        train(config, task, folder=tmp_path, resume=True)


def test_the_same_seed_gives_the_same_curve_and_another_seed_another():
    same = [recorded(train(SHORT, toy())) for _ in range(2)]
    assert same[0] == same[1]
    assert recorded(train(dataclasses.replace(SHORT, seed=1), toy())) != same[0]


def test_ctrl_c_keeps_the_best_so_far():
    result = train(SHORT, toy(), listener=raising(3))
    assert result.interrupted
    assert result.finalists[0].step_time == result.history[-1].best_step_time
    placement = np.array([result.finalists[0].actions])
    assert toy().evaluate(placement).step_time[0] == result.finalists[0].step_time


def test_training_leaves_the_threads_of_torch_as_they_were():
    before = torch.get_num_threads()
    seen = []
    train(SHORT, toy(), listener=lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_a_run_ends_when_its_last_life_finds_nothing_better():
    config = Config(evaluations=10**6, placements=16, patience=3, lives=2)
    result = train(config, toy())
    assert result.evaluations < 10**6
    lives = [row.life for row in result.history]
    assert set(lives) == {1, 2}
    assert lives.count(2) > config.patience  # its first iteration is its own best, not the first's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "clip must be above 0"),
        ({"decay": 1.5}, "decay must be at least 0 and at most 1, not 1.5"),
        ({"placements": 0}, "placements must be at least 1"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate must be above 0 and finite"),
        ({"baseline": "none"}, "baseline must be one of"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Config(**change)
    check_options(Config())


# finalists, journal, checkpoints


def test_finalists_are_the_best_distinct_placements():
    finalists = Finalists(limit=2)
    finalists.note(np.array([[0], [1], [0], [2]]), evaluation(1.0, 3.0, 1.0, 2.0), 10)
    assert [(f.actions, f.evaluations) for f in finalists.ranked] == [((1,), 12), ((2,), 14)]
    finalists.note(np.array([[1], [3]]), evaluation(3.0, 9.0, fits=(True, False)), 14)
    illegal = evaluation(9.0)._replace(step_time=np.array([np.inf]))
    finalists.note(np.array([[4]]), illegal, 16)
    assert [f.actions for f in finalists.ranked] == [(1,), (2,)]  # over the memory comes last
    assert finalists.best is not None
    assert finalists.best.fits
    empty = Finalists()
    empty.note(np.array([[4]]), illegal, 0)
    assert empty.best is None


def test_finalists_are_ranked_anew_in_full():
    task = toy()
    finalists = Finalists()
    optimal, slow = [0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0], [0] * 11
    finalists.note(np.array([slow, optimal]), evaluation(2.0, 1.0), 0)
    best = best_in_full(task, finalists.ranked)
    assert best is not None
    assert best.actions == tuple(optimal)
    assert (best.evaluations, best.step_time) == (2, pytest.approx(TOY_OPTIMUM))
    assert best_in_full(task, ()) is None


def diagnostics(iteration: int) -> Diagnostics:
    values = dict.fromkeys(Diagnostics._fields, 0.5)
    return Diagnostics(**values)._replace(iteration=iteration, value_loss=math.nan)


def test_a_journal_drops_what_a_resumed_run_writes_again(tmp_path):
    journal = Journal(tmp_path / "run")
    for iteration in (1, 2, 3):
        journal.write(diagnostics(iteration))
    journal.close()
    with (tmp_path / "run" / FILE).open("a") as file:
        file.write('{"iterat')  # cut short by a crash
    journal = Journal(tmp_path / "run", after=2)
    journal.write(diagnostics(3))
    rows = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert rows[0]["value_loss"] is None
    assert list(rows[0]) == list(Diagnostics._fields)


@pytest.mark.filterwarnings("ignore")  # what TensorBoard's own imports say
def test_tensorboard_gets_the_same_names_where_it_is_installed(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    journal = Journal(tmp_path)
    journal.write(diagnostics(1))
    journal.close()
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(Diagnostics._fields) - {"iteration", "value_loss"}


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"learner": "x"}, {"number": 1})

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        checkpoint.save(tmp_path, {"learner": "x"}, {"number": 2})
    assert checkpoint.load(tmp_path, {"learner": "x"}) == {"number": 1}
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]


class Payload:
    """What must not be run when a checkpoint is read."""

    def __reduce__(self):
        return (Path.touch, (Path("was_run"),))


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": Payload()}, tmp_path / checkpoint.FILE)
    with pytest.raises(PlacewrightError, match="not a checkpoint"):
        checkpoint.load(tmp_path, {})
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("part", ["identity", "state"])
def test_a_checkpoint_whose_parts_are_no_dictionaries_is_refused(tmp_path, part):
    path = tmp_path / checkpoint.FILE
    checkpoint.write(path, {"learner": "x"}, {"number": 1})
    torch.save(torch.load(path) | {part: "x"}, path)
    with pytest.raises(PlacewrightError, match=r"checkpoint\.pt: not a checkpoint: its identity"):
        checkpoint.read(path)


def test_a_checkpoint_with_one_byte_changed_is_refused(tmp_path):
    path = tmp_path / checkpoint.FILE
    checkpoint.write(path, {"learner": "x"}, {"weights": torch.arange(4096.0)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(PlacewrightError, match=r"checkpoint\.pt: damaged: \S+data/0 is not what"):
        checkpoint.read(path)


@pytest.mark.parametrize("content", [None, b"", b"text", pickle.dumps({"format": 1})])
def test_a_missing_or_damaged_checkpoint_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / checkpoint.FILE).write_bytes(content)
    with pytest.raises(PlacewrightError, match=checkpoint.FILE):
        train(SHORT, toy(), folder=tmp_path, resume=True)
    with pytest.raises(PlacewrightError, match="no folder"):
        train(SHORT, toy(), resume=True)


# the planner and the command line


@pytest.mark.parametrize("budget", [Budget(evaluations=99), Budget(seconds=5.9)])
def test_the_planner_does_nothing_where_the_budget_is_too_small_for_it(budget):
    recorder = Recorder(space=toy().grouping.space)
    planner = PolicyGradient(least_evaluations=100, least_seconds=6.0)
    planner.search(recorder.space, np.random.default_rng(0), budget, recorder)
    assert recorder.evaluations == 0


def test_the_planner_is_decided_by_its_seed_and_keeps_its_budget():
    space = toy().grouping.space
    bests = []
    for seed in (0, 0, 1):
        recorder, budget = Recorder(space=space), Budget(evaluations=400)
        PolicyGradient(levels=(4, 16)).search(space, np.random.default_rng(seed), budget, recorder)
        assert recorder.evaluations == budget.used == 400
        bests.append([(found.step_time, found.evaluations) for found in recorder.curve])
    assert bests[0] == bests[1] != bests[2]


def test_ctrl_c_reaches_who_runs_the_planner():
    space = toy().grouping.space

    def interrupt(recorder: Recorder, budget: Budget) -> None:
        if recorder.evaluations > 100:
            raise KeyboardInterrupt

    recorder = Recorder(space=space, listener=interrupt)
    with pytest.raises(KeyboardInterrupt):
        PolicyGradient().search(space, np.random.default_rng(0), Budget(seconds=60), recorder)
    assert recorder.best is not None


def test_the_command_line_trains_and_resumes(data, tmp_path, capsys):
    model = str(data / "pipedream" / "gnmt.graph.txt")
    run = (model, "--cluster", "4xP100-PCIe", "--groups", "8", "--json", "--folder", str(tmp_path))
    assert run_command(Config, train, [*run, "--evaluations", "128"]) == 0
    assert run_command(Config, train, [*run, "--evaluations", "256", "--resume"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["evaluations"] for record in records] == [128, 256]
    assert records[1]["best_step_time_s"] <= records[0]["best_step_time_s"]
    assert run_command(Config, train, [*run, "--resume", "--clip", "0.3"]) == 1
    assert "its configuration is not that of this run: clip 0.2, now 0.3" in capsys.readouterr().err


def test_the_command_line_explains_itself():
    shown = subprocess.run(
        [sys.executable, "-m", "agents.ppo", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert shown.returncode == 0
    assert "--learning-rate" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clip", "0"], "clip must be above 0 and finite, not 0.0"),
        (["--groups", "0"], "--groups must be at least 1"),
        (["--resume"], "--resume needs the --folder"),
    ],
)
def test_the_command_line_refuses_nonsense(arguments, message, capsys):
    assert run_command(Config, train, ["x", "--cluster", "4xP100-PCIe", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_toy_is_solved_in_nineteen_of_twenty_seeds():
    config = Config(evaluations=EVALUATIONS)
    found = [meets_optimum(train, dataclasses.replace(config, seed=seed)) for seed in range(20)]
    assert sum(found) >= 19
