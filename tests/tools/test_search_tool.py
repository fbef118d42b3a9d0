"""The search tool by itself, in any environment: passages in memory, a corpus file, a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from retrieval_server import served

import agentrl
from agentrl.envs.tool_env import prepare_tools
from agentrl.errors import ConfigError, DataError, InfraError
from agentrl.retrieval import HttpRetriever, LocalRetriever, MemoryIndex, Passage
from agentrl.retrieval.server import create_app
from agentrl.tools import SearchTool

TEXTS = [
    "Lima is the capital of Peru.",
    {"title": "Nile", "text": "The Nile is a river in Africa."},
    Passage("oslo", "Oslo", "Oslo is the capital of Norway."),
]


class Facts(agentrl.ToolEnv):
    tools = [SearchTool(index=TEXTS, topk=1)]
    tasks = {"train": [("What is the capital of Peru?", "Lima")], "test": [("Capital of Norway?", "Oslo")]}
    reward = "exact_match"


def look_up(env: agentrl.ToolEnv, query: str) -> str:
    env.reset(options={"split": "test", "index": 0})
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return env.step(f"<tool_call>{call}</tool_call>")[0]


def test_passages_in_memory():
    assert look_up(Facts(), "capital of Norway") == "- Oslo is the capital of Norway."
    assert look_up(Facts(), "zebra") == "No results."


def test_an_index_may_be_made_before_episodes_or_by_the_first_search():
    made = []

    def make():
        made.append(MemoryIndex([Passage("oslo", "Oslo", "Oslo is the capital of Norway.")]))
        return made[-1]

    class Lazy(agentrl.ToolEnv):
        tools = [SearchTool(retriever=LocalRetriever(make), topk=1)]
        tasks = {"test": [("Capital of Norway?", "Oslo")]}
        reward = "exact_match"

    (tool,) = Lazy.tools
    env = Lazy()
    env.reset(options={"split": "test", "index": 0})
    assert not made and not tool.retriever.quick, "opening the environment does not make it"
    assert look_up(env, "capital of Norway") == "- Oslo is the capital of Norway."
    prepare_tools(env)
    assert len(made) == 1 and tool.retriever.quick


def test_what_the_model_reads_about_it():
    function = SearchTool(index=TEXTS, description="Searches the almanac.", name="almanac").schema()["function"]
    assert (function["name"], function["description"]) == ("almanac", "Searches the almanac.")
    assert SearchTool(index=TEXTS).description == "Searches a collection of texts."


def test_a_corpus_file_is_opened_once(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A red fox.", "A blue whale.")))
    first, second = SearchTool(index=corpus), SearchTool(index=str(corpus))
    assert first.retriever is second.retriever
    assert first.retriever.search(["whale"], 1)[0][0].passage.text == "A blue whale."
    kept = tmp_path / "elsewhere"
    SearchTool(index=corpus, index_dir=kept)
    assert kept.is_dir()


def test_a_server():
    with served(create_app(LocalRetriever(MemoryIndex([Passage("1", "", "A grey owl.")])))) as server:
        env = Facts()
        env.tools = [SearchTool(url=server.url)]
        assert look_up(env, "owl") == "- A grey owl."


def test_a_server_that_is_down_is_not_the_models_fault():
    env = Facts()
    env.tools = [SearchTool(retriever=HttpRetriever("http://127.0.0.1:9", patience=0, timeout=1))]
    with pytest.raises(InfraError, match="no answer after 1 attempts"):
        look_up(env, "owl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got none"),
        ({"index": TEXTS, "url": "http://127.0.0.1:1"}, "got index and url"),
        ({"index": TEXTS, "topk": 0}, "topk is 0; a whole number of at least 1 is expected"),
        ({"index": TEXTS, "index_dir": "x"}, "give index=FILE"),
        ({"index": [{"body": "x"}]}, "passage 0 of a SearchTool's index"),
        ({"url": "localhost:1"}, "not a URL"),
    ],
)
def test_wrong_settings_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        SearchTool(**options)


def test_a_missing_corpus_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        SearchTool(index=tmp_path / "nothing.jsonl")


def test_tools_import_nothing_of_environments():
    program = (
        "import sys, agentrl.tools, agentrl.tools.builtin.search\n"
        "print(sorted(m for m in sys.modules if m.startswith('agentrl.envs')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
