"""Variables of a chat template, from a command line or a task."""

from __future__ import annotations

from typing import Any

from agentrl.errors import ConfigError

_TAKEN = {
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "strftime_now"),
}


def checked_variables(variables: Any, where: str) -> dict[str, Any]:
    """``variables`` as they are.

    Raises:
        ConfigError: they are no object, or hold what the template is given anyway; the text begins with ``where``.
    """
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        example = '{"enable_thinking": false}'
        raise ConfigError(f"{where}: a JSON object is expected, as in {example}, got {variables!r:.80}")
    taken = sorted(_TAKEN & variables.keys())
    if taken:
        raise ConfigError(f"{where} sets {taken[0]!r}, which is no variable of a template but how it is called")
    return variables
