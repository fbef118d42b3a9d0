"""From a command line to a configuration: layers, what follows from what, one validation.

Later layers replace earlier ones: general defaults, the model's preset, the run that ``--load`` (or ``--run``, or
``--load-debug-rollout-data``) names, the file behind ``--config``, flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.config.derive import DERIVED, derive, split_names
from agentrl.config.options import options
from agentrl.config.parse import Given, parse_flags, parse_mapping, read_file
from agentrl.config.presets import BEYOND, DEMO, HALF, OTHERWISE, STEPS, SUPERVISED, TUNED_TO, preset
from agentrl.config.schema import Config, EvalConfig
from agentrl.config.serialize import OWNER, read_run_config, run_folder_of
from agentrl.config.validate import validate, value_problems
from agentrl.errors import ConfigError
from agentrl.families.torch_dist import advice, is_megatrons

T = TypeVar("T")
AnyConfig = TypeVar("AnyConfig", Config, EvalConfig)


@dataclass(frozen=True)
class Resolved(Generic[AnyConfig]):
    """A configuration and, for each option that has not its general default, where its value came from."""

    config: AnyConfig
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was accepted and has no effect, a sentence each."""


def load_config(argv: Sequence[str]) -> Config:
    """Options of ``agentrl train`` from its arguments. Raises ConfigError."""
    return resolve(Config, argv).config


def load_eval_config(argv: Sequence[str]) -> EvalConfig:
    """Options of ``agentrl eval`` from its arguments. Raises ConfigError."""
    return resolve(EvalConfig, argv).config


def load_options(option_class: type[T], argv: Sequence[str]) -> T:
    """Options of a small command, declared as a dataclass like the schema's sections; where they are those of a run and
    more, over the model's preset. Raises ConfigError."""
    flags, config_file = parse_flags(option_class, argv)
    if config_file is not None:
        flags.problems.append("--config is taken by `agentrl train` and `agentrl eval` only.")
    options = _complete(option_class, [flags])
    of_model = _preset_layer(option_class, [flags]) if isinstance(options, Config) else None
    return _complete(option_class, [of_model, flags]) if of_model else options


def resolve(config_class: type[AnyConfig], argv: Sequence[str]) -> Resolved[AnyConfig]:
    """As :func:`load_config`, with the source of each value."""
    flags, config_file = parse_flags(config_class, argv)
    layers = [flags]
    if config_file is not None:
        try:
            layers.insert(0, parse_mapping(config_class, read_file(config_file), config_file))
        except ConfigError as error:  # it cannot be read at all
            flags.problems.append(str(error))
    _complete(config_class, layers)
    for made in (_run_layer, _preset_layer):
        if (found := made(config_class, layers)) is not None:
            layers.insert(0, found)
    merged = Given()
    for layer in layers:
        for name, value in layer.values.items():
            if isinstance(value, tuple):  # a later list of task files replaces an earlier one
                merged.values.pop(name, None)
            merged.put(name, value, layer.sources[name])
    config = derive(config_class(**merged.values))
    kind: type = config_class
    fields = options(kind)
    deliberate = {
        name: source
        for name, source in merged.sources.items()
        if source not in ("preset", "run") and merged.values[name] != fields[name].default
    }
    validate(config, deliberate)
    return Resolved(config, merged.sources, tuple(note for layer in layers for note in layer.notes))


def _complete(config_class: type[T], layers: list[Given]) -> T:
    """Options of these layers alone, over the defaults.
    Raises ConfigError: all that is wrong in itself, in any of them: names, and values of the wrong type or out of
    range."""
    values = {name: value for layer in layers for name, value in layer.values.items()}
    config = config_class(**values)
    problems = [problem for layer in layers for problem in layer.problems] + list(value_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _last(layers: list[Given], name: str) -> Any:
    return next((layer.values[name] for layer in reversed(layers) if name in layer.values), None)


def _run_layer(config_class: type, layers: list[Given]) -> Given | None:
    """The configuration of the run to go on from, to evaluate, or whose rollouts are trained on again."""
    training = config_class is Config
    path, stored = _last(layers, "load" if training else "run"), _last(layers, "load_debug_rollout_data")
    if path is None and stored is None:
        return None
    if (folder := run_folder_of(path or stored)) is None:
        if not training:
            raise ConfigError(f"--run {path}: not a run folder (no config.json of a training run in it)")
        if path is not None:
            _check_without_run(Path(path), layers)
        return None
    of_run = read_run_config(folder)
    values = {name: value for name, value in of_run.items() if training or name in options(config_class)}
    elsewhere = _last(layers, "output_dir")
    forks = path is None or (elsewhere is not None and Path(elsewhere).resolve() != folder.resolve())
    # What a run saves and exports to is its own: one that forks from it must not replace that.
    left_out = ["load", "output_dir", *(("save", "save_hf") if forks else ())]
    if stored is not None:
        left_out += ["debug_rollout_only", "eval_interval", "best_metric"]
    if not training:
        if any(_last(layers, name) for name in ("env", "prompt_data")):  # an evaluation of other environments
            left_out += ["env", "env_args", "prompt_data", "eval_env", "eval_own_split", "eval_prompt_data"]
            left_out += BEYOND if values.get("hf_checkpoint") == DEMO else ()
        for name in ("max_response_len", "max_context_len"):
            if _last(layers, f"rollout_{name}") is not None:  # said for this evaluation
                left_out.append(f"eval_{name}")
        values["eval_stop"] = of_run.get("eval_stop") or of_run.get("rollout_stop") or ()
    values = {name: value for name, value in values.items() if name not in left_out}
    given = parse_mapping(config_class, values, str(folder / "config.json")).readable()
    if training:
        if path is not None:
            given.values["output_dir"] = str(folder)
        for name, roots in DERIVED.items():
            if any(root in layer.values for layer in layers for root in roots):
                given.values.pop(name, None)
    given.sources = dict.fromkeys(given.values, "run")
    return given


def _check_without_run(path: Path, layers: list[Given]) -> None:
    """``--load`` of what is no run: a folder that this run is to fill (it starts afresh), or a checkpoint alone.
    Raises ConfigError: it is neither."""
    targets = [Path(t).resolve() for name in ("save", "output_dir") if (t := _last(layers, name))]
    used = any((path / name).exists() for name in ("config.json", OWNER)) or any(path.glob("step_*"))
    if is_megatrons(path):
        raise ConfigError(
            f"--load takes a run of agentrl. {advice(str(path), _last(layers, 'hf_checkpoint'))} (as --hf-checkpoint: "
            "a new run begins with its weights)"
        )
    if path.resolve() in targets and not used:
        for layer in layers:
            layer.values.pop("load", None)
    elif not path.exists():
        raise ConfigError(
            f"--load: no such run folder or checkpoint: {path}. To start a run there and go on with the same command, "
            f"give --save {path} too."
        )
    elif not any(_last(layers, name) for name in ("env", "prompt_data", "train_data", "sft_from")):
        raise ConfigError(
            f"--load {path}: no config.json of a run that can be read is in it or above it, so the run's options are "
            "not known. Restore config.json from a copy, or give the options again (--env NAME and so on): the run "
            "then goes on in a new folder."
        )


def _preset_layer(config_class: type, layers: list[Given]) -> Given | None:
    """The preset of the model, where it has one, and those of supervised training and of half a run; no model named is
    the embedded one, unless a server has it."""
    name = _last(layers, "hf_checkpoint") or DEMO
    if _last(layers, "base_url") is not None:
        return None
    env, others = _last(layers, "env") or (), _last(layers, "eval_env") or ()
    environments = split_names((env,) if isinstance(env, str) else env) + split_names(others)
    given = preset(name, environments)
    if name == DEMO and set(environments) == {TUNED_TO} and not any(_last(layers, each) for each in OTHERWISE):
        given |= STEPS
    given |= {"hf_checkpoint": name} if given else {}
    given |= SUPERVISED if _last(layers, "loss_type") == "sft_loss" else {}
    given |= HALF if _last(layers, "debug_rollout_only") or _last(layers, "load_debug_rollout_data") else {}
    if not given:
        return None
    values = {key: value for key, value in given.items() if key in options(config_class)}
    return Given(values, dict.fromkeys(values, "preset"))
