"""``Wrapper``: changes what an environment says or takes, under the async loop and under plain Gymnasium alike."""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from agentrl.concurrency.threads import run_blocking
from agentrl.envs.authoring import PAIRS, SKIP, complete_pair
from agentrl.envs.core import Env, checked_start, checked_step, say_how_it_ended
from agentrl.types import Message

Start = tuple[str, dict[str, Any]]
Transition = tuple[str, float, bool, bool, dict[str, Any]]


class Wrapper(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Base class of wrappers around agent environments.

    A subclass overrides ``step`` or ``async def astep``, ``reset`` or ``areset``, ``close`` or
    ``aclose``, and calls ``super()`` in the same style; the other of each pair is made of it, as for
    :class:`~agentrl.envs.core.Env`. ``info["messages"]`` is what the model reads: a subclass that
    changes only the observation gets the messages changed to match.

    Public attributes that a wrapper does not have (``splits``, ``num_tasks``, ``max_turns``, ``row``) are
    those of the environment it wraps.

    Args:
        env: An :class:`~agentrl.envs.core.Env`, or a wrapper around one; Gymnasium's own wrappers too.

    Example:
        >>> import agentrl
        >>> class Echo(agentrl.Env):
        ...     def reset(self, *, seed=None, options=None):
        ...         return "Say hello.", {}
        ...     def step(self, action):
        ...         return action, 0.0, False, False, {}
        >>> class Upper(Wrapper):
        ...     def step(self, action):
        ...         observation, *rest = super().step(action)
        ...         return observation.upper(), *rest
        >>> env = Upper(Echo())
        >>> observation, info = env.reset(seed=0)
        >>> observation, *_, info = env.step("hello")
        >>> observation, info["messages"]
        ('HELLO', [{'role': 'user', 'content': 'HELLO'}])
    """

    _said: tuple[str, list[Message]]  # what the wrapped environment returned last
    _observation: str = ""  # what this wrapper returned last
    _phase: str = "new"  # new, running, over, closed

    def __new__(cls, *args: Any, **kwargs: Any) -> Wrapper:
        self = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            given = dict(signature.bind(self, *args, **kwargs).arguments)
        except TypeError:  # a copy, or a call that the constructor refuses in its own words
            return self
        for parameter in [*signature.parameters.values()][:2]:  # itself and the environment
            given.pop(parameter.name, None)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(parameter.name, {}))
        self._saved_kwargs = given  # for `spec`, by which Gymnasium makes the same again
        return self

    def __init__(self, env: gymnasium.Env[str, str]) -> None:
        super().__init__(env)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for pair in PAIRS:
            complete_pair(cls, *pair)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "env" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.env.get_wrapper_attr(name)

    @property
    def call_format(self) -> str:
        """How the model writes tool calls."""
        return cast(Env, self.unwrapped).call_format

    @call_format.setter
    def call_format(self, value: str) -> None:
        cast(Env, self.unwrapped).call_format = value

    # -- what authors override ---------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Resets the wrapped environment."""
        return self._heard(checked_start(self.env.reset(seed=seed, options=options), self._inner_name("reset")))

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """:meth:`reset` for callers on an event loop."""
        result = await self._inner("reset", seed=seed, options=options)
        return self._heard(checked_start(result, self._inner_name("reset")))

    def step(self, action: str) -> Transition:
        """Steps the wrapped environment."""
        return self._heard(checked_step(self.env.step(action), self._inner_name("step")))

    async def astep(self, action: str) -> Transition:
        """:meth:`step` for callers on an event loop."""
        return self._heard(checked_step(await self._inner("step", action), self._inner_name("step")))

    def close(self) -> None:
        """Closes the wrapped environment. May be called more than once; runs once."""
        self.env.close()

    async def aclose(self) -> None:
        """:meth:`close` for callers on an event loop."""
        await self._inner("close")

    # -- around the author's code ------------------------------------------------------------------

    async def _inner(self, name: str, *args: Any, **kwargs: Any) -> Any:
        asynchronous = getattr(self.env, f"a{name}", None)
        if asynchronous is not None:
            return await asynchronous(*args, **kwargs)
        return await run_blocking(getattr(self.env, name), *args, **kwargs)

    def _inner_name(self, method: str) -> str:
        return f"{type(self.env).__name__}.{method}"

    def _heard(self, result: Any) -> Any:
        """Keeps what the wrapped environment said, brought in line with what Gymnasium's own wrappers made of it."""
        observation, info = result[0], result[-1]
        layer = self.env
        while not isinstance(layer, (Env, Wrapper)) and isinstance(layer, gymnasium.Wrapper):
            layer = layer.env
        before = layer._observation if isinstance(layer, (Env, Wrapper)) else observation
        if "messages" not in info:
            info["messages"] = [Message(role="user", content=observation)] if observation else []
        elif before != observation:
            info["messages"] = retold(info["messages"], before, observation)
        self._said = observation, copy.deepcopy(info["messages"])
        return result

    def _settled(self, observation: str, info: dict[str, Any]) -> None:
        """Messages follow an observation that the author changed alone."""
        before, messages = self._said
        if info.setdefault("messages", messages) == messages and observation != before:
            info["messages"] = retold(messages, before, observation)
        self._observation = observation

    def _before_reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._said = "", []
        if self._phase != "closed":
            self._phase = "new"

    def _after_reset(self, result: Any) -> Start:
        observation, info = checked_start(result, f"{type(self).__name__}.reset")
        self._settled(observation, info)
        self._phase = "running"
        return observation, info

    def _before_step(self, action: str) -> None:
        if self._phase != "running":
            raise ResetNeeded(f"{type(self).__name__}.step was called on an episode that is {self._phase}: call reset.")
        self._said = "", []  # a wrapper may answer a turn itself

    def _after_step(self, result: Any) -> Transition:
        observation, reward, terminated, truncated, info = checked_step(result, f"{type(self).__name__}.step")
        self._settled(observation, info)
        say_how_it_ended(info, terminated, truncated)
        if terminated or truncated:
            self._phase = "over"
        return observation, reward, terminated, truncated, info

    def _before_close(self) -> Any:
        if self._phase == "closed":
            return SKIP
        self._phase = "closed"
        return None

    def _after_close(self, result: Any) -> None:
        return None


for _pair in PAIRS:
    complete_pair(Wrapper, *_pair)


def retold(messages: list[Message], before: str, after: str) -> list[Message]:
    """The messages of an observation that was ``before`` and is now ``after``.

    Text put before or after the observation goes to the first or the last of its messages. An observation that
    was replaced takes the place of their text: each tool result keeps its message, since chat templates
    want one for each call.
    """
    told = copy.deepcopy(list(messages))
    own = [m for m in told if m.get("role") != "system"]
    if own and own[-1].get("content") == before:
        own = own[-1:]
    if not own:
        return [*told, Message(role="user", content=after)] if after else told
    if after.endswith(before) and before:
        own[0]["content"] = after.removesuffix(before) + own[0].get("content", "")
    elif after.startswith(before) and before:
        own[-1]["content"] = own[-1].get("content", "") + after.removeprefix(before)
    elif len(own) == 1 or all(m.get("role") == "tool" for m in own):
        for message, text in zip(own, [after, *[""] * (len(own) - 1)], strict=True):
            message["content"] = text
    else:
        system = [m for m in told if m.get("role") == "system"]
        return [*system, Message(role="user", content=after)]
    return told
