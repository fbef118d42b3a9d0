"""Call parsers: what is a call, what is not, and that no text at all makes them raise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import within

from agentrl.errors import ConfigError
from agentrl.tools.formats import MAX_CALLS, detect_format, get_parser

HERMES = get_parser("hermes")
TAGS = get_parser("tags:search,answer")
FORMATS = ("hermes", "tags:search,answer", "none")


def call(name: str = "search", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_hermes_calls_in_order_with_content_around_them():
    parsed = HERMES.parse(f"Let me look. {call(query='a')}{call('read', page=2)}")
    assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == [
        ("search", {"query": "a"}, None),
        ("read", {"page": 2}, None),
    ]
    assert [c.id for c in parsed.tool_calls] == ["call_0", "call_1"]
    assert parsed.content == "Let me look."
    assert parsed.errors == []
    assert parsed.message() == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"query": "a"}}},
            {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": {"page": 2}}},
        ],
    }


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<think>maybe {call(query='x')}</think>\nParis", "maybe " + call(query="x"), "Paris"),
        (
            f"opened by the template {call(query='x')}</think>Paris",
            "opened by the template " + call(query="x"),
            "Paris",
        ),
        (f"<think>never closed {call(query='x')}", "never closed " + call(query="x"), ""),
        (f"<think>a<think>b</think>{call(query='x')}</think>Paris", None, "Paris"),
        ("<think></think>Paris", "", "Paris"),
    ],
)
def test_calls_in_reasoning_are_not_calls(text, reasoning, content):
    parsed = HERMES.parse(text)
    assert parsed.tool_calls == []
    assert parsed.content == content
    if reasoning is not None:
        assert parsed.reasoning == reasoning


def test_tags_in_reasoning_are_not_calls():
    parsed = TAGS.parse("<think><search>x</search> <answer>no</answer></think><search> y </search>")
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("search", {"text": "y"})]


def test_a_think_tag_inside_an_argument_is_text():
    parsed = HERMES.parse(call(query="what does <think> mean?") + call(query="b"))
    assert [c.arguments["query"] for c in parsed.tool_calls] == ["what does <think> mean?", "b"]


@pytest.mark.parametrize("thought", ["I could write <search> or <tool_call> now", "<answer>", '<tool_call>{"name": "'])
def test_half_a_call_in_reasoning_does_not_hide_the_call_after_it(thought):
    for opened in ("", "<think>"):
        assert TAGS.parse(f"{opened}{thought}</think><search>x</search>").tool_calls[0].arguments == {"text": "x"}
        assert HERMES.parse(f"{opened}{thought}</think>{call(query='x')}").tool_calls[0].arguments == {"query": "x"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "search", "arguments": {}}', "is not closed"),
        ('<tool_call>{"name": "search", "argum', "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>search('x')</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {}} and more</tool_call>', "text after the JSON object"),
        ('<tool_call>{"name": "a", "arguments": {}}{"name": "b"}</tool_call>', "text after the JSON object"),
        ('<tool_call>["search"]</tool_call>', "a call is a JSON object, got a list"),
        ("<tool_call>null</tool_call>", "a call is a JSON object, got null"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name" must be'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name" must be'),
        ('<tool_call>{"name": "s", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object, got a list'),
        ('<tool_call>{"name": "s", "arguments": "x"}</tool_call>', '"arguments" is not valid JSON'),
        ('<tool_call>{"name": "s", "name": "t", "arguments": {}}</tool_call>', "duplicate key 'name'"),
        ('<tool_call>{"name": "s", "arguments": {"k": 1, "k": 2}}</tool_call>', "duplicate key 'k'"),
        ('<tool_call>{"name": "s", "arguments": {"k": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "s", "arguments": {"k": -Infinity}}</tool_call>', "-Infinity is not JSON"),
        ('<tool_call>{"name": "s", "arguments": {"k": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "s", "arguments": {"k": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "s", "arguments": ' + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": "s", "arguments": {"k": ' + "[" * 200 + "]" * 200 + "}}</tool_call>", "nested deeper"),
        ("done</tool_call>", "</tool_call> without <tool_call>"),
    ],
)
def test_malformed_hermes_call_is_one_error(text, error):
    parsed = HERMES.parse(text)
    assert len(parsed.tool_calls) == 1
    assert error in parsed.tool_calls[0].error
    assert parsed.errors == [parsed.tool_calls[0].error]
    assert "tool_calls" not in parsed.message()
    json.dumps(parsed.message()).encode()


def test_a_malformed_call_keeps_its_place_among_good_ones():
    parsed = HERMES.parse(call(query="a") + "<tool_call>oops</tool_call>" + call(query="b"))
    assert [c.error is None for c in parsed.tool_calls] == [True, False, True]
    assert parsed.content == "<tool_call>oops</tool_call>"


def test_arguments_as_a_string_of_json_are_read():
    parsed = HERMES.parse('<tool_call>{"name": "s", "arguments": "{\\"k\\": 1}"}</tool_call>')
    assert parsed.tool_calls[0].arguments == {"k": 1}


def test_closing_tag_inside_an_argument_does_not_close_the_call():
    parsed = HERMES.parse(call(query="a </tool_call> b"))
    assert parsed.tool_calls[0].arguments == {"query": "a </tool_call> b"}


def test_lone_surrogates_and_null_characters_survive_as_encodable_text():
    parsed = HERMES.parse('<tool_call>{"name": "s", "arguments": {"k": "a\\ud800b\\u0000"}}</tool_call>\ud800')
    assert parsed.tool_calls[0].arguments["k"].encode() == b"a?b\x00"
    parsed.content.encode()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<search> who? </search>", [("search", {"text": "who?"}, None)]),
        ("<answer>Paris</answer> bye", [("answer", {"text": "Paris"}, None)]),
        ("<search>who?", [("search", {}, "<search> is not closed by </search>")]),
        ("who?</search>", [("", {}, "</search> without <search>")]),
        ("<search><answer>x</answer></search>", [("search", {}, "<answer> inside <search>")]),
        ("<search>a</search><search>b</search>", [("search", {"text": "a"}, None), ("search", {"text": "b"}, None)]),
        ("no tag, <information>nor this</information>", []),
    ],
)
def test_tags(text, calls):
    parsed = TAGS.parse(text)
    assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == calls
    # The template knows nothing of tags: the turn goes back to the model as it was written.
    assert parsed.message() == {"role": "assistant", "content": text}


def test_tag_stop_strings():
    assert TAGS.stop == ("</search>", "</answer>")
    assert HERMES.stop == ()


def test_none_finds_no_calls():
    parsed = get_parser("none").parse(f"<think>hm</think>{call(query='x')}")
    assert (parsed.tool_calls, parsed.reasoning, parsed.content) == ([], "hm", call(query="x"))


@pytest.mark.parametrize("name", ["xml", "tags:", "tags:a b", "tags:a,a", "tags:think", "tags:<b>", ""])
def test_unknown_formats_are_refused(name):
    with pytest.raises(ConfigError, match="call format"):
        get_parser(name)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }} {{ tool_call.arguments | tojson }}", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
        ("{{ messages }}", "none"),
    ],
)
def test_detect_format(template, name):
    assert detect_format(template) == name
    assert get_parser(name).parse("text").content == "text"


# -- any text ---------------------------------------------------------------------------------------

PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>",
    '{"name": "search", "arguments": {"query": "x"}}', '{"name": ', '"arguments": ', "{", "}", "[", "]", '"', "\\",
    "NaN", "1e400", "\ud800", "\x00", "null", ",", ":", "é", " ", "\n", "text",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.text(alphabet=st.characters(), max_size=200),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_raises_and_results_are_plain_json(name, text):
    parsed = get_parser(name).parse(text)
    json.dumps(parsed.message(), allow_nan=False).encode()
    parsed.content.encode()
    parsed.reasoning.encode()
    assert parsed.errors == [c.error for c in parsed.tool_calls if c.error is not None]
    for found in parsed.tool_calls:
        assert found.error is not None or found.name


@given(value=JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_in_a_call_is_a_call_or_an_error(value):
    parsed = HERMES.parse(f"<tool_call>{json.dumps(value)}</tool_call>")
    assert len(parsed.tool_calls) == 1
    named = HERMES.parse(f"<tool_call>{json.dumps({'name': 's', 'arguments': value})}</tool_call>")
    assert len(named.tool_calls) == 1
    if isinstance(value, dict) and named.tool_calls[0].error is None:
        assert named.tool_calls[0].arguments.keys() == value.keys()


@given(thought=TEXTS.filter(lambda t: "</think>" not in t))
@settings(max_examples=150, deadline=None)
def test_nothing_thought_is_executed(thought):
    for parser in (HERMES, TAGS):
        assert parser.parse(f"<think>{thought}</think>done").tool_calls == []
        # The prompt opened the block, so what is before a <think> of the model's own would count as said aloud.
        opened_before = thought.replace("<think>", "").replace("<thinking>", "")
        from_prompt = parser.parse(f"{opened_before}{call(query='x')}<search>x</search></think>done").tool_calls
        assert all(found.error is not None for found in from_prompt)


@pytest.mark.parametrize(
    "text",
    [
        call(query="x" * 1_000_000),
        "<tool_call>" * 100_000,
        call(query="a") * 20_000,
        "<tool_call>x</tool_call>" * 40_000,
        "<search>" * 100_000,
        "<search>a</search>" * 60_000,
        "<think></think>" * 60_000,
        "</think>" * 100_000,
        "<think>" * 100_000,
    ],
)
def test_a_megabyte_is_parsed_in_no_time(text):
    for name in FORMATS:
        parser = get_parser(name)
        assert len(within(30, lambda parser=parser: parser.parse(text), name).tool_calls) <= MAX_CALLS + 1
