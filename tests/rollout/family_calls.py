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


def text_of(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def seed(name, arguments):
    pairs = "".join(f"<parameter={k}>{text_of(v)}</parameter>\n" for k, v in arguments.items())
    return f"\n<seed:tool_call>\n<function={name}>\n{pairs}</function>\n</seed:tool_call>"


def hunyuan(name, arguments):
    pairs = "".join(
        f"<arg_key:opensource>{k}</arg_key:opensource>\n<arg_value:opensource>{text_of(v)}</arg_value:opensource>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{pairs}</tool_call:opensource>\n"


def minimax(name, arguments):
    pairs = "".join(f'<parameter name="{k}">{text_of(v)}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{pairs}</invoke>\n'


M3 = "]<]minimax[>["


def minimax3(name, arguments):
    def element(value):
        if isinstance(value, dict):
            return "".join(f"{M3}<{k}>{element(v)}{M3}</{k}>" for k, v in value.items())
        if isinstance(value, list):
            return "".join(f"{M3}<item>{element(v)}{M3}</item>" for v in value)
        return text_of(value)

    return f'{M3}<invoke name="{name}">{element(arguments)}{M3}</invoke>\n'


def dsml(name, arguments):
    pairs = "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{text_of(v)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{pairs}</｜DSML｜invoke>\n'


def kimi3(name, arguments, number=1):
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    pairs = "".join(
        f'<|open|>argument key="{k}" type="{kinds.get(type(v), "null")}"<|sep|>{text_of(v)}<|close|>argument<|sep|>'
        for k, v in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="{number}"<|sep|>{pairs}<|close|>call<|sep|>'


def gemma(name, arguments):
    def written(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json.dumps(value)

    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


def harmony(name, arguments):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"


def pythonic(*calls):
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


ONE_BY_ONE = {  # what stands around the calls of a turn, and a call
    "glm": ("", glm, ""),
    "glm47": ("", glm47, ""),
    "qwen3_coder": ("", coder, ""),
    "seed_oss": ("", seed, ""),
    "hunyuan": ("<tool_calls:opensource>\n", hunyuan, "</tool_calls:opensource>"),
    "minimax-m2": ("\n<minimax:tool_call>\n", minimax, "</minimax:tool_call>"),
    "minimax-m3": (f"{M3}<tool_call>\n", minimax3, f"{M3}</tool_call>"),
    "deepseekv32": ("\n\n<｜DSML｜function_calls>\n", dsml, "</｜DSML｜function_calls>"),
    "deepseekv4": ("\n\n<｜DSML｜tool_calls>\n", dsml, "</｜DSML｜tool_calls>"),
    "kimi_k3": ("<|open|>tools<|sep|>", kimi3, "<|close|>tools<|sep|>"),
    "gemma4": ("", gemma, ""),
    "gpt-oss": ("", harmony, ""),
}


def calls_in(name, *calls):
    """``calls`` as a model of this family writes them."""
    if name in ONE_BY_ONE:
        before, one, after = ONE_BY_ONE[name]
        return before + "".join(one(n, a) for n, a in calls) + after
    texts = [(n, json.dumps(a, ensure_ascii=False)) for n, a in calls]
    listed = json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)
    if name == "hermes":
        return "".join(f'<tool_call>\n{{"name": "{n}", "arguments": {text}}}\n</tool_call>' for n, text in texts)
    if name == "deepseekv3":
        return BEGIN + "\n".join(f"{CALL}function{SEP}{n}\n```json\n{text}\n```{CLOSE}" for n, text in texts) + END
    if name == "deepseekv31":
        return BEGIN + "".join(f"{CALL}{n}{SEP}{text}{CLOSE}" for n, text in texts) + END
    if name == "kimi_k2":
        parts = [f"{K_CALL}functions.{n}:{i}{K_ARGS}{text}{K_CLOSE}" for i, (n, text) in enumerate(texts)]
        return K_BEGIN + "".join(parts) + K_END
    if name == "mistral":
        return "[TOOL_CALLS] " + listed
    if name == "nemotron":
        return f"<TOOLCALL>{listed}</TOOLCALL>"
    if name == "apriel":
        return f"<tool_calls>{listed}</tool_calls>"
    if name == "llama3":
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)
    if name == "lfm2":
        return f"<|tool_call_start|>{pythonic(*calls)}<|tool_call_end|>"
    if name == "smollm3_python":
        return f"<code>{pythonic(*calls)[1:-1]}</code>"
    assert name == "pythonic"
    return pythonic(*calls)
