"""Tables of names in the documentation hold what the code has: metrics, columns, settings, stop reasons, errors."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from finished_run import played_groups, shop_source
from shown_pages import ROOT

import agentrl
from agentrl.algorithms import ALGORITHMS, base, importance, load_algorithm
from agentrl.config import load_eval_config
from agentrl.config.schema import AlgorithmOptions
from agentrl.data.account import TaskAccount
from agentrl.data.run_folder import flatten_summary
from agentrl.data.store import arrow_schema
from agentrl.demo import MODEL_DIR
from agentrl.envs.registry import make_env
from agentrl.evaluation.heldout import held_out_sets
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator import engine_service, loop, manager, turns
from agentrl.orchestrator.metrics import apart, pace, rollout_metrics
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.tasks.source import TaskSource
from agentrl.tools import ToolErrorType
from agentrl.types import SamplingParams, StopReason, Task

TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
ENVIRONMENTS = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
TOOLS = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
MEGATRON = ROOT / "agentrl" / "trainer" / "megatron"


def section(text: str, heading: str) -> str:
    """The text under a heading, down to the next one."""
    return re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def first_cells(text: str) -> set[str]:
    """Names in backticks in the first column of the tables."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_each_algorithm_has_its_use_its_equation_and_its_settings():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert first_cells(page.split("\n## ")[0]) == ALGORITHMS.keys()
    assert first_cells(section(page, "Equations")) == ALGORITHMS.keys() | {"--loss-type sft_loss"}
    assert first_cells(section(page, "Settings")) == ALGORITHMS.keys()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    shop = tmp_path_factory.mktemp("shop") / "shop.py"
    shop.write_text(shop_source(), encoding="utf-8")
    scope: dict = {}
    exec(shop_source(), scope)
    return played_groups(f"{shop}:Shopping", scope["PRICES"])


def test_metrics(groups):
    loss = pytest.importorskip("agentrl.trainer.losses")
    from agentrl.trainer import agreement

    rollout = set(rollout_metrics(groups, 0)) | set(pace(groups, 1.0)) | {"rollout/zero_variance"}
    rollout |= {name for kind in ("stale", "carried") for name in apart(f"rollout/{kind}", groups)}
    rollout = {re.sub(r"/reward/.*", "/reward/<part>", re.sub(r"/stop/.*", "/stop/<reason>", n)) for n in rollout}
    options = AlgorithmOptions(use_kl_loss=True, entropy_coef=0.1, use_opsm=True)
    columns = dict.fromkeys(("advantage", "rollout", "ref", "weight", "opsm_masked"), np.zeros(0))
    sums = dict.fromkeys(loss.Loss(load_algorithm(options), options).names(columns), 1.0)
    trained = set(loss.metrics_of(sums, 0.0, 1.0))
    for name in ("core.py", "policy.py", "critic.py"):
        trained |= set(re.findall(r'"((?:train|critic|time)/\w+)":', (MEGATRON / name).read_text(encoding="utf-8")))
    of_a_step = re.findall(r'"(\w+)": (?:norm|rate|float\(\w+\))', (MEGATRON / "core.py").read_text(encoding="utf-8"))
    of_values = re.findall(r'"(value_\w+)"', (MEGATRON / "critic.py").read_text(encoding="utf-8"))
    trained |= {f"train/{name}" for name in of_a_step} | {f"critic/{name}" for name in (*of_a_step, *of_values)}
    for module in (base, importance):
        trained |= set(re.findall(r'"(train/\w+)"', inspect.getsource(module)))
    trained |= set(re.findall(r'f?"(train/\w+(?:/age_)?)', inspect.getsource(agreement.by_age).replace("{age}", "")))
    trained |= set(re.findall(r'"(train/\w+)"\] =', inspect.getsource(loop)))
    trained = {f"{name}<n>" if name.endswith("/age_") else name for name in trained}
    source = inspect.getsource(manager)
    (counters,) = re.findall(r'f"engine/\{k\}".*? for k in \(([^)]*)\)', source)
    managed = {f"engine/{name}" for name in re.findall(r"\w+", counters)}
    sources = "".join(inspect.getsource(module) for module in (manager, loop, turns, engine_service))
    managed |= set(re.findall(r'"((?:engine|sync|time|rollout|data)/\w+)"', sources))
    managed |= {f"data/{name}" for name in TaskAccount(TaskSource("env", None)).counts}
    episodes = [t for group in groups for t in group.trajectories]
    evaluated = set(flatten_summary("<set>", summarize("<set>", "test", episodes, 1.0).to_dict()))
    documented = first_cells(TRAINING.split("<!-- metrics -->")[1].split("<!-- end of metrics -->")[0])
    assert documented == rollout | trained | managed | evaluated


def test_trajectory_columns():
    assert first_cells(section(TRAINING, "Trajectories")) == set(arrow_schema().names)


def test_run_folder(groups, documented: Path):
    rows = first_cells(section(TRAINING, "The run folder"))
    for file in (documented / "runs" / "NAME").iterdir():
        name = file.name + "/" * file.is_dir()
        assert name in rows or name == ".lock"


def test_settings_of_a_tool_env():
    table = section(ENVIRONMENTS, "Settings")
    assert first_cells(table) == set(agentrl.ToolEnv.settings) - {"render_mode"}
    for name, default in re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", table, re.M):
        assert str(getattr(agentrl.ToolEnv, name)) == {"empty": ""}.get(default, default)


def test_stop_reasons_and_their_outcomes():
    table = section(ENVIRONMENTS, "How an episode ends")
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w ]+?)(?:: [\w ,]*trained)? \|$", table, re.M)
    outcomes = {"infrastructure error": "infra_error", "policy error": "policy_error"}
    assert {name: outcomes.get(text, text) for name, text in rows} == {str(r): str(r.outcome) for r in StopReason}


def test_tool_errors():
    assert first_cells(section(TOOLS, "Errors")) == {str(kind) for kind in ToolErrorType}


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        (["--env", "search"], {"search": 3}),
        (["--env", "search", "--eval-prompt-data", "sums", "tasks.jsonl"], {"search": 3, "sums": 2}),
        (["--prompt-data", "tasks.jsonl", "--eval-prompt-data", "sums", "tasks.jsonl"], {"sums": 2}),
        (["--prompt-data", "tasks.jsonl", "--env-arg", "test_fraction=1.0"], {"tasks.jsonl": 2}),
        (["--eval-prompt-data", "sums", "tasks.jsonl"], {"sums": 2}),
    ],
)
def test_held_out_sets(flags, sets, documented: Path):
    found = held_out_sets(load_eval_config([*flags, "--limit", "3"]))
    assert {held_out.name: len(held_out.tasks) for held_out in found} == sets


def test_a_whole_file_is_evaluated_alone(documented: Path):
    (found,) = held_out_sets(load_eval_config(["--prompt-data", "tasks.jsonl", "--split", "all"]), split="all")
    assert len(found.tasks) == 2


def test_tool_timeout_is_set_for_a_run(documented: Path):
    assert make_env("shop.py:Shopping", {}, tool_timeout=3.0).tool_timeout == 3.0


def test_the_tool_output_budget_is_of_the_whole_episode():
    """As environments.md says; each observation fits, both together do not."""

    @agentrl.tool
    def say() -> str:
        """Says much."""
        return "word " * 20

    class Talk(agentrl.ToolEnv):
        tools = [say]
        tasks = {"train": [("Listen.", "Done.")], "test": [("Listen.", "Done.")]}
        reward = "exact_match"

    chat = ChatTemplate(MODEL_DIR)

    def stop_reason(limit: int) -> tuple[str, int]:
        limits = EpisodeLimits(max_tool_output_tokens=limit)
        client = ScriptedClient(['<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'] * 2 + ["Done."], chat)
        episode = run_episode(
            Talk(), Task("t", seed=0, options={"index": 0}), client=client, chat=chat, params=SamplingParams(),
            limits=limits, trajectory_id="t", group_id="g",
        )  # fmt: skip
        trajectory = asyncio.run(episode)
        told = sum(len(s) - s.num_sampled - s.prompt_length for s in trajectory.segments)
        return str(trajectory.stop_reason), told

    reason, told = stop_reason(10_000)
    assert reason == "done"
    assert stop_reason(told)[0] == "done"
    assert stop_reason(told - 1)[0] == "max_tool_output"
