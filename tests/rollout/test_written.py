"""Written conversations as tokens: ids and masks against the hand-written transcripts of what an engine would see."""

from __future__ import annotations

import pytest
from family_cases import FAMILIES, TOOLS, checkpoint, shown, tokenizer, transcript
from family_dialogues import DIALOGUES

from agentrl.errors import ConfigError, EnvError
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.written import Writer

SAID = {  # reasoning of the three turns, words of the first, id of its call
    "qwen2.5": (None, None, None, "I look.", "c1"),
    "qwen3": ("hm", "so", "sure", "", "c1"),
    "glm4.5": ("hm", "so", None, "", "c1"),
    "llama3": (None, None, None, "", "c1"),
    "deepseek_v3": (None, None, None, "I look.", "c1"),
    "deepseek_r1": ("hm", None, "sure", "", "c1"),
    "kimi_k2": (None, None, None, "I look.", "functions.search:0"),
    "mistral": (None, None, None, "", "a1b2c3d4e"),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A :class:`ChatTemplate` a family, loaded as from a checkpoint."""
    return {name: ChatTemplate(checkpoint(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


def dialogue(name):
    """The dialogue of ``family_dialogues.py`` as a row of a file has it."""
    *thoughts, words, call_id = SAID[name]
    call = {"id": call_id, "type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    said = [{"content": words, "tool_calls": [call]}, {"content": "It is Ann."}, {"content": "Yes."}]
    turns = [
        {"role": "assistant", **turn, **({"reasoning_content": thought} if thought else {})}
        for turn, thought in zip(said, thoughts, strict=True)
    ]
    first = [] if name == "mistral" else [{"role": "system", "content": "Be brief."}]
    return [
        *first, {"role": "user", "content": "who?"}, turns[0],
        {"role": "tool", "name": "search", "content": "Ann", "tool_call_id": call_id}, turns[1],
        {"role": "user", "content": "sure?"}, turns[2],
    ]  # fmt: skip


@pytest.mark.parametrize("name", DIALOGUES)
def test_ids_and_masks_are_those_of_the_same_dialogue_played(families, name):
    segments = Writer(families[name]).segments(dialogue(name), TOOLS)
    found = [shown(families[name], s.tokens, s.loss_mask) for s in segments]
    assert len(segments) == len(DIALOGUES[name]), found
    for segment, expected in zip(segments, DIALOGUES[name], strict=True):
        ids, mask = transcript(name, expected)
        assert segment.tokens.tolist() == ids, found
        assert segment.loss_mask.tolist() == mask, found


def test_only_what_the_assistant_writes_is_learned_with_the_end_of_its_turn(families):
    chat = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "again"}, {"role": "assistant", "content": "hum"},
    ]  # fmt: skip
    expected = {
        "qwen2.5": [
            "·«<|im_start|>»system\nS«<|im_end|>»\n«<|im_start|>»user\nhi«<|im_end|>»\n«<|im_start|>»assistant\n",
                "+ho«<|im_end|>»",
            "·\n«<|im_start|>»user\nagain«<|im_end|>»\n«<|im_start|>»assistant\n", "+hum«<|im_end|>»",
        ],
        "deepseek_v3": [
            "·«<｜begin▁of▁sentence｜>»S«<｜User｜>»hi«<｜Assistant｜>»", "+ho«<｜end▁of▁sentence｜>»",
            "·«<｜User｜>»again«<｜Assistant｜>»", "+hum«<｜end▁of▁sentence｜>»",
        ],
    }  # fmt: skip
    for name, lines in expected.items():
        (segment,) = Writer(families[name]).segments(chat)
        assert shown(families[name], segment.tokens, segment.loss_mask) == lines


def test_a_turn_of_weight_0_is_context_of_what_is_learned(families):
    chat = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"}, {"role": "assistant", "content": "f", "weight": 0},
    ]  # fmt: skip
    (segment,) = Writer(families["deepseek_v3"]).segments(chat)
    assert shown(families["deepseek_v3"], segment.tokens, segment.loss_mask) == [
        "·«<｜begin▁of▁sentence｜>»«<｜User｜>»a«<｜Assistant｜>»b«<｜end▁of▁sentence｜>»«<｜User｜>»c«<｜Assistant｜>»",
        "+d«<｜end▁of▁sentence｜>»",
    ]
    whole = Writer(families["deepseek_v3"]).segments([{k: m[k] for k in ("role", "content")} for m in chat])[0].tokens
    assert segment.tokens.tolist() == whole[: len(segment)].tolist()


def test_a_segment_in_which_nothing_is_learned_is_left_out(families):
    chat = dialogue("qwen3")
    *_, last = Writer(families["qwen3"]).segments(chat, TOOLS)
    for turn in chat[:-1]:
        if turn["role"] == "assistant":
            turn["weight"] = 0
    (left,) = Writer(families["qwen3"]).segments(chat, TOOLS)
    assert left.tokens.tolist() == last.tokens.tolist() and 0 < left.num_sampled <= last.num_sampled


def test_control_tokens_in_words_are_text_save_calls_that_the_assistant_writes_out(families):
    chat = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "<|im_end|><tool_call>"},
        {"role": "assistant", "content": "<tool_call>x</tool_call><|im_end|>!"},
    ]
    (segment,) = Writer(families["qwen2.5"]).segments(chat)
    assert shown(families["qwen2.5"], segment.tokens, segment.loss_mask) == [
        "·«<|im_start|>»system\n«<|im_end|>»\n«<|im_start|>»user\n<|im_end|><tool_call>«<|im_end|>»\n«<|im_start|>»assistant\n",
        "+«<tool_call>»x«</tool_call>»<|im_end|>!«<|im_end|>»",
    ]


def test_a_turn_without_reasoning_closes_what_the_template_opens(families):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (segment,) = Writer(families["deepseek_r1"]).segments(chat)
    assert shown(families["deepseek_r1"], segment.tokens, segment.loss_mask) == [
        "·«<｜begin▁of▁sentence｜>»«<｜User｜>»hi«<｜Assistant｜>»«<think>»\n",
        "+\n«</think>»\n\nho«<｜end▁of▁sentence｜>»",
    ]


def test_calls_that_a_template_takes_one_by_one_are_turns_of_their_own(families):
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    source = tokenizer("llama3").chat_template
    refusing = "{%- for m in messages %}{%- if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}"
    chat = ChatTemplate(tokenizer("llama3"), chat_template=refusing + "{%- endif %}{%- endfor %}" + source)
    dialog = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "ho"},
    ]  # fmt: skip

    def said():
        segments = Writer(chat).segments(dialog, TOOLS)
        return [line for s in segments for line in shown(chat, s.tokens, s.loss_mask) if line[0] == "+"]

    called = '+{"name": "search", "parameters": {"query": "x"}}«<|eot_id|>»'
    assert said() == [called, called, "+ho«<|eot_id|>»"]
    dialog[1]["weight"] = 0
    assert said() == ["+ho«<|eot_id|>»"]


def test_a_template_that_begins_a_turn_otherwise_is_refused():
    source = "{%- for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{%- endfor %}"
    opening = "{%- if add_generation_prompt %}{{ '<|im_start|>bot' }}{%- endif %}"
    chat = ChatTemplate(tokenizer("qwen2.5"), chat_template=source + opening)
    with pytest.raises(EnvError, match="message 2 in another way than its generation prompt begins it"):
        Writer(chat).segments([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])


def test_a_template_that_never_ends_a_turn_is_refused():
    source = "{%- for m in messages %}{{ m.role + ':' + m.content + ' ' }}{%- endfor %}"
    opening = "{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"
    chat = ChatTemplate(tokenizer("qwen2.5"), chat_template=source + opening)
    with pytest.raises(ConfigError, match="nothing would teach the model to stop"):
        Writer(chat).segments([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
