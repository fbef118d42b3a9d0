from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.demo import MODEL_DIR
from agentrl.envs.builtin.search import SearchEnv, names, world
from agentrl.envs.builtin.search.env import search_tool_schema
from envs_examples.demo_model.build import MODEL
from envs_examples.demo_model.demonstrations import Demonstrations, Habits, draw_episode, draw_name, messages, pieces
from envs_examples.demo_model.tokenizer import (
    MARKUP_TOKENS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
    chat_template,
    save_tokenizer,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_shipped_tokenizer_is_the_one_the_code_builds(tmp_path: Path):
    save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text("utf-8") == (MODEL_DIR / name).read_text("utf-8"), (
            f"{name} is out of date: run python -m envs_examples.demo_model.build, the model must be trained again"
        )


def test_every_word_of_the_world_is_one_token(tokenizer):
    encoded = tokenizer([" " + word for word in names.WORLD_WORDS])["input_ids"]
    assert all(len(ids) == 1 for ids in encoded)
    assert len({ids[0] for ids in encoded}) == len(names.WORLD_WORDS)


def test_sizes(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE == MODEL["vocab_size"] <= 2048
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert {key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")} == {
        key: MODEL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")
    }
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 4_000_000


def test_control_tokens_end_turns_and_markup_stays_in_the_text(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    text = "".join((*SPECIAL_TOKENS, *MARKUP_TOKENS))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKUP_TOKENS)


_rust = build_tokenizer()


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text('ab <|>/_\n\t{}":é你🎉'))
def test_any_text_round_trips(text: str):
    assert _rust.decode(_rust.encode(text).ids, skip_special_tokens=False) == text


def test_the_template_renders_what_qwen3s_would(tokenizer):
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "hm",
            "reasoning_content": "R",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": 1}}},
                {"name": "g", "arguments": "{}"},
            ],
        },
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "B"}]},
    ]
    rendered = tokenizer.apply_chat_template(turns, tools=[{"a": 1}], add_generation_prompt=True, tokenize=False)
    assert rendered == (
        '<|im_start|>system\nS\n\n# Tools\n{"a": 1}\nCall: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\n\nhm\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "é", "n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat_template == chat_template()


def test_without_system_and_tools_there_is_no_system_turn(tokenizer):
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], tokenize=False)
    assert rendered == "<|im_start|>user\nQ<|im_end|>\n"


def test_prompt_and_episode_are_short(tokenizer):
    source = Demonstrations(tokenizer, 0)
    assert len(source.system_ids()) <= 90
    tokens, _ = source.batch(64, Habits())
    assert len(source.system_ids()) + tokens.shape[1] <= 230


def test_a_rollout_has_the_tokens_of_a_demonstration(tokenizer):
    """The environment, the chat template and the demonstrations agree on every token, turn by turn."""
    chat_module = pytest.importorskip("agentrl.rollout.template.chat")
    parsers = pytest.importorskip("agentrl.tools.formats")
    chat = chat_module.ChatTemplate(str(MODEL_DIR))
    env = SearchEnv()
    question = world.get_world(0).question("test", 3)
    _, info = env.reset(options={"split": "test", "index": 3})
    hops = zip(question.path, question.chain[:-1], strict=True)
    searches = [(f"{relation} of {name}", _passage_of(name)) for relation, name in hops]
    parts = pieces(question.text, searches, question.answer)
    demonstrated = tokenizer([text for text, _ in parts])["input_ids"]
    system = Demonstrations(tokenizer, 0).system_ids()

    seen = list(chat.prompt(info["messages"], info["tools"]))
    assert seen == system + demonstrated[0]
    for (text, by_model), ids, following in zip(parts[1:], demonstrated[1:], [*demonstrated[2:], []], strict=True):
        if not by_model:
            continue
        sampled = np.array(ids, np.int32)
        assert chat.text(sampled) == text.removesuffix("<|im_end|>")
        _, reward, terminated, _, step_info = env.step(chat.text(sampled))
        if not terminated:
            previous = parsers.get_parser("hermes").parse(chat.text(sampled)).message()
            extension = chat.extension(previous, sampled, step_info["messages"], info["tools"])
            assert extension is not None and list(extension) == following
    assert terminated and reward == 1.0


def _passage_of(name: str) -> str:
    (passage,) = (p for p in world.get_world(0).passages if p.title == name)
    return passage.text


def test_demonstrations_train_on_what_the_model_writes_and_nothing_else(tokenizer):
    tokens, trained = Demonstrations(tokenizer, 1).batch(16, Habits(stop_early=0.5, guess=0.5))
    for row, flags in zip(tokens, trained, strict=True):
        spans = tokenizer.decode(row[flags]).split("<|im_end|>")
        assert spans[-1] == ""
        assert all(span.startswith(("<tool_call>\n", "Answer: ")) for span in spans[:-1])
        assert "<tool_response>" not in tokenizer.decode(row[flags])


def test_demonstrations_name_only_training_entities():
    rng = random.Random(0)
    for kind in world.KINDS:
        assert all(world.split_of(draw_name(rng, kind)) == "train" for _ in range(200))


def test_demonstrations_are_the_same_for_the_same_seed(tokenizer):
    one, again, other = (Demonstrations(tokenizer, seed).batch(4, Habits())[0] for seed in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_the_habit_is_to_answer_too_early():
    rng = random.Random(2)
    for _ in range(50):
        question, searches, answer = draw_episode(rng, Habits(two_hop=1.0, stop_early=1.0))
        assert len(searches) == 1 and answer in searches[0][1]
    for _ in range(50):
        question, searches, answer = draw_episode(rng, Habits(two_hop=0.0, guess=1.0))
        assert not searches and answer


def test_messages_render_to_the_same_text_as_the_pieces(tokenizer):
    rng = random.Random(3)
    for _ in range(10):
        episode = draw_episode(rng, Habits())
        rendered = tokenizer.apply_chat_template(messages(*episode), tools=[search_tool_schema()], tokenize=False)
        assert rendered.endswith("".join(text for text, _ in pieces(*episode)) + "\n")


def test_the_build_runs_and_gives_the_same_model_again(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from envs_examples.demo_model.build import Phase, Recipe, build

    recipe = Recipe(
        phases=(Phase("copy", 2, 1e-3, batch=2), Phase("skill", 2, 1e-3, batch=2, habits=Habits())),
        copy_length=8,
        measured_tasks=2,
    )
    records = [build(tmp_path / name, 3, recipe) for name in ("one", "two")]
    assert records[0] == records[1] == json.loads((tmp_path / "one" / "build.json").read_text())
    assert set(records[0]["held_out"]["skill"]) == {"greedy", "temperature 1"}
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert one.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in MODEL_DIR.iterdir()}


def test_the_shipped_model_was_built_by_the_recipe_and_starts_where_it_should():
    from envs_examples.demo_model.build import Recipe

    record = json.loads((MODEL_DIR / "build.json").read_text(encoding="utf-8"))
    assert record["recipe"] == json.loads(json.dumps(dataclasses.asdict(Recipe())))
    skill, start = record["held_out"]["skill"], record["held_out"]["habit"]
    assert skill["greedy"]["all"] >= 0.97
    assert 0.30 <= start["greedy"]["all"] <= 0.48
    assert 0.15 <= start["temperature 1"]["2-hop"] <= 0.30


def test_the_shipped_model_searches_once_and_answers():
    from envs_examples.demo_model.rehearsal import rehearse, success_rates

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR).float().eval()
    rates = success_rates(rehearse(model, tokenizer, list(range(24))))
    assert rates["1-hop"] >= 0.75 and rates["2-hop"] <= 0.2
    assert 0.9 <= rates["searches"] <= 1.2 and rates["tokens"] < 200
