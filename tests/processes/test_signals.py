"""Logs and signals, as every process of a run has them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from agentrl.processes.signals import (
    Terminated,
    cancel_on_signals,
    hold_signals,
    raise_on_signals,
    stderr_to,
    write_log_to,
)


@pytest.fixture
def logger():
    logger = logging.getLogger("agentrl")
    before = logger.handlers, logger.propagate, logger.level
    yield logging.getLogger("agentrl.test")
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def test_a_log_holds_no_control_characters_no_secrets_and_no_forged_lines(logger, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    path = tmp_path / "driver.log"
    write_log_to(path, "info")
    logger.warning("a server said %s", "\x1b]52;c;aGk=\x07 \ud800 hunter2-hunter2 sk-" + "a" * 20 + "\n2026 ERROR x: y")
    first, second = path.read_text().splitlines()
    assert "a server said \\x1b]52;c;aGk=\\x07 \\ud800 [secret] [secret]" in first
    assert second == "  2026 ERROR x: y"
    assert capfd.readouterr() == ("", "")


def test_warnings_reach_the_log_of_the_driver_too(logger, tmp_path):
    own, drivers = tmp_path / "own.log", tmp_path / "driver.log"
    write_log_to(own, "info", who="rollout", warnings_to=drivers)
    logger.info("a detail")
    logger.warning("engine-0 is replaced")
    assert len(own.read_text().splitlines()) == 2
    (line,) = drivers.read_text().splitlines()
    assert line.endswith("WARNING [rollout] agentrl.test: engine-0 is replaced")


def test_what_libraries_write_to_standard_error_goes_to_a_file(tmp_path, capfd):
    path = tmp_path / "stderr.log"
    with stderr_to(path):
        os.write(2, b"\x1b[33mfrom C++\x1b[0m\n")
        print("from Python", file=sys.stderr)
    print("afterwards", file=sys.stderr)
    assert path.read_text() == "\\x1b[33mfrom C++\\x1b[0m\nfrom Python\n"
    assert capfd.readouterr().err == "afterwards\n"
    with stderr_to(tmp_path / "nothing.log"):
        pass
    assert not (tmp_path / "nothing.log").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_code_and_coroutines_and_handlers_are_put_back(signum, code):
    before = signal.getsignal(signum)

    async def wait() -> None:
        with cancel_on_signals():
            os.kill(os.getpid(), signum)
            await asyncio.sleep(60)

    with raise_on_signals():
        ours = signal.getsignal(signum)
        with pytest.raises(Terminated) as caught:
            asyncio.run(wait())
        assert caught.value.exit_code == code and signal.getsignal(signum) is ours
        with pytest.raises(Terminated, match=signal.Signals(signum).name):
            os.kill(os.getpid(), signum)
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize(
    ("signum", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_in_a_finalizer_is_not_lost(signum, error):
    class Last:
        def __del__(self):
            signal.raise_signal(signum)

    hook = sys.unraisablehook
    with pytest.raises(error), raise_on_signals():
        Last()
        time.sleep(20)
    assert sys.unraisablehook is hook


@pytest.mark.parametrize(
    ("signum", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_waits_for_the_end_of_what_must_not_be_left(signum, error):
    before, reached = signal.getsignal(signum), []
    with raise_on_signals():
        ours = signal.getsignal(signum)
        with pytest.raises(error), hold_signals():
            signal.raise_signal(signum)
            reached.append("end")
            signal.signal(signum, signal.SIG_DFL)  # as libraries do
        assert reached == ["end"] and signal.getsignal(signum) is ours
        with pytest.raises(error), hold_signals():
            signal.raise_signal(signum)
            signal.raise_signal(signum)
            reached.append("never")
        assert reached == ["end"] and signal.getsignal(signum) is ours
    assert signal.getsignal(signum) is before


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_command_that_still_imports_ends_with_a_word(signum, code, tmp_path):
    """The signal comes in the middle of an import that takes its time."""
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "agentrl", "env", "check", f"{tmp_path}/slow.py:Env"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        while line and "importing" not in line:
            line = process.stdout.readline()
        process.send_signal(signum)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in said and len(said.strip().splitlines()) == 1
