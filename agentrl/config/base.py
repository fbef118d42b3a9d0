"""What the configurations of `agentrl train` and `agentrl eval` have in common besides their options."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Section:
    """Options as a frozen dataclass."""

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``; nothing is validated or derived again."""
        return dataclasses.replace(self, **changes)

    def section(self, kind: type[T]) -> T:
        """The options of one section alone, such as ``OptimizerOptions``: what their reader is handed."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})


class OptionSet(Section):
    """What the configurations of both commands can do."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready copy of all options; the embedded model is written as ``"demo"``."""
        from agentrl.config.serialize import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Inverse of :meth:`to_dict`. Raises ConfigError on an unknown key or a value of the wrong type."""
        from agentrl.config.serialize import from_dict

        return from_dict(cls, values)

    @property
    def held_out(self) -> Any:
        """A copy whose limits and stop strings of episodes are those of evaluation."""
        return self.replace(
            rollout_max_response_len=self.eval_max_response_len or self.rollout_max_response_len,
            rollout_max_context_len=self.eval_max_context_len or self.rollout_max_context_len,
        )

    @property
    def longest_context(self) -> int:
        """Most tokens of an episode, of training or evaluation."""
        return max(self.rollout_max_context_len, self.eval_max_context_len or 0)

    def env_spec(self) -> tuple[str, dict[str, Any]]:
        """``(spec, kwargs)`` for :func:`agentrl.make`: the environment, or prompt data as one."""
        if self.prompt_data is None:
            return self.env, self.arguments_of(None)
        spec, kwargs = self.prompt_env_spec(self.prompt_data)
        return spec, {**kwargs, **self.arguments_of(None)}

    def arguments_of(self, name: str | None) -> dict[str, Any]:
        """What ``--env-arg NAME.KEY=VALUE`` gave the environment ``name``; None: what was given without a name."""
        if name is None:
            return {key: value for key, value in self.env_args.items() if "." not in key}
        start = name + "."
        return {key.removeprefix(start): value for key, value in self.env_args.items() if key.startswith(start)}

    def prompt_env_spec(self, path: str) -> tuple[str, dict[str, Any]]:
        """``(spec, kwargs)`` of the environment over a prompt file (--prompt-data, --eval-prompt-data)."""
        kwargs = {
            "path": path,
            "input_key": self.input_key,
            "label_key": self.label_key,
            "metadata_key": self.metadata_key,
            "apply_chat_template": self.apply_chat_template,
            "reward": self.custom_rm_path or self.rm_type,
        }
        if self.rm_url is not None:
            kwargs["rm_url"] = self.rm_url
        if self.streaming_data:
            kwargs |= {"streaming": True, "workers": self.num_data_workers}
        return "agentrl.envs.builtin.prompt:PromptEnv", kwargs
