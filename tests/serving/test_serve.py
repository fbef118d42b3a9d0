"""``agentrl serve``: refusals without an engine, then a real server that outside clients use."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from agentrl.cli.main import main
from agentrl.config.presets import demo_folder
from agentrl.data.checkpoint import ROLLOUT_STATE, CheckpointStore
from agentrl.errors import ConfigError
from agentrl.processes.tree import descendants, is_running
from agentrl.serving import run as serving

KEY = "a-key-for-this-test"
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [
    {"role": "system", "content": "Find facts with the search tool, then reply with Answer: and the short answer."},
    {"role": "user", "content": "Who is the mayor of Old Dunminster?"},
]


# -- without engines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--no-api-key", "--host", "0.0.0.0"], "--no-api-key with --host 0.0.0.0"),
        (["--hf-checkpoint", "/nowhere"], "no model there"),
        (["--run", "/nowhere"], "no such folder"),
        (["--run", "r", "--hf-checkpoint", "m"], "give one of them"),
        (["--checkpoint", "best"], "name the run with --run"),
        (["--run", "r", "--checkpoint", "latest"], "expected newest, best or a number"),
        (["--port", "70000"], "65535"),
        (["--host", "::1", "--port", "8123"], "::1 is no IPv4 address"),
        (["--tool-call-parsr", "x"], "--tool-call-parser"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(words, text, capsys, monkeypatch):
    monkeypatch.setenv("AGENTRL_API_KEY", KEY)
    assert main(["serve", *words]) in (2, 3)
    error = capsys.readouterr().err
    assert text in error and KEY not in error


def test_a_port_in_use_is_refused_before_an_engine_starts(capsys, monkeypatch):
    monkeypatch.setenv("AGENTRL_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port {port}: it is in use" in capsys.readouterr().err


def test_a_checkpoint_of_a_run_is_found_and_named(tmp_path):
    store = CheckpointStore(tmp_path / "my run" / "checkpoints")
    for step in (10, 20):
        folder = store.begin(step)
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")
        (folder / ROLLOUT_STATE).write_text("{}")
        store.commit(step)
    run = tmp_path / "my run"
    for path, checkpoint, name in ((run, "newest", "my run@20"), (run, "10", "my run@10")):
        wanted = options(run=str(path), checkpoint=checkpoint, hf_checkpoint=None)
        folder = serving._model_folder(wanted)
        assert Path(folder).name == "hf" and serving._name(wanted, folder) == name
    wanted = options(run=str(run / "checkpoints" / "step_000010"), checkpoint="newest", hf_checkpoint=None)
    assert serving._name(wanted, serving._model_folder(wanted)) == "my run@10"


def test_what_is_announced_can_be_pasted(capsys):
    serving._announce(serving.Served("http://127.0.0.1:1/v1", "it's@20", KEY, False), options(port=0))
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[-1]) == ["ready", "base_url=http://127.0.0.1:1/v1", "model=it's@20"]
    command = shlex.split(next(line for line in lines if line.startswith("agentrl eval")))
    assert command[command.index("--model") + 1] == "it's@20" and KEY not in "".join(lines)
    serving._announce(serving.Served("http://127.0.0.1:1/v1", "m", KEY, True), options(host="0.0.0.0"))
    said = capsys.readouterr().out
    assert said.count(KEY) == 1 and f"export AGENTRL_API_KEY={KEY}" in said and "nothing is encrypted" in said


def options(**changes):
    template = {"chat_template": None, "apply_chat_template_kwargs": ""}
    return SimpleNamespace(**{"api_key": True, "host": "127.0.0.1", "tool_call_parser": "auto", **template, **changes})


def test_a_key_is_given_or_made_for_a_terminal_or_asked_for(monkeypatch):
    monkeypatch.setenv("AGENTRL_API_KEY", KEY)
    assert serving._key(options()) == (KEY, False) and "AGENTRL_API_KEY" not in os.environ
    assert serving._key(options(api_key=False)) == ("", False)
    with pytest.raises(ConfigError, match="no terminal.*AGENTRL_API_KEY.*--no-api-key"):
        serving._key(options())
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    key, is_new = serving._key(options())
    assert is_new and len(key) > 20 and serving._key(options())[0] != key


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("h", False)]
)
def test_loopback(host, expected):
    assert serving.is_loopback(host) is expected


@pytest.mark.parametrize(
    ("source", "call_format", "opening", "expected"),
    [
        ("no thought", "hermes", "", "none"),
        ("<think>x</think>", "hermes", "", "none"),  # whether it thinks is the model's choice: left in the text
        ("enable_thinking </think>", "hermes", "", "qwen3"),
        ("enable_thinking </think>", "glm", "", "glm45"),
        ("</think>", "deepseekv3", "<think>\n", "deepseek-r1"),
        ("</think>", "deepseekv31", "", "deepseek-v3"),
    ],
)
def test_the_reasoning_parser_follows_the_template(source, call_format, opening, expected):
    chat = SimpleNamespace(template_source=source, call_format=call_format, opening=opening)
    assert serving._reasoning_parser(chat) == expected


def test_the_demo_models_parsers():
    wanted = options(reasoning_parser="auto")
    assert serving.parsers(wanted, str(demo_folder())) == ("hermes", None)
    assert serving.parsers(options(tool_call_parser="none", reasoning_parser="qwen3"), "x") == (None, "qwen3")


# -- a real server -------------------------------------------------------------------------------------------


class Served:
    """A running ``agentrl serve`` of the demo model."""

    def __init__(self, log):
        words = [sys.executable, "-m", "agentrl.cli.main", "serve", "--port", "0", "--threads", "1"]
        env = {**os.environ, "AGENTRL_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        self.log = log.open("w+")
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        self.said = ""
        for line in self.process.stdout:  # ends with the process, which has a deadline of its own
            self.said += line
            if ready := re.fullmatch(r"ready base_url=(\S+) model=(\S+)\n", line):
                self.url, self.model = ready.groups()
                return
        raise AssertionError(f"not ready: {self.said}{log.read_text()}")

    def post(self, path, body, key=KEY):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("serve") / "stderr")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait(timeout=20)


@pytest.mark.slow
def test_outside_clients_use_it(served):
    assert served.model == "demo" and KEY not in served.said and "$AGENTRL_API_KEY" in served.said
    question = {"model": "demo", "messages": QUESTION, "tools": [TOOL], "temperature": 0, "max_tokens": 64}
    assert served.post("/chat/completions", question, key="").status_code == 401
    assert served.post("/chat/completions", question, key="wrong").status_code == 401
    root, headers = served.url.removesuffix("/v1"), {"Authorization": f"Bearer {KEY}"}
    for path in ("/workers", "/get_server_info", "/flush_cache", "/engine_metrics"):
        assert httpx.get(root + path, headers=headers, trust_env=False).status_code == 404
    assert httpx.post(f"{root}/workers", json={"url": root}, headers=headers, trust_env=False).status_code == 404
    assert httpx.get(f"{root}/health", trust_env=False).status_code == 200
    choice = served.post("/chat/completions", question).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "search" and choice["finish_reason"] == "tool_calls"
    assert "Old Dunminster" in json.loads(call["function"]["arguments"])["query"]
    models = httpx.get(f"{served.url}/models", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).json()
    assert [m["id"] for m in models["data"]] == ["demo"]
    text = served.post("/completions", {"model": "demo", "prompt": "Old", "max_tokens": 3, "temperature": 0}).json()
    assert isinstance(text["choices"][0]["text"], str)
    streamed = served.post("/chat/completions", {**question, "stream": True}).text.splitlines()
    pieces = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    assert streamed[-2] == "data: [DONE]" and len(pieces) > 2
    deltas = [c for p in pieces for c in (p["choices"][0]["delta"].get("tool_calls") or ())]
    assert "".join(d["function"].get("arguments") or "" for d in deltas) == call["function"]["arguments"]


def router_of(served):
    """Address and key of the router behind the gateway, as its process was given them."""
    for process in descendants(served.process.pid):
        proc = Path(f"/proc/{process.pid}")
        words = proc.joinpath("cmdline").read_bytes().decode().split("\0")
        if "agentrl.engines.router" in words:
            environ = dict(v.split("=", 1) for v in proc.joinpath("environ").read_text().split("\0") if "=" in v)
            assert environ["AGENTRL_API_KEY"] != KEY
            return f"http://127.0.0.1:{json.loads(words[-2])['port']}", environ["AGENTRL_API_KEY"]
    raise AssertionError("no router")


@pytest.mark.slow
def test_a_server_gives_what_engines_give(served):
    """The same tasks, greedily: by tokens from the engine, and by messages from the very same engine."""
    import asyncio

    from agentrl.envs.registry import make_env
    from agentrl.rollout.conversation import EpisodeLimits
    from agentrl.rollout.policies.openai import OpenAIClient, ServerChat
    from agentrl.rollout.policies.sglang import EngineClient
    from agentrl.rollout.template.chat import ChatTemplate
    from agentrl.rollout.worker import EpisodeRunner
    from agentrl.tasks.source import held_out_tasks
    from agentrl.types import SamplingParams

    env = make_env("search", {})
    tasks = held_out_tasks("search", env, split="test", limit=12)
    env.close()

    async def play(client, chat):
        limits = EpisodeLimits(max_turns=4, max_response_len=64, max_context_len=1920)
        params = SamplingParams(temperature=0.0)
        runner = EpisodeRunner(lambda: make_env("search", {}), client, chat, params, limits, 12)
        try:
            groups = await asyncio.gather(*(runner.run_group(t, 1, f"g{i}") for i, t in enumerate(tasks)))
        finally:
            await runner.close()
        return [group.trajectories[0] for group in groups]

    async def both():
        async with EngineClient(*router_of(served)) as engine:
            by_tokens = await play(engine, ChatTemplate(str(demo_folder())))
        async with OpenAIClient(served.url, "demo", api_key=KEY) as server:
            reply = await server.complete(
                QUESTION, SamplingParams(temperature=0.0, stop=("tool_call>",)), tools=[TOOL], timeout=60
            )
            assert reply.stopped_by == "tool_call>" and "tool_call>" not in reply.content  # stripped, and named
            return by_tokens, await play(server, ServerChat())

    by_tokens, by_messages = asyncio.run(asyncio.wait_for(both(), 120))
    assert sum(bool(t.success) for t in by_tokens) >= 2
    for one, other in zip(by_tokens, by_messages, strict=True):
        assert (one.success, one.reward, one.stop_reason) == (other.success, other.reward, other.stop_reason)
        assert one.messages[-1]["content"] == other.messages[-1]["content"]
        counts = [[(t["prompt_tokens"], t["sampled_tokens"]) for t in x.info["turns"]] for x in (one, other)]
        assert counts[0] == counts[1]  # the server saw the very same prompts
        assert one.segments and not other.segments


@pytest.mark.slow
def test_ending_it_leaves_nothing(served):
    tree = descendants(served.process.pid)
    variables = [
        v for p in tree for v in Path(f"/proc/{p.pid}/environ").read_bytes().split(b"\0") if p.pid != served.process.pid
    ]
    made = {v.partition(b"=")[2] for v in variables if v.startswith((b"TMPDIR=", b"AGENTRL_TMPDIR="))}
    assert len(tree) >= 4 and any(os.path.isdir(folder) for folder in made if b"agentrl-" in folder)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=30) == 0
    assert served.process.stdout.read() == "stopped\n"
    assert not [p for p in tree if is_running(p)]
    assert not [folder for folder in made if b"agentrl-" in folder and os.path.isdir(folder)]
