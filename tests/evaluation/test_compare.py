"""Comparison of two evaluations: statistics against brute force, and what is refused."""

import itertools
import json
import math

import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.data.records import to_record
from agentrl.data.store import TrajectoryStore
from agentrl.evaluation.compare import mcnemar, paired_binary, paired_means, sign_flip
from agentrl.types import StopReason, Task, Trajectory, replace


def episode(task, success, *, sample=0, agent=None, error=None, reward=None, seed=0, env="search"):
    name = f"eval-{env}-{task}-{sample:03d}"
    infra = StopReason.ENGINE_ERROR if error else StopReason.DONE
    return Trajectory(
        trajectory_id=name + (f":{agent}" if agent else ""),
        group_id="g",
        task=Task(f"{env}/test/{task}", seed=seed, split="test", options={"index": task}, env=env),
        segments=[],
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        reward=float(success) if reward is None else reward,
        success=bool(success),
        stop_reason=infra,
        error=error,
        num_turns=1,
        agent=agent or "agent",
        info={"turns": [], "episode_id": name} if agent else {"turns": []},
        timings={},
    )


def write(folder, *episodes, record=None, name="search"):
    folder.mkdir(parents=True)
    lines = [json.dumps({**to_record(e), "set": name}) + "\n" for e in episodes]
    (folder / "trajectories.jsonl").write_text("".join(lines))
    if record is not None:
        (folder / "run.json").write_text(json.dumps({"evaluation": record}))
    return str(folder)


def scores(folder, successes, **parts):
    return write(folder, *(episode(i, s) for i, s in enumerate(successes)), **parts)


def compared(capsys, *words):
    assert main(["compare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["sets"]


# -- statistics ---------------------------------------------------------------------------------------


def test_mcnemar_is_the_two_sided_binomial_tail():
    for gained, lost in itertools.product(range(9), repeat=2):
        n = gained + lost
        extreme = sum(
            1 for coins in itertools.product((0, 1), repeat=n) if abs(2 * sum(coins) - n) >= abs(gained - lost)
        )
        assert mcnemar(gained, lost) == pytest.approx(extreme / 2**n)
    assert mcnemar(0, 6) == 2 / 64 and mcnemar(9, 0) < 0.01
    assert 0.9 < mcnemar(5000, 5010) <= 1 and 0 < mcnemar(4000, 6000) < 1e-80


def test_sign_flips_are_exact_where_there_are_few():
    differences = np.array([0.5, 0.0, -0.25, 0.75, 0.0, 1.0])
    values = differences[differences != 0]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((1, -1), repeat=4)
    ]
    brute = sum(s >= abs(differences.sum()) - 1e-12 for s in sums) / 16
    p, test = sign_flip(differences)
    assert p == brute and "exact" in test
    assert sign_flip(np.zeros(5)) == (1.0, "sign flips, exact")


def test_sign_flips_agree_with_mcnemar_on_flips():
    for gained, lost in [(1, 0), (3, 1), (7, 2), (9, 7)]:
        differences = np.array([1.0] * gained + [-1.0] * lost + [0.0] * 5)
        assert sign_flip(differences)[0] == pytest.approx(mcnemar(gained, lost))
    many = np.array([1.0] * 24 + [-1.0] * 10)
    p, test = sign_flip(many)
    assert p == pytest.approx(mcnemar(24, 10), abs=0.01) and "random" in test
    assert sign_flip(many)[0] == p  # seeded


def test_equal_sums_in_another_order_count_as_equal():
    assert sign_flip(np.array([0.1, 0.2, 0.3]))[0] == 0.25


def test_the_test_keeps_its_level():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        a, b = (rng.integers(0, 2, 30).astype(float) for _ in range(2))
        hits += paired_binary(list(a), list(b)).significant
    assert hits / 400 <= 0.06


def test_the_interval_of_rates_covers():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(500):
        a = (rng.random(25) < 0.5).astype(float)
        b = np.where(rng.random(25) < 0.2, 1.0, a)  # a true difference of 0.1
        paired = paired_binary(list(a), list(b))
        inside += paired.low <= 0.1 <= paired.high
    assert inside / 500 >= 0.93
    none = paired_binary([1.0, 0.0], [1.0, 0.0])
    assert none.low < 0 < none.high and none.p == 1.0  # two tasks that agree say little


def test_the_standard_error_is_that_of_the_differences():
    a, b = [0.0, 0.5, 1.0, 0.25], [0.5, 0.5, 0.75, 1.0]
    paired = paired_means(a, b)
    d = np.array(b) - np.array(a)
    assert paired.difference == pytest.approx(d.mean())
    assert paired.stderr == pytest.approx(d.std(ddof=1) / 2)
    assert paired.high - paired.low == pytest.approx(2 * 3.1824 * paired.stderr, rel=2e-3), "Student's, of 3 degrees"
    bounded = paired_means([0.0, 0.0], [1.0, 0.5], largest=1.0)
    assert (bounded.difference, bounded.high) == (0.75, 1.0)
    single = paired_means([0.0], [1.0], largest=1.0)
    assert math.isnan(single.low) and math.isnan(single.high)
    assert math.isnan(paired_means([0.0], [1.0]).stderr)


# -- what is compared ------------------------------------------------------------------------------------


def test_a_clear_gain(tmp_path, capsys):
    a = scores(tmp_path / "a", [0] * 12 + [1] * 8)
    b = scores(tmp_path / "b", [1] * 10 + [0] * 2 + [1] * 7 + [0])
    assert main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "20 tasks in pairs" in out and "40.0%" in out and "85.0%" in out and "+45.0 points" in out
    assert "This is significant" in out and "McNemar, exact" in out
    assert "10 tasks that B solves more often:\n  search/test/0\n" in out
    assert "1 task that B solves less often:\n  search/test/19" in out
    result = compared(capsys, a, b)["search"]
    assert result["success"]["p"] == pytest.approx(mcnemar(10, 1)) and result["n_tasks"] == 20
    assert [f["task_id"] for f in result["lost"]] == ["search/test/19"]


def test_long_lists_are_cut_unless_asked_for(tmp_path, capsys):
    a, b = scores(tmp_path / "a", [0] * 30), scores(tmp_path / "b", [1] * 30)
    main(["compare", a, b])
    out = capsys.readouterr().out
    assert "... and 20 more: --all lists them" in out and "search/test/29" not in out
    main(["compare", a, b, "--all"])
    assert "search/test/29" in capsys.readouterr().out


def test_no_difference_is_said_to_be_none(tmp_path, capsys):
    a = scores(tmp_path / "a", [0, 1, 1, 0, 1])
    b = scores(tmp_path / "b", [1, 0, 1, 0, 1])
    main(["compare", a, b])
    assert "This is not significant" in capsys.readouterr().out
    main(["compare", a, a])
    assert "success: the same in every task" in capsys.readouterr().out


def test_several_samples_a_task(tmp_path, capsys):
    def run(name, rates):
        return write(
            tmp_path / name, *(episode(i, s < r, sample=s) for i, r in enumerate(rates) for s in range(4))
        )  # fmt: skip

    result = compared(capsys, run("a", [0, 1, 2, 3]), run("b", [4, 1, 3, 3]))["search"]
    assert result["success"]["difference"] == pytest.approx(5 / 16) and "sign flips" in result["success"]["test"]
    assert result["gained"] == [
        {"task_id": "search/test/0", "a": 0.0, "b": 1.0}, {"task_id": "search/test/2", "a": 0.5, "b": 0.75}
    ]  # fmt: skip
    assert result["episodes"] == [16, 16]


def test_errors_are_beside_the_score(tmp_path, capsys):
    a = write(tmp_path / "a", episode(0, 1), episode(1, 0, error="down"), episode(2, 0), episode(2, 1, sample=1))
    b = write(tmp_path / "b", episode(0, 1), episode(1, 1), episode(2, 1))
    result = compared(capsys, a, b)["search"]
    assert result["n_tasks"] == 2 and result["errors"] == [1, 0]
    assert result["left_out"] == {"not scored in one of the runs (infrastructure errors)": ["search/test/1"]}
    main(["compare", a, b])
    assert "1 task left out, not scored in one of the runs" in capsys.readouterr().out


def test_an_episode_that_failed_in_its_reset_has_no_prompt_that_could_differ(tmp_path, capsys):
    failed = replace(episode(2, 0, error="no reset"), messages=[])
    a = write(tmp_path / "a", episode(0, 0), episode(1, 1), failed)
    b = scores(tmp_path / "b", [0, 1, 1])
    for one, other in ((a, b), (b, a)):
        assert compared(capsys, one, other)["search"]["n_tasks"] == 2


def test_what_an_agent_is_asked_may_depend_on_the_others(tmp_path, capsys):
    def run(name, move):
        second = replace(episode(0, 1, agent="b"), messages=[{"role": "user", "content": f"a plays {move}"}])
        return write(tmp_path / name, episode(0, 1, agent="a"), second)

    assert compared(capsys, run("a", "rook"), run("b", "king"))["search"]["n_tasks"] == 1


def test_an_episode_of_several_agents_counts_once(tmp_path, capsys):
    def run(name, won):
        return write(
            tmp_path / name,
            *(episode(i, w, agent=agent, reward=r) for i, w in enumerate(won) for agent, r in (("a", 1.0), ("b", 0.0))),
        )

    result = compared(capsys, run("a", [0, 0, 1]), run("b", [1, 0, 1]))["search"]
    assert result["episodes"] == [3, 3] and result["n_tasks"] == 3
    assert result["success"]["test"] == "McNemar, exact" and result["reward"]["a"] == 0.5


def test_sets_in_common_are_compared_and_can_be_chosen(tmp_path, capsys):
    for name in ("a", "b"):
        folder = tmp_path / name
        write(folder, episode(0, 1))
        line = {**to_record(episode(0, 1, env="sums")), "set": "sums"}
        with (folder / "trajectories.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
    words = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert set(compared(capsys, *words)) == {"search", "sums"}
    assert set(compared(capsys, *words, "--set", "sums")) == {"sums"}
    main(["compare", *words])
    assert "2 sets are tested" in capsys.readouterr().out
    assert main(["compare", *words, "--set", "nope"]) == 2
    assert "set 'nope' is not in both runs" in capsys.readouterr().err


def test_steps_of_a_training_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    for step, won in ((0, [0, 0, 0, 0, 0, 0]), (10, [1, 1, 1, 1, 1, 1])):
        store.write(step, [episode(i, w) for i, w in enumerate(won)], name="eval-search")
    run = str(tmp_path / "run")
    result = compared(capsys, f"{run}@0", f"{run}@10")["search"]
    assert result["success"]["difference"] == 1.0 and result["success"]["p"] == 2 / 64
    assert compared(capsys, f"{run}@0", run)["search"]["success"]["difference"] == 1.0  # without: the newest
    assert main(["compare", f"{run}@0", f"{run}@7"]) == 2
    assert "there are some after 0, 10" in capsys.readouterr().err


# -- what is refused -------------------------------------------------------------------------------------


def refused(capsys, *words):
    assert main(["compare", *words]) == 2
    return capsys.readouterr().err


def test_different_tasks(tmp_path, capsys):
    a, b = scores(tmp_path / "a", [1, 0, 1, 1]), scores(tmp_path / "b", [1, 0])
    error = refused(capsys, a, b)
    assert "2 only in" in error and "search/test/2, search/test/3" in error and "--intersect compares the 2" in error
    result = compared(capsys, a, b, "--intersect")["search"]
    assert result["n_tasks"] == 2 and list(result["left_out"].values()) == [["search/test/2", "search/test/3"]]
    other = write(tmp_path / "c", episode(77, 1))
    assert "They share none" in refused(capsys, a, other, "--intersect")


def test_no_common_set(tmp_path, capsys):
    a, b = scores(tmp_path / "a", [1]), scores(tmp_path / "b", [1], name="sums")
    assert "no set in common" in refused(capsys, a, b)


def record(**changes):
    identity = {"env": "search", "env_args": {}, "split": "test", "code_digest": "sha256:1", "data_digest": None}
    return {"sets": {"search": {**identity, **changes}}, "sampling": {"eval_temperature": changes.get("t", 0.0)}}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"code_digest": "sha256:2"}, "the environment's code differs"),
        ({"data_digest": "sha256:2"}, "a data file differs"),
        ({"env_args": {"hops": 2}}, "env_args {} and {'hops': 2}"),
    ],
)
def test_changed_content(tmp_path, capsys, changes, text):
    a = scores(tmp_path / "a", [1, 0], record=record())
    b = scores(tmp_path / "b", [1, 1], record=record(**changes))
    assert text in refused(capsys, a, b)
    assert main(["compare", a, b, "--force"]) == 0
    assert f"compared although what was evaluated has changed: {text}" in capsys.readouterr().out


def test_another_sampling_is_a_note(tmp_path, capsys):
    a, b = (scores(tmp_path / n, [1, 0], record={**record(), "sampling": {"t": v}}) for n, v in (("a", 0), ("b", 1)))
    assert main(["compare", a, b]) == 0
    assert "note: sampling: t 0 and 1" in capsys.readouterr().out


def test_the_same_id_with_another_seed(tmp_path, capsys):
    a, b = write(tmp_path / "a", episode(0, 1)), write(tmp_path / "b", episode(0, 1, seed=5))
    assert "same id but another seed" in refused(capsys, a, b)
    assert main(["compare", a, b, "--force"]) == 0


def test_folders_and_lines_that_are_not_there(tmp_path, capsys):
    a = scores(tmp_path / "a", [1])
    assert "no such run folder" in refused(capsys, a, str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "no run folder with episodes" in refused(capsys, a, str(tmp_path / "empty"))
    b = scores(tmp_path / "b", [1])
    with (tmp_path / "b" / "trajectories.jsonl").open("a") as stream:
        stream.write('{"schema_version": 1, "torn\n')
    assert "trajectories.jsonl:2: not a line of JSON" in refused(capsys, a, b)
    lost = write(tmp_path / "lost", episode(0, 0, error="down"))
    assert "no task was scored in both runs" in refused(capsys, a, lost)
    assert "two runs before its options, got 1" in refused(capsys, a)
    assert "--intersekt" in refused(capsys, a, a, "--intersekt")


def test_names_from_files_cannot_reach_the_terminal(tmp_path, capsys):
    evil = Trajectory(**{**vars(episode(0, 1)), "task": Task("x\x1b]0;owned\x07", seed=0, env="search")})
    plain = Trajectory(**{**vars(evil), "success": False, "reward": 0.0})
    main(["compare", write(tmp_path / "a", plain), write(tmp_path / "b", evil)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"x\x1b]0;owned\x07" in out
