"""The files tool does its work, cannot be led out of its folder, and keeps every limit."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.errors import ConfigError
from agentrl.tools import FilesTool, ToolError
from agentrl.tools.builtin.jail import MAX_DEPTH, MAX_PATH, Jail, JailError, split


@pytest.fixture
def files():
    tool = FilesTool().for_episode(None)
    yield tool
    tool.close()


def refused(tool: FilesTool, *arguments, **options) -> str:
    with pytest.raises(ToolError) as caught:
        tool(*arguments, **options)
    assert caught.value.type == "execution"
    assert len(caught.value.message) < 300
    return caught.value.message


def test_write_read_list_search(files):
    assert files("list") == "no files"
    assert files("write", "notes/a.txt", "first line\nSecond Line\n") == "wrote 23 characters to notes/a.txt"
    files("write", "b.txt", "é")
    assert files("read", "./notes//a.txt") == "first line\nSecond Line\n"
    assert files("read", "notes/a.txt", start=2) == "Second Line\n"
    assert files("list") == "b.txt (2 bytes)\nnotes/a.txt (23 bytes)"
    assert files("list", "notes") == files("list", "notes/a.txt") == "notes/a.txt (23 bytes)"
    assert files("search", text="second") == "notes/a.txt:2: Second Line"
    assert files("search", "notes", "nothing like it") == "no match in 1 files"
    files("write", "b.txt", "")
    assert files("read", "b.txt") == "[the file is empty]"


def test_the_model_is_told_what_it_needs():
    function = FilesTool().schema()["function"]
    assert function["parameters"]["properties"]["action"]["enum"] == ["list", "read", "write", "search"]
    assert len(json.dumps(function)) < 800


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.txt", "'..' is not allowed"),
        ("a/../../secret.txt", "'..' is not allowed"),
        ("a/..", "'..' is not allowed"),
        ("/etc/passwd", "is absolute"),
        ("//etc/passwd", "is absolute"),
        ("a\0b", "null characters"),
        ("\ud800", "lone surrogates"),
        ("x" * (MAX_PATH + 1), f"at most {MAX_PATH} bytes"),
        ("x" * 300, "name that is too long"),
        ("a/" * MAX_DEPTH + "b", f"at most {MAX_DEPTH} deep"),
        ("", "path of a file is needed"),
        (".", "path of a file is needed"),
    ],
)
@pytest.mark.parametrize("action", ["read", "write"])
def test_paths_that_are_refused(files, action, path, message):
    assert message in refused(files, action, path, "text")


def test_what_does_not_fit_is_explained(files):
    files("write", "folder/file.txt", "x")
    assert "does not exist" in refused(files, "read", "nothing.txt")
    assert "does not exist" in refused(files, "list", "nothing")
    assert "is a folder, not a file" in refused(files, "read", "folder")
    assert "is a folder, not a file" in refused(files, "write", "folder", "x")
    assert "not a folder" in refused(files, "write", "folder/file.txt/below", "x")
    assert "start must be from 1 to 1" in refused(files, "read", "folder/file.txt", start=2)
    assert "start must be from 1 to 1" in refused(files, "read", "folder/file.txt", start=0)
    assert "give the text" in refused(files, "search")
    (files.folder / "image.png").write_bytes(b"\x89PNG\0\0")
    assert "is not text (6 bytes)" in refused(files, "read", "image.png")
    assert files("search", text="PNG") == "no match in 2 files"


def test_links_are_never_followed(files, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    files("write", "own.txt", "own")
    (files.folder / "file").symlink_to(secret)
    (files.folder / "folder").symlink_to(tmp_path)
    (files.folder / "inside").symlink_to(files.folder / "own.txt")
    assert "is a link" in refused(files, "read", "file")
    assert "is a link" in refused(files, "read", "inside")
    assert "not a folder" in refused(files, "read", "folder/secret.txt")
    assert "is a link" in refused(files, "write", "file", "changed")
    assert "not a folder" in refused(files, "write", "folder/new.txt", "x")
    assert "not a folder" in refused(files, "list", "folder")
    assert files("list") == "own.txt (3 bytes)"
    assert files("search", text="secret") == "no match in 1 files"
    assert secret.read_text() == "secret"
    assert not (tmp_path / "new.txt").exists()


def test_a_link_swapped_in_while_calls_run_is_not_followed(files, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.txt").write_text("outside")
    files("write", "d/x.txt", "inside")
    folder, parked, link = files.folder / "d", files.folder / "parked", files.folder / "link"
    link.symlink_to(outside)
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            folder.rename(parked)
            link.rename(folder)
            folder.rename(link)
            parked.rename(folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    read, refusals = set(), 0
    begun = time.monotonic()
    try:
        while time.monotonic() < begun + 1 or (not (read and refusals) and time.monotonic() < begun + 20):
            try:
                read.add(files("read", "d/x.txt"))
            except ToolError:
                refusals += 1
    finally:
        over.set()
        swapping.join()
    assert read == {"inside"}
    assert refusals


def test_special_files_are_refused_without_waiting(files):
    os.mkfifo(files.folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(files.folder / "socket"))
        for name in ("pipe", "socket"):
            assert "not a file" in refused(files, "read", name)
            assert "not a file" in refused(files, "write", name, "x")
    assert files("list") == "no files"


def test_a_device_is_refused():
    jail = Jail("/dev")
    with pytest.raises(JailError, match="is a device, not a file"):
        jail.read("zero", 10)
    jail.close()


# -- limits -----------------------------------------------------------------------------------------


def test_a_read_shows_so_much_and_says_how_to_go_on():
    tool = FilesTool(files={"a.txt": "".join(f"line {n}\n" for n in range(1, 101))}, max_read=50).for_episode(None)
    first = tool("read", "a.txt")
    assert first.endswith("line 7\n[lines 1 to 7 of 100; read on with start=8]")
    assert tool("read", "a.txt", start=8).startswith("line 8\n")
    tool("write", "long.txt", "x" * 120)
    assert tool("read", "long.txt") == "x" * 50 + "\n[line 1 is cut after 50 characters]"


def test_a_long_file_is_read_to_the_limit(files):
    tool = FilesTool(max_file=100).for_episode(None)
    (tool.folder / "long.txt").write_text("y" * 1000)
    assert tool("read", "long.txt").endswith("[only the first 100 of 1000 bytes can be read]")
    assert "at most 100 bytes, this text has 101" in refused(tool, "write", "a.txt", "x" * 101)
    assert "at most 100 bytes, this text has 102" in refused(tool, "write", "a.txt", "é" * 51)
    tool.close()


def test_all_files_together_have_a_limit():
    tool = FilesTool(max_total=100).for_episode(None)
    for _ in range(5):
        tool("write", "same.txt", "x" * 60)  # overwriting counts once
    tool("write", "other.txt", "x" * 40)
    assert "at most 100 bytes can be written in all, this would make 101" in refused(tool, "write", "third.txt", "x")
    tool("write", "same.txt", "")
    tool("write", "third.txt", "x" * 60)
    tool.close()


def test_what_cannot_be_written_leaves_no_folders():
    tool = FilesTool().for_episode(None)
    for path in ("a/b/" + "x" * 300, "a/b/c/" + "y" * 300):
        assert "a name that is too long" in refused(tool, "write", path, "text")
    assert os.listdir(tool.folder) == []
    tool(action="write", path="a/1.txt", text="")
    assert "too long" in refused(tool, "write", "a/b/" + "x" * 300, "text")
    assert os.listdir(tool.folder / "a") == ["1.txt"]
    tool.close()


def test_the_number_of_files_and_folders_has_a_limit():
    tool = FilesTool(max_files=4).for_episode(None)
    tool("write", "a/b/1.txt", "")
    assert "at most 4 files and folders" in refused(tool, "write", "c/2.txt", "")
    tool("write", "2.txt", "")
    assert "at most 4 files and folders" in refused(tool, "write", "3.txt", "")
    tool("write", "2.txt", "again")
    tool.close()


def test_a_search_that_did_not_see_every_file_says_so(monkeypatch: pytest.MonkeyPatch):
    tool = FilesTool(files={f"{n}.txt": "word\n" for n in range(4)}).for_episode(None)
    monkeypatch.setattr("agentrl.tools.builtin.files.MAX_FILES_SEARCHED", 3)
    assert tool("search", text="absent") == "[stopped after 3 files, 15 bytes; search in a folder]"
    monkeypatch.setattr("agentrl.tools.builtin.files.MAX_FILES_SEARCHED", 4)
    assert tool("search", text="absent") == "no match in 4 files"
    tool.close()


def test_listing_and_searching_have_limits():
    tool = FilesTool(files={f"{n:02}.txt": "word\n" for n in range(9)}, max_listed=3, max_searched=20).for_episode(None)
    assert tool("list").splitlines()[2:] == ["02.txt (5 bytes)", "[more than 3 files; list a folder of them]"]
    assert tool("search", text="word").splitlines()[3:] == [
        "[more than 3 matches; search for something longer]",
        "[stopped after 4 files, 20 bytes; search in a folder]",
    ]
    tool.close()


def test_of_a_folder_so_many_names_are_read(files, monkeypatch):
    for name in "abc":
        files("write", name, name)
    monkeypatch.setattr("agentrl.tools.builtin.jail.MAX_NAMES", 2)
    assert len(files("list").splitlines()) == 2


# -- episodes ---------------------------------------------------------------------------------------


class Desk(agentrl.ToolEnv):
    tools = [FilesTool(files={"readme.txt": "Read me."})]
    tasks = {
        "train": [{"prompt": "Read a.txt.", "answer": "A", "files": {"a.txt": "A"}}],
        "test": [{"prompt": "Read b.txt.", "answer": "B", "files": {"b.txt": "B"}}],
    }
    reward = "exact_match"


def call(**arguments) -> str:
    return f"<tool_call>{json.dumps({'name': 'files', 'arguments': arguments})}</tool_call>"


def test_each_episode_has_a_folder_of_its_own_that_is_removed():
    env = Desk()
    env.reset(options={"split": "train", "index": 0})
    assert env.step(call(action="list"))[0] == "a.txt (1 bytes)\nreadme.txt (8 bytes)"
    env.step(call(action="write", path="mine.txt", text="mine"))
    first = env._tools["files"].folder
    env.reset(options={"split": "test", "index": 0})
    assert env.step(call(action="list"))[0] == "b.txt (1 bytes)\nreadme.txt (8 bytes)"
    second = env._tools["files"].folder
    gc.collect()
    assert not first.exists()
    assert second.exists()
    env.close()
    del env
    gc.collect()
    assert not second.exists()


def test_closing_removes_the_folder_and_later_calls_fail():
    tool = FilesTool().for_episode(None)
    folder = tool.folder
    assert oct(folder.stat().st_mode)[-3:] == "700"
    tool.close()
    tool.close()
    assert not folder.exists()
    assert "the episode is over" in refused(tool, "list")


def test_no_folder_is_made_for_an_episode_without_calls():
    tool = FilesTool(files={"a.txt": "A"}).for_episode(None)
    tool.close()
    assert tool._jail is None


def test_a_given_folder_is_read_only_unless_said_otherwise(tmp_path: Path):
    (tmp_path / "a.txt").write_text("A")
    tool = FilesTool(tmp_path).for_episode(None)
    assert tool("read", "a.txt") == "A"
    assert "write" not in tool.schema()["function"]["parameters"]["properties"]["action"]["enum"]
    assert "read-only" in refused(tool, "write", "a.txt", "B")
    writable = FilesTool(tmp_path, read_only=False).for_episode(None)
    writable("write", "a.txt", "B")
    for each in (tool, writable):
        each.close()
    assert (tmp_path / "a.txt").read_text() == "B"


def test_writing_over_a_hard_link_leaves_the_other_name_alone(tmp_path: Path):
    outside, root = tmp_path / "outside.txt", tmp_path / "root"
    outside.write_text("outside")
    root.mkdir()
    os.link(outside, root / "inside.txt")
    tool = FilesTool(root, read_only=False).for_episode(None)
    tool("write", "inside.txt", "changed")
    tool.close()
    assert outside.read_text() == "outside"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": "/no/such/folder"}, "is not a folder"),
        ({"root": "/tmp", "files": {"a": "b"}}, "files are what a private folder starts with"),
        ({"files": {"a": 1}}, "texts by path"),
        ({"files": {"../a": "x"}}, "'..' is not allowed"),
    ],
)
def test_wrong_settings_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        FilesTool(**options)


@given(path=st.text(st.sampled_from("ab./\\~\0\n\ud800é "), max_size=12))
@settings(max_examples=150, deadline=None)
def test_no_path_leads_out(path):
    try:
        parts = split(path)
    except JailError:
        return
    assert not path.startswith("/")
    assert not {"..", ".", ""} & set(parts)
    assert os.path.normpath(os.path.join("/jail", *parts)).startswith("/jail")
