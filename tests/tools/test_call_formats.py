"""The families' own call formats: what they read, what they say when they cannot, and that nothing breaks them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from family_calls import (
    BEGIN,
    CALL,
    CLOSE,
    END,
    K_ARGS,
    K_BEGIN,
    K_CALL,
    K_CLOSE,
    K_END,
    M3,
    SEP,
    TOOLS,
    calls_in,
    coder,
    glm,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import within

from agentrl.errors import ConfigError
from agentrl.tools.formats import FORMATS, MAX_CALLS, detect_format, get_parser

PARSERS = {name: get_parser(name).with_tools(TOOLS) for name in FORMATS}
ARGUMENTS = [
    {"query": "who wrote it?"},
    {"query": "  3.10 ", "page": 2},
    {"query": 'quotes " and \\ and {braces} [too]', "deep": True},
    {"query": "naïve 中文 😀\nsecond line", "filter": {"a": [1, None, {"b": 2.5}]}, "tags": ["x", "y"]},
    {"query": "null"},
    {"query": "x", "page": -3, "deep": False},
    {},
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_is_read_as_it_was_meant(name, arguments):
    parsed = PARSERS[name].parse(calls_in(name, ("search", arguments)))
    (call,) = parsed.tool_calls
    assert (call.name, call.error, parsed.content) == ("search", None, "")
    assert call.arguments == arguments
    assert parsed.message()["tool_calls"][0]["function"] == {"name": "search", "arguments": arguments}


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_with_words_before_them(name):
    written = calls_in(name, ("search", {"query": "a"}), ("now", {}), ("nothing_such", {"x": "a"}))
    words = {"llama3": "", "pythonic": "I look.\n"}.get(name, "I look. ")
    parsed = PARSERS[name].parse(words + written)
    assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == [
        ("search", {"query": "a"}, None),
        ("now", {}, None),
        ("nothing_such", {"x": "a"}, None),  # the tool layer says that there is none
    ]
    assert parsed.content == words.strip()
    assert len({c.id for c in parsed.tool_calls}) == 3


READ_OTHERWISE = {
    # Queries of calls in which SGLang trims a text, makes a number or nothing of it, or a text of `null` or a number.
    "glm": ("  3.10 ", "null"),
    "qwen3_coder": ("null",),
    "minimax-m2": ("  3.10 ", "null"),
    "minimax-m3": ("  3.10 ", "naïve 中文 😀\nsecond line"),
    "deepseekv32": ("  3.10 ",),
    "deepseekv4": ("  3.10 ",),
    "gemma4": ("naïve 中文 😀\nsecond line",),
}
NOT_SERVED = ("pythonic", "seed_oss", "nemotron", "apriel", "smollm3_python")  # SGLang has no detector, or a wild one


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in NOT_SERVED])
def test_whole_turns_are_read_as_the_serving_detector_reads_them(name):
    """On well-formed turns of known tools."""
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    served = pytest.importorskip("sglang.srt.function_call.function_call_parser")
    detectors = served.FunctionCallParser.ToolCallParserEnum
    tools = [protocol.Tool(**tool) for tool in TOOLS]
    for arguments in ARGUMENTS:
        if arguments.get("query") in READ_OTHERWISE.get(name, ()):
            continue
        text = calls_in(name, ("search", arguments), ("search", {"query": "b"}))
        given = text.replace("<|channel|>commentary", "<|start|>assistant<|channel|>commentary")
        given = given.replace(":opensource>", ">")  # a suffix that the detector takes from the tokenizer
        theirs = detectors[name]().detect_and_parse(given.strip(), tools).calls
        ours = PARSERS[name].parse(text).tool_calls
        assert [(c.name, json.loads(c.parameters)) for c in theirs] == [(c.name, c.arguments) for c in ours]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_reasoning_are_not_calls(name):
    parser, written = PARSERS[name], calls_in(name, ("search", {"query": "x"}))
    for text in (f"<think>{written}</think>done", f"{written}</think>done", f"<think>a</think>{written}</think>done"):
        parsed = parser.parse(text)
        assert (parsed.tool_calls, parsed.content) == ([], "done")
        assert "search" in parsed.reasoning
    assert parser.parse(f"<think>{written}").tool_calls == []
    (call,) = parser.parse(f"<think>\nhm {written[:9]}\n</think>\n\n{written}").tool_calls
    assert (call.name, call.error) == ("search", None)


def test_mistral_reasoning():
    parsed = PARSERS["mistral"].parse('[THINK][TOOL_CALLS] [{"name": "search"}][/THINK]Paris')
    assert (parsed.tool_calls, parsed.content, parsed.reasoning) == ([], "Paris", '[TOOL_CALLS] [{"name": "search"}]')


def test_ids_are_those_of_the_family():
    def ids(name, text):
        return [c.id for c in PARSERS[name].parse(text).tool_calls]

    assert ids("kimi_k2", f"{K_BEGIN}{K_CALL}functions.search:7{K_ARGS}{{}}{K_CLOSE}{K_END}") == ["functions.search:7"]
    listed = '[{"name": "now", "arguments": {}, "id": "abcDEF123"}, {"name": "now", "arguments": {}, "id": "short"}]'
    assert ids("mistral", f"[TOOL_CALLS] {listed}") == ["abcDEF123", "call00001"]
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]now[ARGS]{}") == [
        "abcDEF123",
        "call00001",
    ]
    assert ids("mistral", "[TOOL_CALLS] oops") == ["call00000"]  # templates refuse any other form of id


def test_a_tool_that_only_the_schemas_tell():
    numbered = f'{K_BEGIN}{K_CALL}3{K_ARGS}{{"query": "x"}}{K_CLOSE}{K_END}'
    (call,) = PARSERS["kimi_k2"].parse(numbered).tool_calls
    assert (call.name, call.arguments, call.id) == ("search", {"query": "x"}, "3")
    (call,) = PARSERS["llama3"].parse('{"name": "now"}').tool_calls
    assert call.name == "now"


def test_without_schemas_arguments_are_read_all_the_same():
    for name in FORMATS:
        (call,) = get_parser(name).parse(calls_in(name, ("search", {"query": "x"}))).tool_calls
        assert (call.name, call.arguments, call.error) == ("search", {"query": "x"}, None)


@pytest.mark.parametrize(
    "text", ['{"answer": 3}', "[1, 2]", "{", "[", "{a}", '{"name": "Ann", "age": 3}', "[a(", "Paris"]
)
def test_answers_that_look_like_calls(text):
    assert PARSERS["llama3"].parse(text).tool_calls == []
    if text != "[a(":
        assert PARSERS["pythonic"].parse(text).tool_calls == []


MANY_ARGUMENTS = glm("f", {f"k{i}": 1 for i in range(999)})
MALFORMED = [
    ("glm", "<tool_call>search\n<arg_key>query</arg_key>", "is not closed by </tool_call>"),
    ("glm", "<tool_call>search\n<arg_key>query</arg_key>\n</tool_call>", "each argument <arg_key>"),
    (
        "glm",
        "<tool_call>search\n<arg_key>query</arg_key> x <arg_value>1</arg_value></tool_call>",
        "each argument <arg_key>",
    ),
    ("glm", "<tool_call>\n</tool_call>", "a call is NAME"),
    ("glm", "<tool_call>a<tool_call>b</tool_call>", "inside a call that is not closed"),
    (
        "glm",
        glm("search", {"query": "a"})[:-12] + "<arg_key>query</arg_key><arg_value>b</arg_value></tool_call>",
        "twice",
    ),
    ("glm", MANY_ARGUMENTS, "more than 256"),
    ("glm", "<tool_call>f<arg_key>k</arg_key><arg_value>1</tool_call>", "a value is not closed by </arg_value>"),
    ("glm", "query</arg_key>", "</arg_key> without a call"),
    ("qwen3_coder", "<tool_call>\nsearch\n</tool_call>", "a call is <function=NAME>"),
    ("qwen3_coder", "<tool_call><function=search></tool_call>", "one </function>"),
    (
        "qwen3_coder",
        "<tool_call><function=search><parameter=query>x</function></tool_call>",
        "not closed by </parameter>",
    ),
    ("qwen3_coder", "<tool_call><function=search>x</function></tool_call>", "for each argument"),
    ("qwen3_coder", "<tool_call><function=a></function><function=b></function></tool_call>", "one </function>"),
    ("qwen3_coder", coder("search", {"query": "a"}).replace("</f", "<parameter=query>b</parameter></f"), "twice"),
    ("qwen3_coder", "</function>", "without a call"),
    ("deepseekv3", f"{CALL}function{SEP}now\n```json\n{{}}\n```{CLOSE}", "must stand between"),
    ("deepseekv3", f"{BEGIN}{CALL}function{SEP}now\n{{}}{CLOSE}{END}", "between ```json and ```"),
    ("deepseekv3", f"{BEGIN}{CALL}now{SEP}{{}}{CLOSE}{END}", "a call is function"),
    ("deepseekv3", f"{BEGIN}{CALL}function{SEP}now\n```json\n[1]\n```{CLOSE}{END}", "JSON object, got a list"),
    ("deepseekv3", f"{BEGIN}{CALL}function{SEP}\n```json\n{{}}\n```{CLOSE}{END}", "the name of a tool"),
    ("deepseekv3", f"{BEGIN}{END}", "without a call"),
    ("deepseekv3", f"{BEGIN}{CALL}function{SEP}a{SEP}b\n```json\n{{}}\n```{CLOSE}{END}", "twice in a call"),
    ("deepseekv31", f"{BEGIN}{CALL}now{SEP}{{'a': 1}}{CLOSE}{END}", "not valid JSON"),
    ("deepseekv31", f'{BEGIN}{CALL}now{SEP}{{"k": 1, "k": 2}}{CLOSE}{END}', "duplicate key 'k'"),
    ("deepseekv31", f"{BEGIN}{CALL}now{SEP}{{}}{{}}{CLOSE}{END}", "text after the arguments"),
    ("kimi_k2", f"{K_BEGIN}{K_CALL}now{K_ARGS}{{}}{K_CLOSE}{K_END}", "functions.NAME:INDEX"),
    ("kimi_k2", f"{K_BEGIN}{K_CALL}functions.now:0{{}}{K_CLOSE}{K_END}", "functions.NAME:INDEX"),
    ("kimi_k2", f'{K_BEGIN}{K_CALL}functions.now:0{K_ARGS}"x"{K_CLOSE}{K_END}', "JSON object, got a string"),
    ("kimi_k2", f'{K_BEGIN}{K_CALL}functions.now:0{K_ARGS}{{"k": 1e999}}{K_CLOSE}{K_END}', "too large"),
    ("kimi_k2", f"{K_BEGIN}{K_CALL}functions.now:0{K_ARGS}{{}}", "is not closed"),
    ("mistral", '[TOOL_CALLS] {"name": "now"}', "followed by a JSON list"),
    ("mistral", '[TOOL_CALLS] [{"name": "now", ', "not valid JSON"),
    ("mistral", "[TOOL_CALLS] []", "the list of calls is empty"),
    ("mistral", "[TOOL_CALLS] [3]", "a call is a JSON object, got a number"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', '"name" must be'),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": [1]}]', "JSON object, got a list"),
    ("mistral", "[TOOL_CALLS]now[ARGS]{", "not valid JSON"),
    ("mistral", "[ARGS]{}", "[ARGS] without a call"),
    ("llama3", '{"name": "search", "parameters": {"query": "x"', "not valid JSON"),
    ("llama3", '{"name": "search", "parameters": "x"}', '"parameters" is not valid JSON'),
    ("llama3", "<|python_tag|>import os", "not valid JSON"),
    ("llama3", "<|python_tag|>[1]", "a call is a JSON object, got a list"),
    ("llama3", '<|python_tag|>{"parameters": {}}', '"name" must be'),
    ("hunyuan", "<tool_calls><tool_call>search</tool_call></tool_calls>", "NAME<tool_sep>"),
    ("hunyuan", "<tool_call>search<tool_sep></tool_call>", "must stand between <tool_calls>"),
    ("seed_oss", "<seed:tool_call>search</seed:tool_call>", "a call is <function=NAME>"),
    ("seed_oss", "<seed:tool_call><function=search></function>", "is not closed by </seed:tool_call>"),
    ("minimax-m2", '<minimax:tool_call><invoke name="f">1</invoke></minimax:tool_call>', '<parameter name="KEY">'),
    ("minimax-m2", '<invoke name="f"></invoke>', "must stand between <minimax:tool_call>"),
    ("minimax-m2", "<minimax:tool_call></minimax:tool_call>", "without a call"),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>1{M3}</invoke>', "<a> is not closed"),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}</a>{M3}</invoke>', "</a> closes"),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>1{M3}<b>{M3}</b>{M3}</a>{M3}</invoke>', "and elements"),
    ("minimax-m3", f"{M3}<tool_call>{{}}{M3}</tool_call>", "without a call"),
    ("deepseekv32", '<｜DSML｜invoke name="f"></｜DSML｜invoke>', "must stand between <｜DSML｜function_calls>"),
    ("deepseekv4", '<｜DSML｜tool_calls><｜DSML｜invoke name="f">x</｜DSML｜invoke>', "for each argument"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>x<|close|>call<|sep|>', "for each argument"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>', "is not closed by <|close|>call<|sep|>"),
    ("gemma4", "<|tool_call>search{}<tool_call|>", "a call is call:NAME"),
    ("gemma4", '<|tool_call>call:search{query:<|"|>x}<tool_call|>', "not valid JSON"),
    ("gemma4", "<|tool_call>call:search{}", "is not closed by <tool_call|>"),
    ("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "not valid JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.f", "is not closed by <|call|>"),
    ("gpt-oss", "<|channel|>", "without a call"),
    ("nemotron", '<TOOLCALL>{"name": "now"}</TOOLCALL>', "followed by a JSON list"),
    ("nemotron", '<TOOLCALL>[{"name": "now"}', "is not closed by </TOOLCALL>"),
    ("apriel", "<tool_calls>[]x</tool_calls>", "text after the list"),
    ("lfm2", "<|tool_call_start|>search()<|tool_call_end|>", "a Python list of calls"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "the list of calls is empty"),
    ("smollm3_python", "<code>import os</code>", "not a Python list of calls"),
    ("pythonic", "[search('x')]", "given by name"),
    ("pythonic", "[search(query=open('x'))]", "must be a literal"),
    ("pythonic", "[search(query='x'", "not closed by ]"),
    ("pythonic", "[search(query=)]", "not a Python list of calls"),
    ("pythonic", "[search(query='a', query='b')]", "argument 'query' is given twice"),
    ("pythonic", "[search(filter={'a': 1, 'a': 2})]", "a key twice"),
    ("pythonic", "[search(page=1e999)]", "too large"),
    ("pythonic", "[search(page=" + "-" * 100_000 + "1)]", "nested too deeply"),
    ("pythonic", "[search(query='" + "x" * (1 << 20) + "')]", "longer than"),
    ("pythonic", "[(lambda: 1)()]", None),
]


@pytest.mark.parametrize(("name", "text", "error"), MALFORMED)
def test_a_malformed_call_is_an_error_that_teaches(name, text, error):
    parsed = PARSERS[name].parse(text)
    if error is None:
        assert parsed.tool_calls == []
        return
    (call,) = parsed.tool_calls
    assert error in call.error and parsed.errors == [call.error]
    assert "tool_calls" not in parsed.message() and parsed.content
    assert PARSERS[name].hint


def test_a_malformed_call_keeps_its_place_among_good_ones():
    now = glm("now", {})
    parsed = PARSERS["glm"].parse(f"{now}<tool_call>oops<arg_key></tool_call>{now}")
    assert [c.error is None for c in parsed.tool_calls] == [True, False, True]
    assert parsed.content == "<tool_call>oops<arg_key></tool_call>"
    parsed = PARSERS["mistral"].parse('[TOOL_CALLS] [{"name": "now", "arguments": {}}, 3]')
    assert [c.error is None for c in parsed.tool_calls] == [True, False]


def test_a_number_that_is_none_reaches_the_validation_as_it_was_written():
    (call,) = PARSERS["glm"].parse(glm("search", {"query": "NaN", "page": "NaN", "deep": "1e999"})).tool_calls
    assert call.arguments == {"query": "NaN", "page": "NaN", "deep": "1e999"}


def test_a_value_of_the_wrong_type_reaches_the_validation_as_it_was_written():
    (call,) = PARSERS["qwen3_coder"].parse(coder("search", {"query": "x", "deep": "maybe", "page": "two"})).tool_calls
    assert call.arguments == {"query": "x", "deep": "maybe", "page": "two"}


def test_other_names_of_the_formats():
    for other, name in [("qwen25", "hermes"), ("deepseek", "deepseekv3"), ("kimi", "kimi_k2"), ("glm45", "glm")]:
        assert get_parser(other).name == name
    with pytest.raises(ConfigError, match="'gpt5'; expected tags.* hermes, .*llama3"):
        get_parser("gpt5")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'\\n<tool_call>' + tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm"),
        ("'<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm47"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        (f"{BEGIN}{CALL}{{{{ type }}}}{SEP}\n```json", "deepseekv3"),
        (f"{BEGIN}{CALL}{{{{ name }}}}{SEP}", "deepseekv31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("Environment: ipython {\"name\": function name, \"parameters\": {}}", "llama3"),
        ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>", "hunyuan"),
    ],
)  # fmt: skip
def test_formats_are_found_in_templates(template, name):
    assert detect_format(template) == name
    assert get_parser(name).name == name


def test_nothing_heavy_is_imported_for_a_call():
    script = (
        "import sys; from agentrl.tools.formats import get_parser\n"
        "parser = get_parser('glm').with_tools([{'name': 'f'}])\n"
        "assert parser.parse('<tool_call>f</tool_call>').tool_calls[0].name == 'f'\n"
        "assert not {'sglang', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


# -- any text ---------------------------------------------------------------------------------------

NEW_TOKENS = [
    "<tool_calls>", "</tool_calls>", "<tool_sep>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>",
    "<minimax:tool_call>", '<invoke name="', 'search">', "</invoke>", '<parameter name="query">', M3,
    f"{M3}<tool_call>",
    f"{M3}<query>", f"{M3}</query>", f"{M3}<item>", f"{M3}</invoke>", f'{M3}<invoke name="search">',
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="search">', '<｜DSML｜parameter name="query" string="false">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<|open|>tools<|sep|>", '<|open|>call tool="search"<|sep|>',
    '<|open|>argument key="query" type="number"<|sep|>', "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
    "<|close|>think<|sep|>", "<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary to=functions.search",
    "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|tool_call>", "<tool_call|>", "call:search{", '<|"|>',
    "<|channel>thought", "<channel|>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<code>", "</code>",
]  # fmt: skip
TOKENS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=",
    "</function>",
    "<parameter=", "</parameter>", BEGIN, END, CALL, CLOSE, SEP, "```json", "\n```", K_BEGIN, K_END, K_CALL, K_ARGS,
    K_CLOSE, "functions.search:0", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>",
    "<|python_start|>", "<think>", "</think>",
    *NEW_TOKENS,
]  # fmt: skip
OTHERS = [
    "search", "now", "function", '{"name": "search", "parameters": {"query": "x"}}', '{"query": "x"}',
    '{"k": 1, "k": 2}',
    "[search(", "query=", "'x'", ")]", "[", "]", "{", "}", '"', "\\", ",", ":", ";", ">", "=", "NaN", "1e400", "null",
    "\ud800", "\x00", "\u2028", "é", " ", "\n", "\\n", "9" * 5000, "[" * 200,
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(TOKENS + OTHERS), max_size=30).map("".join),
    st.text(alphabet=st.characters(), max_size=200),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def check(parser, text):
    parsed = parser.parse(text)
    json.dumps(parsed.message(), allow_nan=False).encode()
    parsed.content.encode()
    parsed.reasoning.encode()
    assert len(parsed.tool_calls) <= MAX_CALLS + 1
    assert parsed.errors == [c.error for c in parsed.tool_calls if c.error is not None]
    for call in parsed.tool_calls:
        assert call.error or call.name
        assert isinstance(call.arguments, dict) and call.id
        str(call.error).encode()
        call.name.encode()
    return parsed


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_no_text_raises(name, text):
    check(PARSERS[name], text)


@pytest.mark.parametrize("name", FORMATS)
@given(arguments=st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
@settings(max_examples=25, deadline=None)
def test_any_arguments_are_read_or_refused(name, arguments):
    parsed = check(PARSERS[name], calls_in(name, ("search", arguments)))
    assert name == "pythonic" or len(parsed.tool_calls) == 1
    if name in ("deepseekv31", "kimi_k2", "mistral", "llama3") and "\\ud" not in json.dumps(arguments):
        assert [c.arguments for c in parsed.tool_calls] == [arguments]


def test_a_pythonic_list_after_words_is_read_where_it_ends_the_turn():
    parser = PARSERS["pythonic"]
    parsed = parser.parse("<think>[now()]</think>Let me see.\n  [search(query='a]b',\n page=2)]\n")
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("search", {"query": "a]b", "page": 2})]
    assert (parsed.content, parsed.reasoning) == ("Let me see.", "[now()]")
    (call,) = parser.parse("Let me see.\n[search('x')]").tool_calls
    assert "given by name" in call.error
    for answer in ("As in [now()]", "It is:\n[a(b) c]", "See\n[now()] above.", "Two:\n[f(x)\n[1]"):
        assert parser.parse(answer).tool_calls == [], answer


@pytest.mark.parametrize("value", ["0x" + "f" * 20_000, "{0x" + "f" * 20_000 + ": 1}", "-0b" + "1" * 99_999])
def test_a_number_that_python_cannot_write_out_is_refused(value):
    (call,) = check(PARSERS["pythonic"], f"[search(query={value})]").tool_calls
    assert call.error == "a number is too large"


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS.filter(lambda t: "</think>" not in t))
@settings(max_examples=15, deadline=None)
def test_nothing_thought_is_run(name, text):
    assert PARSERS[name].parse(f"<think>{text}</think>done").tool_calls == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_turn_is_parsed_in_no_time(name):
    big = "a=1, " * 60_000
    texts = [
        calls_in(name, ("search", {"query": big[:300_000]})),
        calls_in(name, *[("search", {"query": "x"})] * 3_000),
        calls_in(name, ("search", {f"k{i}": "v" for i in range(15_000)})),
        calls_in(name, ("search", {"query": big[:300_000]}))[:-9],
        *(token * (100_000 // len(token)) for token in TOKENS),
        *("".join(pair) * 3_000 for pair in zip(TOKENS, TOKENS[1:], strict=False)),
        BEGIN + f"{CALL}function{SEP}" * 7_000 + "\n```json\n{}\n```" * 7_000 + CLOSE + END,
        BEGIN + CALL + "function" + SEP * 15_000 + "```json\n{}" + "\n```" * 15_000 + CLOSE + END,
        "[f(" + "a=1," * 30_000,
        "<tool_call>" + " " * 150_000 + "<arg_key>" + " " * 150_000,
        "<tool_call>f<arg_key>k</arg_key>" + "\\n" * 100_000 + "x<arg_value>v</arg_value></tool_call>",
        "<tool_call>f" + " " * 150_000 + "x</tool_call>",
        "<tool_call>f" + "\\n" * 100_000 + "x<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
        '{"name": "search", "parameters": ' * 30_000,
        "; ".join(['{"name": "now", "parameters": {}}'] * 10_000),
    ]
    for text in texts:
        within(30, lambda text=text: check(PARSERS[name], text), text[:80])
