"""Real templates as model makers publish them: every request is what transformers renders of the whole history."""

from __future__ import annotations

import pytest
from published_templates import published_template
from template_oracle import dialogs, play, tokenizer

from agentrl.rollout.template.chat import ChatTemplate

DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
LLAMA = ("<|begin_of_text|>", "<|eot_id|>")
FAMILIES = {
    "Qwen-Qwen2.5-7B-Instruct": ("", "<|im_end|>"),
    "Qwen-Qwen3-0.6B": ("", "<|im_end|>"),
    "Qwen-QwQ-32B": ("", "<|im_end|>"),
    "Qwen3-Coder": ("", "<|im_end|>"),
    "Qwen3.5-4B": ("", "<|im_end|>"),
    "MiMo-VL": ("", "<|im_end|>"),
    "StepFun3.5-Flash": ("", "<|im_end|>"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("", "<|im_end|>"),
    "GLM-4.6": ("", ""),
    "GLM-4.7-Flash": ("", ""),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": DEEPSEEK,
    "deepseek-ai-DeepSeek-V3.1": DEEPSEEK,
    "moonshotai-Kimi-K2": ("", "<|im_end|>"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("<|begin_of_text|>", "<|im_end|>"),  # needs a tool
    "ibm-granite-granite-4.0": ("", "<|end_of_text|>"),
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "mistralai-Mistral-Nemo-Instruct-2407": ("<s>", "</s>"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("<s>", "</s>"),
    "unsloth-mistral-Devstral-Small-2507": ("<s>", "</s>"),
}
THOUGHTS = {"none": (None,), "empty": ("",), "some": ("hm",), "mixed": ("hm", None, "")}
REFUSED = {
    # What these templates cannot render: several calls in a turn; words beside a call (they come behind it).
    "meta-llama-Llama-3.1-8B-Instruct": {"parallel"},
    "meta-llama-Llama-3.2-3B-Instruct": {"parallel"},
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"chain", "words and call"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_request_is_the_whole_rendering_by_transformers(run, name):
    """To the id: plain turns, calls, chains; without, with and with empty reasoning. A segment more only where the
    template writes the history in another way than it was sent and sampled."""
    hf = tokenizer(published_template(name), *FAMILIES[name])
    chat = ChatTemplate(hf)
    problems = {}
    for thoughts, how in THOUGHTS.items():
        for dialog, turns in dialogs(how).items():
            if dialog not in REFUSED.get(name, ()):
                found = run(play(hf, chat, turns)).problems(chat)
                problems |= {f"{dialog}, {thoughts} reasoning": found} if found else {}
    assert not problems
