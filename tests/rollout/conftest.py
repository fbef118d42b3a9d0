"""A small byte-level tokenizer with Qwen's control tokens, and chat templates of several habits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl.rollout.chat import ChatTemplate

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
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
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
{{- '<|im_start|>assistant\\n<think>\\n' + message.reasoning_content + '</think>' + message.content | trim + '<|im_end|>\\n' }}
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


@pytest.fixture(scope="session")
def hf_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_dir(hf_tokenizer, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    hf_tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return str(path)


@pytest.fixture(scope="session")
def chats(hf_tokenizer) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(hf_tokenizer, chat_template=source) for name, source in TEMPLATES.items()}


@pytest.fixture(scope="session")
def chat(chats) -> ChatTemplate:
    return chats["keeping"]


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine on a fresh loop, with a time limit so that no test hangs."""

    def runner(coroutine: Coroutine[Any, Any, Any], timeout: float = 20.0) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, timeout))

    return runner
