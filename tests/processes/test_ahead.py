"""Servers started ahead: taken once, by an owner of their kind, with which they end; the rest end with the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from agentrl.errors import EngineError
from agentrl.processes.ahead import AheadProcess, servers_ahead
from agentrl.processes.tree import descendants, identify, is_running
from tests.processes.test_server import DummyServer, wait_for

MODULE = "tests.processes.dummy_server"


class EagerServer(DummyServer):
    """A dummy that takes one started ahead."""

    def ahead(self):
        return ["a kind"]


def waiting():
    """The one that waits: a child of this process that was started ahead. Popen returns a moment before it shows so."""

    def found():
        return [p for p in descendants(os.getpid()) if b"--ahead" in Path(f"/proc/{p.pid}/cmdline").read_bytes()]

    wait_for(found)
    (there,) = found()
    return there


def test_an_owner_takes_a_server_and_ends_it(tmp_path):
    with servers_ahead(MODULE, ["a kind"], {}, 1, log_dir=tmp_path):
        there = waiting()
        server, second = EagerServer(tmp_path, children=1, print="a word"), EagerServer(tmp_path)
        server.start(30)
        assert server.pid == there.pid and isinstance(server._process, AheadProcess)
        assert server.is_alive() and not server.wait(0) and "a word" in server.log_tail()
        assert server.api_key.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
        second.start(30)  # none waits any more: it starts its own
        assert second.pid != there.pid
        tree = server.tree()
        assert len(tree) == 2
        for started in (server, second):
            started.stop()
        assert not any(map(is_running, tree))
    assert "AGENTRL_AHEAD" not in os.environ


def test_a_server_of_another_kind_is_not_taken_and_ends_with_the_run(tmp_path):
    with servers_ahead(MODULE, ["a kind"], {"OMP_NUM_THREADS": "3"}, 1, log_dir=tmp_path):
        there = waiting()
        server = EagerServer(tmp_path)
        server.start(30)
        assert server.pid != there.pid
        server.stop()
    wait_for(lambda: not is_running(there))


def test_one_that_ends_while_it_starts_is_an_error_with_its_log(tmp_path):
    with servers_ahead(MODULE, ["a kind"], {}, 1, log_dir=tmp_path):
        server = EagerServer(tmp_path, exit=3, print="the reason")
        try:
            server.start(30)
        except EngineError as error:
            assert "did not start" in str(error) and "the reason" in str(error)
        else:
            raise AssertionError("it started")


def test_a_server_ends_with_an_owner_that_is_killed_though_the_run_lives(tmp_path):
    owner = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from tests.processes.test_ahead import EagerServer
        server = EagerServer(Path(sys.argv[1]))
        server.start(30)
        print(server.pid, flush=True)
        time.sleep(300)
    """)
    with servers_ahead(MODULE, ["a kind"], {}, 1, log_dir=tmp_path):
        there = waiting()
        process = subprocess.Popen([sys.executable, "-c", owner, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert int(process.stdout.readline()) == there.pid == identify(there.pid).pid
        process.kill()
        process.wait()
        wait_for(lambda: not is_running(there))
        process.stdout.close()


def test_a_server_that_waits_ends_with_a_run_that_is_killed(tmp_path):
    run = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from agentrl.processes.ahead import servers_ahead
        with servers_ahead(sys.argv[1], ["a kind"], {}, 1, log_dir=Path(sys.argv[2])):
            print(os.environ["AGENTRL_AHEAD"], flush=True)
            time.sleep(300)
    """)
    process = subprocess.Popen([sys.executable, "-c", run, MODULE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    folder = process.stdout.readline().strip()
    there = waiting()
    process.kill()
    process.wait()
    process.stdout.close()
    shutil.rmtree(folder)
    wait_for(lambda: not is_running(there))


def test_what_is_not_a_request_is_not_one(tmp_path):
    """An owner that was slower than another closes its connection: the server waits on."""
    import socket

    with servers_ahead(MODULE, ["a kind"], {}, 1, log_dir=tmp_path):
        (path,) = Path(os.environ["AGENTRL_AHEAD"]).iterdir()
        for sent in (b"", json.dumps({"half": 1}).encode()):
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(str(path))
                other.sendall(sent)
        server = EagerServer(tmp_path)
        server.start(30)
        assert isinstance(server._process, AheadProcess)
        server.stop()
