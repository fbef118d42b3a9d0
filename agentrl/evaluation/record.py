"""What an evaluation was of: environments, tasks, model, sampling. Two of equal identity may share a folder."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.config.schema import EvalConfig
from agentrl.config.template import template_source, template_variables
from agentrl.envs.registry import make_env
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.heldout import HeldOutSet
from agentrl.evaluation.policy import model_folder
from agentrl.tasks.files import find_files
from agentrl.types import Task

SAMPLE = 64 << 20
"""Bytes of data files, all together, that count in their digest, beside their sizes; of each at least
``LEAST_SAMPLE``."""
LEAST_SAMPLE = 4096

SAMPLING = (
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_stop",
    "seed",
    "rollout_max_response_len",
    "rollout_max_context_len",
    "max_turns",
    "max_tool_output_tokens",
    "episode_timeout",
    "tool_timeout",
    "custom_generate_function_path",
    "dtype",
)
"""Options that may change what an episode is like."""


def identity(cfg: EvalConfig, sets: Iterable[HeldOutSet], model: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready description of what is evaluated; equal for reruns of the same command on unchanged code and data."""
    described = {
        "model": model,
        "sampling": {name: getattr(cfg.held_out, name) for name in SAMPLING},
        "episodes_per_task": cfg.n_samples_per_eval_prompt,
        "sets": {held_out.name: _of_set(held_out) for held_out in sets},
    }
    template = _template(cfg)
    if template:  # other than the model's own, as it is
        described["chat_template"] = template
    return json.loads(json.dumps(described, default=repr))


def _template(cfg: EvalConfig) -> dict[str, Any]:
    """What the options say about the chat template; the date only where the template writes one."""
    variables, source = template_variables(cfg), template_source(cfg)
    found: dict[str, Any] = {"variables": variables} if variables else {}
    if source is not None:
        found["digest"] = f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
    if cfg.chat_template_date is not None and writes_a_date(cfg):
        found["date"] = cfg.chat_template_date
    return found


def writes_a_date(cfg: EvalConfig) -> bool:
    """Whether the chat template looks at the clock."""
    texts = [template_source(cfg) or ""]
    if cfg.chat_template is None and cfg.base_url is None:
        folder = Path(model_folder(cfg) or "")
        files = [folder / "tokenizer_config.json", *sorted(folder.glob("*.jinja"))]
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    return any("strftime_now" in text for text in texts)


def _of_set(held_out: HeldOutSet) -> dict[str, Any]:
    return {
        "env": held_out.spec,
        "env_args": held_out.kwargs,
        "split": held_out.split,
        "tasks": len(held_out.tasks),
        "task_digest": task_digest(held_out.tasks),
        "code_digest": code_digest(held_out),
        "data_digest": data_digest(held_out.kwargs),
    }


def task_digest(tasks: Iterable[Task]) -> str:
    """Digest of the list of tasks: their ids, seeds and options, not where they stand in their split."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.task_id, *task_key(task)], default=repr).encode() + b"\n")
    return f"sha256:{digest.hexdigest()}"


def task_key(task: Task) -> tuple[Any, ...]:
    """What a task of one id must have in common wherever it is evaluated. Its number may differ."""
    return task.seed, task.split, {name: value for name, value in task.options.items() if name != "index"}


def code_digest(held_out: HeldOutSet) -> str:
    """Digest of the environment's source: all Python files of its package, or its file where it is in none."""
    env = make_env(held_out.spec, held_out.kwargs)
    try:
        module = sys.modules.get(type(env.unwrapped).__module__)
    finally:
        env.close()
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or not file.is_file():
        return "unknown"
    shared = module.__package__ in ("", None, "agentrl.envs")  # a folder of modules that have nothing in common
    sources = [file] if shared else sorted(file.parent.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(file.parent)}\0".encode() + source.read_bytes() + b"\0")
    return f"sha256:{digest.hexdigest()}"


def data_digest(values: dict[str, Any]) -> str | None:
    """Digest of the data and code that arguments of an environment name; None when they name none.

    That is files, folders and globs of task data, and the Python file of a function or class.
    """
    digest = hashlib.sha256()
    files = list(dict.fromkeys(_named(values)))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(max(SAMPLE // len(files), LEAST_SAMPLE)))
    return f"sha256:{digest.hexdigest()}" if files else None


def _named(value: Any) -> Iterator[Path]:
    """The files that a value of any shape names, such as a list of rewards with their weights."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _named(entry)
    elif isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value:
        yield from _files(value)


def _files(text: str) -> Iterator[Path]:
    location = text.rpartition(":")[0]
    module = sys.modules.get(location)  # what an environment uses of it, it has imported by now
    path = Path(location if location.endswith(".py") else getattr(module, "__file__", None) or text).expanduser()
    if path.is_file():
        yield path
    elif path.is_dir() or glob.has_magic(text):
        with contextlib.suppress(DataError):  # no task data there
            yield from (Path(file.path) for file in find_files(text))


PROMPT_ENV = "agentrl.envs.builtin.prompt:PromptEnv"
HOW_IT_IS_READ = ("streaming", "workers", "cache_dir")
"""Arguments of prompt data that change nothing about its tasks."""


def content(of_set: dict[str, Any]) -> dict[str, Any]:
    """What a set's description says about its content. Where task data lies is no part of it."""
    if of_set.get("env") != PROMPT_ENV:
        return of_set
    arguments = {k: v for k, v in of_set.get("env_args", {}).items() if k not in ("path", *HOW_IT_IS_READ)}
    return {**of_set, "env_args": arguments}


def refuse_other(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raises ConfigError, naming what differs, when an evaluation in ``folder`` was of something else."""
    old, new = (
        dict(_flat({**described, "sets": {name: content(s) for name, s in described.get("sets", {}).items()}}))
        for described in (before, now)
    )
    lines = [_difference(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]
    if lines:
        raise ConfigError(
            f"--output-dir {folder} holds an evaluation of something else, and is gone on with only as it was begun:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nGive the same options and code again, or another --output-dir."
        )


_WORDS = {
    "code_digest": "the environment's code has changed",
    "data_digest": "a data file of the environment has changed",
    "task_digest": "the list of tasks is another one",
    "digest": "the model is another one",
}


def _difference(key: str, before: Any, now: Any) -> str:
    part = key.rpartition("/")[2]
    if part in _WORDS:
        return f"{key}: {_WORDS[part]}"
    return f"{key}: was {before!r}, is {now!r}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
