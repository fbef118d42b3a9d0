"""``GymEnv``: any Gymnasium environment as a text environment, ``--env gym:FrozenLake-v1``."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import Error as GymnasiumError

from agentrl.envs.adapters.gymnasium_text import (
    COLOR_LEGEND,
    OBSERVATION_NAMES,
    ActionError,
    action_words,
    names_of_actions,
    observation_size,
    observation_words,
    parse_action,
    supported_action,
    without_colors,
)
from agentrl.envs.core import Env, require_number, task_index
from agentrl.errors import ConfigError
from agentrl.loading import load_module
from agentrl.tools.formats import get_parser
from agentrl.types import Message
from agentrl.values import check_choice

DEFAULT_TURNS = 100
"""Turns of an environment that has no limit of its own."""
MOST_VALUES = 64
"""Numbers of an observation up to which it is written out."""
MOST_CHARACTERS = 300
"""Of the environment's own description that the model is told."""
_SEEDS = 2**30
_ENDS_AT_THE_GOAL = ("CliffWalking", "CliffWalkingSlippery")


class GymEnv(Env):
    """A Gymnasium environment played in text.

    The system message tells the game, the actions and what observations mean; each turn the model writes
    ``action: X``, with the name or number of an action. What names no action is answered with what was wrong, and the
    game does not move.

    A task is the environment's id, a seed and reset options: train tasks have even seeds, test tasks odd ones. The
    environment's own rewards are passed on, and its own time limit truncates.

    Args:
        id: Of ``gymnasium.make``, such as ``FrozenLake-v1`` or ``my_package:MyEnv-v0``.
        max_turns: Model turns; default: the environment's own limit, or 100.
        action_names: Names of a discrete environment's actions, from its first number on.
        observation_names: What the numbers of an observation mean.
        observation: ``ansi`` (the rendering), ``text`` (the values), or ``auto`` (both, where there is a rendering).
        success: ``return``: the rewards add up to ``success_return``. ``reward``: the last reward is above 0.
            ``terminated``: the environment ended the episode before its time. ``auto``: ``return`` where
            ``success_return`` or the environment's ``reward_threshold`` says how much, else ``reward``.
        success_return: Sum of rewards from which on an episode is a success.
        invalid_action_reward: Reward of a turn that names no action.
        train_tasks: Size of the train split; None draws tasks without end.
        test_tasks: Size of the test split.
        reset_options: Handed to each reset of the environment.
        system_prompt: In place of the description made here.
        render_mode: Of this environment; ``ansi`` or None.
        call_format: The model's turns hold no tool calls: ``none``.
        **env_args: Arguments of the environment's constructor (``is_slippery=False``).

    Raises:
        ConfigError: No such environment, an argument it does not take, or a space that has no text.
    """

    def __init__(
        self,
        id: str,
        *,
        max_turns: int | None = None,
        action_names: list[str] | None = None,
        observation_names: list[str] | None = None,
        observation: str = "auto",
        success: str = "auto",
        success_return: float | None = None,
        invalid_action_reward: float = 0.0,
        train_tasks: int | None = None,
        test_tasks: int | None = None,
        reset_options: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        render_mode: str | None = None,
        call_format: str = "none",
        **env_args: Any,
    ) -> None:
        check_choice("GymEnv: observation", observation, ("auto", "ansi", "text"))
        check_choice("GymEnv: success", success, ("auto", "reward", "return", "terminated"))
        self.id, self.render_mode, self.call_format = id, render_mode, call_format
        self.name = re.sub(r"-v\d+\Z", "", id.rpartition("/")[2].rpartition(":")[2])
        self.inner, self.ansi = _made(id, observation, env_args)
        try:
            self._check_spaces()
        except ConfigError:
            self.inner.close()
            raise
        spec = self.inner.spec
        limit = spec.max_episode_steps if spec is not None else None
        self.max_turns = max_turns if max_turns is not None else limit or DEFAULT_TURNS
        self.action_names = self._action_names(action_names)
        self.observation_names = observation_names or OBSERVATION_NAMES.get(self.name)
        threshold = spec.reward_threshold if spec is not None else None
        self.success_return = success_return if success_return is not None else threshold
        self.success = self._success_rule(success)
        self.invalid_action_reward = invalid_action_reward
        self.task_counts = {"train": train_tasks, "test": test_tasks}
        self.reset_options = reset_options
        self.system_prompt = system_prompt
        self._parser = get_parser("none")
        sampler = copy.deepcopy(self.inner.action_space)
        sampler.seed(0)
        self.example_actions = tuple(f"action: {observation_words(sampler.sample())}" for _ in range(6))

    def check_settings(self) -> None:
        super().check_settings()
        require_number(self, "invalid_action_reward", at_least=-1e9)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a game: ``options`` may hold ``split`` and ``index``; what else it holds is for the environment."""
        super().reset(seed=seed)
        split = self.split_of(options)
        index = task_index(self, split, options, endless=_SEEDS)
        given = {k: v for k, v in (options or {}).items() if k not in ("split", "index", "call_format")}
        inner_options = {**(self.reset_options or {}), **given}
        value, info = self.inner.reset(seed=2 * index + (split != "train"), options=inner_options or None)
        self._return = 0.0
        observation, colored = self._observe(value, info)
        messages = [
            Message(role="system", content=self._rules(colored) if self.system_prompt is None else self.system_prompt),
            Message(role="user", content=observation),
        ]
        return observation, {"task_id": f"{self.id}/{split}/{index}", "messages": messages}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays the action that the text names; none: says what was wrong."""
        said = self._parser.read(action).content
        try:
            move = parse_action(said, self.inner.action_space, self.action_names)
        except ActionError as error:
            return f"Nothing was done: {error}. {self._how()}", *self._unmoved()
        value, reward, terminated, truncated, info = self.inner.step(move)
        reward = float(reward)
        self._return += reward
        out: dict[str, Any] = {"rewards": {"game": reward}}
        if terminated or truncated or self._turn >= self.max_turns:
            out["success"] = self._succeeded(reward, terminated=bool(terminated))
        return self._observe(value, info)[0], reward, bool(terminated), bool(truncated), out

    def close(self) -> None:
        """Closes the environment inside."""
        self.inner.close()

    # -- the task --------------------------------------------------------------------------------

    def _unmoved(self) -> tuple[float, bool, bool, dict[str, Any]]:
        penalty = float(self.invalid_action_reward)
        info: dict[str, Any] = {"rewards": {"invalid_action": penalty}} if penalty else {}
        if self._turn >= self.max_turns:
            info["success"] = self._succeeded(0.0, terminated=False)
        return penalty, False, False, info

    def _succeeded(self, reward: float, *, terminated: bool) -> bool:
        if self.success == "return":
            return self._return >= (self.success_return or 0.0)
        return terminated if self.success == "terminated" else reward > 0

    def _success_rule(self, success: str) -> str:
        if success == "auto" and self.success_return is not None:
            return "return"
        if success == "return" and self.success_return is None:
            raise ConfigError(f"{self.id} has no reward_threshold: success='return' needs success_return.")
        if success != "auto":
            return success
        return "terminated" if self.name in _ENDS_AT_THE_GOAL else "reward"

    # -- words -----------------------------------------------------------------------------------

    def _rules(self, colored: bool) -> str:
        about = _about(self.inner.unwrapped)
        actions = action_words(self.inner.action_space, self.action_names)
        legend = [COLOR_LEGEND] if colored else []
        return "\n".join(
            [
                f"You play {self.name}. {about}".strip(),
                f"In each turn choose one action: {actions}.",
                *legend,
                self._how(),
            ]
        )

    def _how(self) -> str:
        example = "X"
        if self.action_names:
            example = self.action_names[0]
        elif not isinstance(self.inner.action_space, gymnasium.spaces.Text):
            space = self.inner.action_space
            low = getattr(space, "start", getattr(space, "low", 0))
            shape = space.shape or ()
            first = np.broadcast_to(np.nan_to_num(low, neginf=0.0, posinf=0.0), shape)
            example = observation_words(first)
        return f"End your turn with a line such as `action: {example}`."

    def _observe(self, value: Any, info: dict[str, Any]) -> tuple[str, bool]:
        parts, colored = [], False
        if self.ansi:
            drawn = self.inner.render()
            text, colored = without_colors(drawn if isinstance(drawn, str) else str(drawn))
            parts.append(text)
        if not self.ansi or self.observation_names:
            decode = getattr(self.inner.unwrapped, "decode", None)
            if callable(decode) and isinstance(value, (int, np.integer)):
                value = list(decode(int(value)))
            parts.append(observation_words(value, self.observation_names))
        mask = info.get("action_mask")
        if self.action_names and mask is not None and len(mask) == len(self.action_names):
            allowed = [name for name, on in zip(self.action_names, mask, strict=True) if on]
            parts.append(f"possible actions: {', '.join(allowed)}")
        return "\n".join(parts), colored

    def _action_names(self, given: list[str] | None) -> tuple[str, ...] | None:
        space = self.inner.action_space
        if given is None:
            return names_of_actions(self.inner.unwrapped, self.name)
        if not isinstance(space, gymnasium.spaces.Discrete) or len(set(given)) != space.n:
            raise ConfigError(f"{self.id}: action_names are {given!r}; its actions are {action_words(space, None)}.")
        return tuple(map(str, given))

    def _check_spaces(self) -> None:
        if not supported_action(self.inner.action_space):
            raise ConfigError(
                f"gym:{self.id}: actions in {self.inner.action_space!r:.120} cannot be named in text; discrete, "
                "multi-discrete, box and text spaces can. Write an agentrl.Env around it."
            )
        size = observation_size(self.inner.observation_space)
        if not self.ansi and (size is None or size > MOST_VALUES):
            raise ConfigError(
                f"gym:{self.id}: observations in {self.inner.observation_space!r:.120} are not text, and there is no "
                f"`ansi` rendering; spaces of at most {MOST_VALUES} values can be written out. Write an agentrl.Env "
                "around it that says what is to be seen."
            )


def _made(id: str, observation: str, env_args: dict[str, Any]) -> tuple[gymnasium.Env[Any, Any], bool]:
    """The environment, and whether it renders text."""
    module, _, known_as = id.rpartition(":")
    if module:  # importing it registers what it has
        load_module(module, f"gym:{id}")
    try:
        env = gymnasium.make(known_as, **env_args)
        ansi = observation != "text" and "ansi" in env.metadata.get("render_modes", ())
        if ansi:
            env.close()
            env = gymnasium.make(known_as, **env_args, render_mode="ansi")
    except (GymnasiumError, ImportError, TypeError) as error:
        raise ConfigError(f"gym:{id} cannot be made: {error}") from error
    if observation == "ansi" and not ansi:
        raise ConfigError(f"gym:{id} has no `ansi` rendering; leave observation at 'auto'.")
    if isinstance(env.unwrapped, Env):
        raise ConfigError(f"gym:{id} is a text environment already: use --env {id}.")
    return env, ansi


def _about(env: gymnasium.Env[Any, Any]) -> str:
    """The first sentences of the environment's docstring that are not a heading, without links."""
    text = inspect.cleandoc(type(env).__doc__ or "")
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(paragraph.split()))
        if words and not words.startswith(("#", "|", "-", "!", "<", "```", "..")):
            short = ""
            for sentence in re.split(r"(?<=[.!?])\s+", words):
                if len(short) + len(sentence) > MOST_CHARACTERS:
                    break
                short = f"{short} {sentence}".strip()
            return short
    return ""
