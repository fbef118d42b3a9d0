"""The rewards that `--rm-type` names beside exact match, F1 and math."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.envs.builtin.prompt import PromptEnv
from agentrl.errors import ConfigError, EnvError, InfraError
from agentrl.rewards import RewardSet, dapo, deepscaler, gpqa, remote


@pytest.mark.parametrize(
    ("turn", "answer", "worth"),
    [
        ("<think>7*8</think> It is \\boxed{56}.", "56", 1.0),
        ("thinking \\boxed{1} </think> \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("thinking </think> \\boxed{3}", "\\boxed{3}", 1.0),
        ("thinking </think> \\boxed{3}", ["2", "3"], 1.0),
        ("\\boxed{56}", "56", 0.0),
        ("thinking \\boxed{56} </think> It is 56.", "56", 0.0),
        ("thinking </think> \\boxed{57}", "56", 0.0),
    ],
)
def test_deepscaler_counts_what_is_boxed_behind_the_reasoning(turn, answer, worth):
    assert deepscaler("", answer, ["earlier", turn]) == worth


@pytest.mark.parametrize(
    ("text", "answer", "worth"),
    [
        ("Answer: 3\nno\nANSWER : $56$", "56", 1.0),
        ("Answer: \\boxed{56}", 56, 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: 56\nAnswer: 57", "56", -1.0),
        ("It is 56.", "56", -1.0),
        ("Answer: 56" + " " * 400, "56", -1.0),
    ],
)
def test_dapo_counts_the_last_answer_line(text, answer, worth):
    assert dapo(text, answer) == worth


@pytest.mark.parametrize(
    ("text", "answer", "metadata", "worth"),
    [
        ("The answer is (C).", "C", None, 1.0),
        ("The answer is A. No: the correct option is **B**", "B", None, 1.0),
        ("Answer: \\boxed{D}", "D", None, 1.0),
        ("Between A and C I choose C", "C", None, 1.0),
        ("The answer is B", 1, None, 1.0),
        ("The answer is B", "blue", {"choices": ["red", "blue"]}, 1.0),
        ("The answer is A", "blue", {"choices": {"A": "red", "B": "blue"}}, 0.0),
        ("it must be blue", "blue", {"choices": ["red", "blue"]}, 1.0),
        ("The answer is Z", "C", None, 0.0),
        ("I do not know", "C", {"choices": ["x", "y", "z"], "correct_letter": "B"}, 0.0),
        ("The answer is C", "?", {"correct_letter": "c"}, 1.0),
        ("", "C", None, 0.0),
        ("", "A", None, 0.0),
        ("the", "a", None, 0.0),
        ("", "the", {"choices": ["the", "an"]}, 0.0),
        ("B, because I know it and I'm sure", "B", None, 1.0),
        ("I.", "I", None, 1.0),
    ],
)
def test_gpqa_reads_the_chosen_letter(text, answer, metadata, worth):
    assert gpqa(text, answer, {"metadata": metadata} if metadata else {}) == worth


@pytest.fixture
def server():
    """A reward server; ``server.replies`` is what it says in turn, the last again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = replies.pop(0) if len(replies) > 1 else replies[0]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    asked, replies = [], [(200, b"0.25")]
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.asked, http.replies, http.url = asked, replies, f"http://127.0.0.1:{http.server_port}/score"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


def prompts(tmp_path, **settings):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "7 * 8?", "label": "56"}) + "\n")
    return PromptEnv(str(file), reward="remote_rm", **settings)


async def test_a_server_gives_the_reward_of_prompt_data(server, tmp_path):
    env = prompts(tmp_path, rm_url=server.url)
    await env.areset(options={"split": "train", "index": 0})
    *_, info = await env.astep("It is 56.")
    assert info["rewards"] == {"remote_rm": 0.25}
    assert server.asked == [{"prompt": "7 * 8?", "response": "It is 56.", "label": "56"}]


async def test_a_server_may_give_parts_and_is_asked_again_after_a_fault(server):
    server.replies[:] = [(500, b"oops"), (200, b"{"), (200, b"null"), (200, b'{"right": 1, "brief": 0.5}')]
    judged = await RewardSet(remote.RemoteReward(server.url))("text", "56", row={})
    assert judged == {"right": 1.0, "brief": 0.5} and len(server.asked) == 4


@pytest.mark.parametrize("body", [b"{", b"true", b'"1"', b"[1]", b"[" * 99_999, b"1" * (remote.MOST_BYTES + 1)])
async def test_a_server_that_gives_no_number_is_not_the_models_fault(server, body):
    server.replies[:] = [(200, body)]
    with pytest.raises(InfraError, match="gave no reward in 6 tries"):
        await RewardSet(remote.RemoteReward(server.url))("text", "56", row={})
    assert len(server.asked) == remote.ATTEMPTS


async def test_a_request_that_is_refused_is_not_sent_again(server):
    server.replies[:] = [(429, b"later"), (404, b"no such path")]
    with pytest.raises(InfraError, match="refuses the request: HTTPStatusError: .*404"):
        await RewardSet(remote.RemoteReward(server.url))("text", "56", row={})
    assert len(server.asked) == 2


async def test_nan_from_a_server_is_refused(server):
    server.replies[:] = [(200, b"NaN")]
    with pytest.raises(EnvError, match="finite number"):
        await RewardSet(remote.RemoteReward(server.url))("text", "56", row={})


def test_a_remote_reward_needs_an_address(tmp_path):
    with pytest.raises(ConfigError, match="--rm-url"):
        prompts(tmp_path, rm_url="localhost:80")
