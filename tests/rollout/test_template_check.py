"""Published templates: calls are read back as they are rendered, or refused by name; never silently wrong."""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest
from published_templates import published_template, published_templates

import agentrl
from agentrl.config.schema import Config, EvalConfig
from agentrl.errors import AgentRLError, ConfigError, EnvError
from agentrl.evaluation.policy import open_policy
from agentrl.orchestrator.manager import open_template
from agentrl.rollout.options import template_notes
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.template.check import check_template, rendered_turn
from agentrl.rollout.template.fast_text import byte_alphabet
from agentrl.tools.formats import get_parser

FORMATS = {
    "Apriel-1.6-15b-Thinker-fixed": "apriel", "Bielik-11B-v3.0-Instruct": "hermes", "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm", "GLM-4.7-Flash": "glm47", "Kimi-K3": "kimi_k3", "LFM2-8B-A1B": "lfm2", "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2", "MiMo-VL": "hermes", "MiniMax-M2": "minimax-m2", "MiniMax-M3": "minimax-m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes", "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes", "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder", "Reka-Edge": "hermes", "Spark2.5": "glm47", "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseekv3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseekv3",
    "deepseek-ai-DeepSeek-V3.1": "deepseekv31", "deepseek-ai-DeepSeek-V3.2": "deepseekv32",
    "deepseek-ai-DeepSeek-V4": "deepseekv4", "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseekv4",
    "google-gemma-4-31B-it": "gemma4", "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-4.0": "hermes", "ibm-granite-granite-4.1": "hermes", "inclusionai-ling-3.0-flash": "glm",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3", "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3", "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral", "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "gpt-oss",
    "poolside-Laguna-S-2.1": "glm", "poolside-Laguna-XS-2.1": "glm", "poolside-Laguna-XS.2": "glm",
    "tencent-Hy3": "hunyuan", "unsloth-Apriel-1.5": "apriel", "unsloth-mistral-Devstral-Small-2507": "mistral",
}  # fmt: skip
REFUSED = {
    # Without tools: the first five take none.
    "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
    "fireworks-ai-llama-3-firefunction-v2", "Apertus-8B-Instruct", "Cohere2MoE",
    "CohereForAI-c4ai-command-r-plus-tool_use", "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "MiniMax-M1", "ibm-granite-granite-3.3-2B-Instruct",
    "meetkai-functionary-medium-v3.1", "meetkai-functionary-medium-v3.2", "muse-glimmer", "openbmb-MiniCPM5-1B",
    "upstage-Solar-Open-100B",
    "Kimi-K2-Instruct", "Kimi-K2-Thinking", "llama-cpp-deepseek-r1",  # transformers cannot run these
}  # fmt: skip
OMITTING = {"LFM2-8B-A1B", "LFM2.5-Instruct"}  # a call is part of the content to these
CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,30}\]|</?seed:\w+>|</?(?:think|tool_call|tool_response)>|"
    r"<SPECIAL_\d+>|\]~!?b\[?\]?|\[e~\[|<turn\|>|<\|turn>|<\|tool_call>|<tool_call\|>|<\|tool_response>|<\|channel>|"
    r"<tool_response\|>|<channel\|>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words."},
                    "page": {"type": "integer", "description": "A page."},
                    "ratio": {"type": "number", "description": "A part."},
                    "deep": {"type": "boolean", "description": "Deep or not."},
                    "filter": {"type": "object", "description": "Which."},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "Some."},
                },
                "required": ["query"],
            },
        },
    }
]
ARGUMENTS = [
    {"query": "who wrote it?"}, {"query": "3"}, {"query": "  3.10 "}, {"query": "null"}, {"query": "true"},
    {"query": '{"a": 1}'}, {"query": "x", "page": 2, "ratio": 0.5, "deep": True},
    {"query": "x", "page": -3, "deep": False},
    {"query": "quotes \" and ' and \\ {b} [t]"}, {"query": "naïve 中文 😀"}, {"query": "two\nlines\n"},
    {"query": "x", "filter": {"a": [1, None, {"b": 2.5}], "c": "d"}}, {"query": "x", "tags": ["x", "y z"]},
    {"query": "x", "page": 10**25}, {"query": "a </tool_call> b"}, {"query": ""}, {},
]  # fmt: skip
UNREADABLE = {
    # What these templates themselves write in a way that cannot be told from something else.
    "LFM2.5-8B-A1B": ["quotes"],  # quotes inside quotes
    "MiniMax-M3": ["None"],  # leaves null out
}


def tokenizer(source, eos=("</s>",)):
    """One id a byte, and the control tokens of the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_alphabet().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    controls = sorted({*CONTROL.findall(source), "<s>", *eos})
    made.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=source, eos_token=eos[0], bos_token="<s>")


@cache
def chat_of(name):
    return ChatTemplate(tokenizer(published_template(name)))


def test_every_published_template_is_known_here():
    assert {path.stem for path in published_templates().glob("*.jinja")} == {*FORMATS, *REFUSED}


def call(arguments, number=1):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "search", "arguments": arguments}}


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_template_renders_is_read_back(name):
    chat = chat_of(name)
    assert chat.call_format == FORMATS[name]
    notes = check_template(chat, tools=True)
    assert not any("is read back" in note for note in notes)
    if name in OMITTING:
        return
    parser = get_parser(chat.call_format).with_tools(TOOLS)
    wrong = []
    for arguments in ARGUMENTS:
        if any(word in repr(arguments) for word in UNREADABLE.get(name, ())):
            continue
        turn = rendered_turn(
            chat.renderer, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}, TOOLS
        )
        calls = parser.parse(turn).tool_calls
        if [(c.name, c.arguments, c.error) for c in calls] != [("search", arguments, None)]:
            wrong.append((arguments, turn, calls))
    assert not wrong


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in OMITTING])
def test_calls_side_by_side_are_read_back(name):
    chat = chat_of(name)
    calls = [call({"query": "a"}, 1), call({"query": "b"}, 2)]
    try:
        turn = rendered_turn(chat.renderer, {"role": "assistant", "content": "", "tool_calls": calls}, TOOLS)
    except EnvError:
        return  # Llama's takes one
    read = [c.arguments for c in get_parser(chat.call_format).with_tools(TOOLS).parse(turn).tool_calls]
    assert read == ([{"query": "a"}] if name == "openai-gpt-oss-120b" else [{"query": "a"}, {"query": "b"}])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_read_back_is_refused_before_anything_starts(name):
    try:
        chat = chat_of(name)
    except AgentRLError as error:
        assert "the chat template of" in str(error)
        return
    with pytest.raises(ConfigError, match="the chat template of .*call_format"):
        check_template(chat, tools=True)


def test_a_format_that_does_not_hold_names_what_was_rendered_and_what_was_read():
    source = published_template("Qwen-Qwen2.5-7B-Instruct").replace('{"name": "\' }}', '{"tool": "\' }}')
    source = source.replace('\'\\n<tool_call>\\n{"name": "\'', '\'\\n<tool_call>\\n{"tool": "\'')
    chat = ChatTemplate(tokenizer(source))
    assert chat.call_format == "none"
    with pytest.raises(
        ConfigError, match=r'seems to be of the call format .hermes.*\{"tool": "lookup".*"name" must be'
    ):
        check_template(chat, tools=True)
    (note,) = check_template(chat, tools=False)
    assert "what such a model writes around its answer stays" in note


def test_a_new_segment_is_named():
    assert check_template(chat_of("Qwen-Qwen3-0.6B"), tools=True) == [
        "the chat template rewrites what came before at each new message of the user: a new segment of the trajectory "
        "begins there"
    ]
    assert check_template(chat_of("Qwen-Qwen2.5-7B-Instruct"), tools=True) == []


@pytest.mark.parametrize("name", ["Kimi-K3", "openai-gpt-oss-120b"])
def test_results_stand_under_the_name_of_the_tool_that_was_called(name):
    notes = check_template(chat_of(name), tools=True)
    assert not any("the engine is sent" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "declared", "end"),
    [
        ("Kimi-K3", (), "<|end_of_msg|>"),
        ("Kimi-K3", ("<|end_of_msg|>",), "<|end_of_msg|>"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", ("<|END_OF_TURN_TOKEN|>",), "<|END_OF_TURN_TOKEN|>"),
        ("Cohere2MoE", (), "<|END_OF_TURN_TOKEN|>"),
        ("Qwen-Qwen3-0.6B", ("<|endoftext|>",), "<|im_end|>"),  # a base model's checkpoint does not declare it
        ("microsoft-Phi-3.5-mini-instruct", ("<|endoftext|>",), "<|end|>"),
        ("openai-gpt-oss-120b", ("<|return|>",), "<|return|>"),
    ],
)
def test_a_turn_is_not_cut_by_a_token_that_stands_inside_turns(tmp_path, name, declared, end):
    made = tokenizer(published_template(name), declared or ("</s>",))
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": made.convert_tokens_to_ids([*declared])})
    )
    chat = ChatTemplate(tmp_path)
    assert chat.decode([chat.end_of_turn_id]) == end
    stops = {chat.decode([index]) for index in chat.eos_token_ids}
    also = {"<|call|>"} if "gpt-oss" in name else set()
    assert stops == {end, *declared, *also} | (set() if declared else {"</s>"})


@pytest.mark.parametrize(
    ("name", "sampled", "text"),
    [
        (
            "openai-gpt-oss-120b",
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Ann.<|return|>",
            "<think>So.</think>Ann.",
        ),
        ("openai-gpt-oss-120b", "<|channel|>final<|message|>Ann.<|return|>", "Ann."),
        ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>So", "<think>So"),
        (
            "openai-gpt-oss-120b",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
            '<|constrain|>json<|message|>{"x": 1}<|call|>',
            'I look.<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        ),
        ("ByteDance-Seed-OSS", "<seed:think>So.</seed:think>Ann.<seed:eos>", "<think>So.</think>Ann."),
        (
            "Kimi-K3",
            "So.<|close|>think<|sep|><|open|>response<|sep|>Ann.<|close|>response<|sep|><|close|>message<|sep|>"
            "<|end_of_msg|>",
            "<think>So.</think>Ann.",
        ),
        ("google-gemma-4-31B-it", "<|channel>thought\nSo.<channel|>Ann.<turn|>", "<think>\nSo.</think>Ann."),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]So.[/THINK]Ann.</s>", "<think>So.</think>Ann."),
    ],
)
def test_environments_get_one_spelling_of_reasoning_and_no_markup(name, sampled, text):
    chat = chat_of(name)
    ids = chat.encoder.encode_after_control(sampled)
    assert chat.text(np.asarray(ids)) == text
    parsed = get_parser(chat.call_format).with_tools(TOOLS).parse(text)
    assert parsed.content in ("Ann.", "I look.", "")
    assert get_parser(chat.call_format).plain(text) == text


class Finder(agentrl.ToolEnv):
    tasks = {"train": [("who?", "Ann")], "test": [("who?", "Ann")]}
    reward = "exact_match"

    @agentrl.tool
    def search(self, query: str) -> str:
        """Finds.

        Args:
            query: Words.
        """
        return query


class Plain(agentrl.ToolEnv):
    tasks = Finder.tasks
    reward = "exact_match"


def test_an_environment_that_explains_its_own_calls_may_have_any_template():
    cfg, chat = Config(), chat_of("MiniMax-M1")
    finder, plain = (f"{__name__}:Finder", {}), (f"{__name__}:Plain", {})
    tagged = (finder[0], {"call_format": "tags:search,answer"})
    (note,) = template_notes(cfg, chat, [tagged, plain], training=True)
    assert "takes tools in a form that is not known here; what such a model writes" in note
    with pytest.raises(ConfigError, match="tags:<tool>,answer"):
        template_notes(cfg, chat, [plain, finder], training=True)
    assert template_notes(cfg, chat_of("Qwen-Qwen3-0.6B"), [finder], training=False) == []


def test_a_custom_generate_function_may_have_any_template():
    for cfg in (Config(), EvalConfig()):
        own = cfg.replace(custom_generate_function_path="mine.py:generate")
        assert template_notes(own, chat_of("MiniMax-M1"), [(f"{__name__}:Finder", {})], training=True) == []


def test_a_held_out_set_is_tried_out_before_training_starts(tmp_path):
    tokenizer(published_template("MiniMax-M1")).save_pretrained(tmp_path)
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    cfg = Config(prompt_data=str(data), rm_type="exact_match", eval_env=(f"{__name__}:Finder",))
    open_template(cfg, str(tmp_path))
    with pytest.raises(ConfigError, match="takes tools in a form that is not known here. Give the environment another"):
        open_template(cfg.replace(eval_interval=2), str(tmp_path))


def test_an_evaluation_is_refused_before_engines_start(tmp_path, run):
    tokenizer(published_template("MiniMax-M1")).save_pretrained(tmp_path)
    acts_in = [(f"{__name__}:Finder", {})]

    async def open_it():
        async with open_policy(EvalConfig(), str(tmp_path), logs=tmp_path, environments=acts_in):
            raise AssertionError("engines started")

    with pytest.raises(ConfigError, match="takes tools in a form that is not known here. Give the environment another"):
        run(open_it())
