"""Model families in small: their control tokens, their templates, and transcripts that a reader can follow.

Every tokenizer here has one id a byte (the byte itself), and the control tokens from 256 on in the order given:
ids can be written down without running anything.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.template.fast_text import byte_alphabet

TEMPLATES = Path(__file__).parent / "templates"
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<think>", "</think>",
]  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2.5": {"control": [*QWEN, *QWEN_MARKUP[:4]], "eos": ["<|im_end|>", "<|endoftext|>"]},
    "qwen3": {"control": [*QWEN, *QWEN_MARKUP], "eos": ["<|im_end|>", "<|endoftext|>"]},
    "glm4.5": {
        "control": [
            "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
            "</arg_key>", "<arg_value>", "</arg_value>",
        ],
        "eos": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    },
    "llama3": {
        "control": [
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
            "<|eot_id|>", "<|python_tag|>",
        ],
        "eos": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
        "bos": "<|begin_of_text|>",
    },
    "deepseek_v3": {"control": DEEPSEEK, "eos": ["<｜end▁of▁sentence｜>"], "bos": "<｜begin▁of▁sentence｜>"},
    "deepseek_r1": {"control": DEEPSEEK, "eos": ["<｜end▁of▁sentence｜>"], "bos": "<｜begin▁of▁sentence｜>"},
    "kimi_k2": {
        "control": [
            "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ],
        "eos": ["<|im_end|>", "[EOS]"],
    },
    "mistral": {
        "control": [
            "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ],
        "eos": ["</s>"],
        "bos": "<s>",
    },
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


@cache
def tokenizer(family: str) -> Any:
    """A fast transformers tokenizer with this family's control tokens and template; one id a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    given = FAMILIES[family]
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_alphabet().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in given["control"]])
    source = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=source, eos_token=given["eos"][0], bos_token=given.get("bos")
    )


def checkpoint(family: str, folder: Path) -> Path:
    """A folder as a checkpoint's: tokenizer, template, and the ids that end a turn."""
    made = tokenizer(family)
    made.save_pretrained(folder)
    ends = [made.convert_tokens_to_ids(text) for text in FAMILIES[family]["eos"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def ids(family: str, text: str) -> list[int]:
    """The ids of a transcript: ``«...»`` is a control token, all else is bytes."""
    control = {token: 256 + i for i, token in enumerate(FAMILIES[family]["control"])}
    found: list[int] = []
    for i, piece in enumerate(re.split("«(.*?)»", text)):
        found += [control[piece]] if i % 2 else list(piece.encode())
    return found


def transcript(family: str, lines: list[str]) -> tuple[list[int], list[int]]:
    """(ids, loss mask) of lines that begin with ``·`` (given) or ``+`` (sampled)."""
    tokens: list[int] = []
    mask: list[int] = []
    for line in lines:
        assert line[0] in "·+", line
        found = ids(family, line[1:])
        tokens += found
        mask += [int(line[0] == "+")] * len(found)
    return tokens, mask


def shown(chat: ChatTemplate, tokens: Any, mask: Any) -> list[str]:
    """The inverse of :func:`transcript`, for messages of failed assertions."""
    names = {index: f"«{text}»" for text, index in chat.encoder.control_ids.items()}
    lines: list[str] = []
    pending = b""
    last = None
    for token, sampled in [*zip(tokens, mask, strict=True), (None, None)]:
        if sampled != last or int(token or 0) in names or token is None:
            if lines:
                lines[-1] += pending.decode(errors="replace")
            pending = b""
        if token is None:
            break
        if sampled != last:
            lines.append("+" if sampled else "·")
            last = sampled
        if int(token) in names:
            lines[-1] += names[int(token)]
        else:
            pending += bytes([int(token)])
    return lines
