"""What the tests of this folder share: chat templates of several habits, a tokenizer, an environment."""

from __future__ import annotations

from typing import Any

from agentrl.types import Task

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

HEAD = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
CALLS = """{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
"""
TOOL = """{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
USER = """{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
"""
# Keeps reasoning in the history.
KEEPING = (
    HEAD
    + "{%- for message in messages %}\n"
    + USER
    + """{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
"""
    + CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + TOOL
)
# Drops reasoning from all turns before the last user message.
STRIPPING = (
    HEAD
    + """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
"""
    + USER
    + """{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
"""
    + CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + TOOL
)
# Trims content and writes observations as JSON strings; the generation prompt opens the reasoning.
TRIMMING = """{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|im_start|>tool\\n' + (message.content | tojson) + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' and message.reasoning_content %}
{{- '<|im_start|>assistant\\n<think>\\n' + message.reasoning_content + '</think>' }}
{{- message.content | trim + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
TEMPLATES = {"keeping": KEEPING, "stripping": STRIPPING, "trimming": TRIMMING}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find a page.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def make_tokenizer() -> Any:
    """A fast transformers tokenizer: bytes, some merges, Qwen's control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "system user assistant tool search query name arguments the answer is of a page found who wrote"
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROLS,
        show_progress=False,
    )
    tokenizer.train_from_iterator([words] * 20, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=KEEPING
    )


CALL = 'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "it"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n" + CALL
TASK = Task("train/3", seed=3, options={"index": 3})


class LookUp:
    """Ends with reward 1 after ``steps`` observations. Any of the parts can be replaced."""

    call_format = "auto"

    def __init__(self, steps=2, observation="Ann", role="tool", **parts):
        self.steps, self.observation, self.role = steps, observation, role
        self.prompt = "who wrote it?"
        self.actions, self.reset_with = [], None
        self.__dict__.update(parts)

    async def areset(self, *, seed=None, options=None):
        self.reset_with = (seed, options)
        self.actions = []
        messages = [{"role": "user", "content": self.prompt}]
        return self.prompt, {"task_id": "train/3", "messages": messages, "tools": TOOLS}

    async def astep(self, action):
        self.actions.append(action)
        if len(self.actions) > self.steps:
            return "", 1.0, True, False, {"success": True, "rewards": {"match": 1.0}, "stop_reason": "done"}
        new = [{"role": self.role, "content": self.observation}]
        return self.observation, 0.0, False, False, {"messages": new, "tool_calls": [{"name": "search"}]}
