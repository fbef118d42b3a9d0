"""Calls as the models of each family write them."""

from __future__ import annotations

import json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find a page.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "page": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "filter": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CLOSE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_CALL, K_ARGS, K_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def glm(name, arguments):
    lines = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
        for k, v in arguments.items()
    ]
    return f"\n<tool_call>{name}\n{''.join(lines)}</tool_call>"


def glm47(name, arguments):
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    pairs = [f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items()]
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def coder(name, arguments):
    blocks = [
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in arguments.items()
    ]
    return f"\n<tool_call>\n<function={name}>\n{''.join(blocks)}</function>\n</tool_call>"


def calls_in(name, *calls):
    """``calls`` as a model of this family writes them."""
    texts = [(n, json.dumps(a, ensure_ascii=False)) for n, a in calls]
    if name == "glm":
        return "".join(glm(n, a) for n, a in calls)
    if name == "glm47":
        return "".join(glm47(n, a) for n, a in calls)
    if name == "qwen3_coder":
        return "".join(coder(n, a) for n, a in calls)
    if name == "deepseekv3":
        return BEGIN + "\n".join(f"{CALL}function{SEP}{n}\n```json\n{text}\n```{CLOSE}" for n, text in texts) + END
    if name == "deepseekv31":
        return BEGIN + "".join(f"{CALL}{n}{SEP}{text}{CLOSE}" for n, text in texts) + END
    if name == "kimi_k2":
        parts = [f"{K_CALL}functions.{n}:{i}{K_ARGS}{text}{K_CLOSE}" for i, (n, text) in enumerate(texts)]
        return K_BEGIN + "".join(parts) + K_END
    if name == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)
    if name == "llama3":
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)
    assert name == "pythonic"
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"
