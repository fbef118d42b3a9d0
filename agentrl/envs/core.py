"""``Env``: the Gymnasium environment contract for text agents, written sync or async.

An author defines ``reset`` or ``areset`` and ``step`` or ``astep``; the other of each pair is made
here, and both give the same transitions. What every environment owes its callers (seeding, the turn
budget, a complete ``info``) is done around the author's code, once per outermost call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils import seeding

from agentrl.concurrency.threads import release_thread, run_blocking
from agentrl.envs.authoring import PAIRS, SKIP, complete_pair, taking_settings, written
from agentrl.errors import ConfigError, EnvError, shown
from agentrl.rewards.number import reward_number
from agentrl.spaces import Unicode
from agentrl.tasks.source import check_split
from agentrl.types import Message, StopReason
from agentrl.values import check_number

_SPACE = Unicode()


class Env(gymnasium.Env[str, str]):
    """Base class of agent environments: model text in, new environment text out.

    Subclasses define ``reset`` (or ``async def areset``) and ``step`` (or ``async def astep``).
    Blocking code is run in a thread when the async entry point is used, so it never holds up other
    episodes. One instance serves one episode at a time.

    ``info`` after a reset holds ``task_id``, ``messages`` (the conversation to start from), and if
    there are any ``tools`` (OpenAI function schemas) and ``stop`` (stop strings); ``category`` names the
    kind or difficulty of the task, for scores by category. After a step it
    holds ``messages`` (the new ones), and at the end ``stop_reason`` and ``success``; ``rewards`` and
    ``tool_calls`` where the environment has them. What an author leaves out is filled in. Keep
    ``info`` deterministic: no clock, no uuid, no NaN.

    Raise :class:`agentrl.errors.InfraError` for trouble that is not the model's fault. Never raise
    because of what the model wrote: answer it with an observation.

    Example:
        >>> class Echo(Env):
        ...     def reset(self, *, seed=None, options=None):
        ...         return "Say hello.", {}
        ...     def step(self, action):
        ...         return "", float("hello" in action), True, False, {}
        >>> env = Echo()
        >>> env.reset(seed=1)[1]["messages"]
        [{'role': 'user', 'content': 'Say hello.'}]
        >>> env.step("hello")[1:4]
        (1.0, True, False)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}
    observation_space = _SPACE
    action_space = _SPACE

    splits: tuple[str, ...] = ("train", "test")
    """Names of the task sets ``options["split"]`` may ask for."""
    task_counts: Mapping[str, int | None] = {}
    """Number of tasks by split, as :meth:`num_tasks` has it; those of a split that is not named have no end."""
    max_turns: int = 8
    """Model turns after which the episode is truncated with ``stop_reason`` ``max_turns``."""
    call_format: str = "auto"
    """How the model writes tool calls (:func:`agentrl.tools.get_parser`); ``auto``: as ``options["call_format"]`` of
    the reset says, which the episode loop takes from the model's chat template."""

    trusted_roles: Sequence[str] = ("system", "developer", "assistant")
    """Roles of the first messages whose text is the author's own, so that a control token of the model written in it
    (``<think>``) is one: instructions and examples. Add ``user`` only where nobody else wrote into the prompts. What
    tools, users and other agents say during the episode can never hold one."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables of the model's chat template for this environment's tasks, over those of the run:
    ``{"enable_thinking": False}``."""

    example_actions: tuple[str, ...] = ()
    """Some turns that make sense in an episode, beside tool calls: ``agentrl env check`` plays them."""

    settings: ClassVar[tuple[str, ...]] = (
        "max_turns",
        "call_format",
        "render_mode",
        "trusted_roles",
        "template_kwargs",
    )
    """Attributes every constructor takes as keyword arguments, named in its signature or not."""

    _turn: int = 0
    _phase: str = "new"  # new, running, over, closed
    _resets_since_seed: int = 0
    _options: dict[str, Any]
    _transcript: list[Message]
    _observation: str = ""  # what the last reset or step returned

    def __init__(self, **settings: Any) -> None:
        unknown = sorted(set(settings) - set(self.settings))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got unexpected arguments {unknown}; it takes {sorted(self.settings)}."
            )
        for name, value in settings.items():
            setattr(self, name, value)
        if type(self).__init__ is Env.__init__:
            self._made()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = taking_settings(cls.__init__)  # type: ignore[method-assign]
        for pair in PAIRS:
            complete_pair(cls, *pair)

    # -- what authors define ---------------------------------------------------------------------

    def num_tasks(self, split: str) -> int | None:
        """Number of tasks in ``split``; None when they are drawn without end from the seed."""
        return self.task_counts.get(split)

    def id_of_task(self, split: str, index: int) -> str | None:
        """What names task ``index`` of ``split`` wherever it stands in the list; None where its number does."""
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Same seed, same task and same randomness. None goes on with ``self.np_random``.
            options: ``split`` (default: the first of ``splits``) and ``index`` (a task of it).

        Returns:
            The first observation and ``info``.
        """
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one model turn.

        Args:
            action: What the model wrote, any text at all.

        Returns:
            ``(observation, reward, terminated, truncated, info)``; the observation is the new text only.

        Raises:
            InfraError: Something outside the episode failed.
            gymnasium.error.ResetNeeded: The episode is over or was never started.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither `step` nor `astep`.")

    def close(self) -> None:
        """Frees what the environment holds. May be called more than once; runs once."""

    def render(self) -> str:
        """The conversation so far as text (render mode ``ansi``)."""
        return "\n".join(f"{m['role']}: {m.get('content', '')}" for m in getattr(self, "_transcript", []))

    # -- the async entry points; a subclass that defines the blocking one gets its own made of it --

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """:meth:`reset` for callers on an event loop."""
        return await run_blocking(written(Env.reset), self, seed=seed, options=options)

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """:meth:`step` for callers on an event loop."""
        return await run_blocking(written(Env.step), self, action)

    async def aclose(self) -> None:
        """:meth:`close` for callers on an event loop."""
        await run_blocking(written(Env.close), self)

    # -- around the author's code ----------------------------------------------------------------

    def split_of(self, options: dict[str, Any] | None) -> str:
        """The split ``options`` ask for. Raises ConfigError: the environment has no such split."""
        split = (options or {}).get("split", self.splits[0])
        check_split(self.splits, split, type(self).__name__)
        return split

    def check_settings(self) -> None:
        """Looks at the settings before each episode; subclasses with settings of their own extend it.
        Raises ConfigError: one has an impossible value."""
        require_number(self, "max_turns", at_least=1, whole=True)

    def _made(self) -> None:
        """Called when the constructor, the outermost one, is done."""

    def _before_reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if self._phase == "closed":
            raise ClosedEnvironmentError(f"{type(self).__name__} was closed; make a new one.")
        self.check_settings()
        if seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
            self._resets_since_seed = 0
        else:
            self._resets_since_seed += 1
        self._options = dict(options or {})
        self._turn = 0
        self._phase = "new"

    def _after_reset(self, result: Any) -> tuple[str, dict[str, Any]]:
        observation, info = checked_start(result, f"{type(self).__name__}.reset")
        info.setdefault("messages", [{"role": "user", "content": observation}])
        info.setdefault("task_id", self._default_task_id())
        if tuple(self.trusted_roles) != Env.trusted_roles:
            info.setdefault("trusted_roles", list(self.trusted_roles))
        if self.template_kwargs:
            info.setdefault("template_kwargs", dict(self.template_kwargs))
        self._phase = "running"
        self._transcript = list(info["messages"])
        self._observation = observation
        return observation, info

    def _default_task_id(self) -> str:
        split, index = self._options.get("split", self.splits[0]), self._options.get("index")
        if index is not None:
            return f"{split}/{index}"
        later = f".{self._resets_since_seed}" if self._resets_since_seed else ""
        return f"{split}/seed-{self.np_random_seed}{later}"

    def _before_step(self, action: str) -> None:
        if self._phase != "running":
            raise ResetNeeded(f"{type(self).__name__}.step was called on an episode that is {self._phase}: call reset.")
        if not isinstance(action, str):
            raise TypeError(f"{type(self).__name__}.step takes the model's text, got {shown(action)}.")
        self._turn += 1
        self._transcript.append({"role": "assistant", "content": action})

    def _after_step(self, result: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = checked_step(result, f"{type(self).__name__}.step")
        if not terminated and not truncated and self._turn >= self.max_turns:
            truncated = True
            info.setdefault("stop_reason", str(StopReason.MAX_TURNS))
        if terminated or truncated:
            say_how_it_ended(info, terminated, truncated)
        if "messages" not in info:
            info["messages"] = [{"role": "user", "content": observation}] if observation else []
        self._transcript.extend(info["messages"])
        self._observation = observation
        if terminated or truncated:
            self._phase = "over"
        return observation, reward, terminated, truncated, info

    def _before_close(self) -> Any:
        if self._phase == "closed":
            return SKIP
        self._phase = "closed"
        return None

    def _after_close(self, result: Any) -> None:
        release_thread(self)


for _pair in PAIRS:
    complete_pair(Env, *_pair)


def checked_start(result: Any, where: str) -> tuple[str, dict[str, Any]]:
    """What a ``reset`` returned, of the right form.
    Raises EnvError: it is not; the text names ``where`` it came from."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(f"{where} must return (observation, info), got {shown(result)}.")
    observation, info = result
    _check_types(where, observation, info)
    return observation, info


def checked_step(result: Any, where: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """What a ``step`` returned, of the right form, with the reward as a float.
    Raises EnvError: it is not of that form; the text names ``where`` it came from."""
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(f"{where} must return (observation, reward, terminated, truncated, info), got {shown(result)}.")
    observation, reward, terminated, truncated, info = result
    _check_types(where, observation, info)
    return observation, reward_number(reward, f"the reward of {where}"), bool(terminated), bool(truncated), info


def say_how_it_ended(info: dict[str, Any], terminated: bool, truncated: bool) -> None:
    """Fills in what the ``info`` of a last step owes: ``stop_reason``, and no success of a truncated episode."""
    if terminated:
        info.setdefault("stop_reason", str(StopReason.DONE))
    elif truncated:
        info.setdefault("stop_reason", str(StopReason.ENV_TRUNCATED))
        info.setdefault("success", False)


def task_index(
    env: Any,
    split: str,
    options: dict[str, Any] | None,
    rng: np.random.Generator | None = None,
    *,
    endless: int = 2**31,
) -> int:
    """The number of the task of ``split`` that ``options`` ask for, or one drawn from ``rng`` (``env.np_random``).

    ``endless``: how many numbers a split has that has no end.

    Raises ConfigError: there is no task of that number, or none at all."""
    name, count = type(env).__name__, env.num_tasks(split)
    numbers = endless if count is None else count
    if count == 0:
        others = [other for other in env.splits if env.num_tasks(other) != 0]
        has = f"It has some in {', '.join(map(repr, others))}. " if others else ""
        raise ConfigError(
            f"{name} has no tasks in split {split!r}. {has}Name another split, or give it some: `tasks`, or an "
            "argument of the environment that `agentrl env show` lists."
        )
    index = (options or {}).get("index")
    if index is None:
        return int((rng or env.np_random).integers(numbers))
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise ConfigError(
            f"{name}.reset: options['index'] is {index!r:.60} ({type(index).__name__}); the number of a task is "
            "expected, such as 3."
        )
    if not 0 <= index < numbers:
        limit = f"; split {split!r} has {count}" if count is not None else ""
        raise ConfigError(f"{name} has no task {index}{limit}.")
    return int(index)


def require_number(env: Env, name: str, *, at_least: float, whole: bool = False) -> None:
    """Refuses a setting that is not a finite number of at least ``at_least``.
    Raises ConfigError: names the environment, the setting, its value and what is expected."""
    check_number(f"{type(env).__name__}.{name}", getattr(env, name), at_least, whole=whole)


def _check_types(where: str, observation: Any, info: Any) -> None:
    if not isinstance(observation, str):
        raise EnvError(f"{where} must return its observation as str, got {shown(observation)}.")
    if not isinstance(info, dict):
        raise EnvError(f"{where} must return its info as dict, got {shown(info)}.")
