"""What the documentation shows is true: examples run, commands parse, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib.util
import io
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from finished_run import play, shop_source, shopper
from gymnasium.utils.env_checker import check_env
from shown_pages import PAGES, ROOT, Block, anchors, blocks, command_lines, inline_commands, links, name_of

import agentrl
from agentrl.cli import chaos, compare, convert, export, fetch_model, serve_retriever, show
from agentrl.cli.fetch_model import MODELS
from agentrl.cli.main import COMMANDS
from agentrl.cli.plan import PlanOptions
from agentrl.config import load_config, load_eval_config
from agentrl.config.layers import load_options
from agentrl.config.names import ADVICE, IMPLIED, NOT_AVAILABLE
from agentrl.config.parse import parse_flags
from agentrl.config.schema import Config, EvalConfig, ServeOptions
from agentrl.errors import ConfigError
from agentrl.versions import DISTRIBUTION

PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
README = ROOT / "README.md"

SMALL_COMMANDS = {
    "export": export.Options,
    "convert": convert.Options,
    "serve": ServeOptions,
    "serve-retriever": serve_retriever.Options,
    "chaos": chaos.Options,
}
OPTIONS = {**SMALL_COMMANDS, "fetch-model": fetch_model.Options, "compare": compare.Options, "show": show.Options}
NOT_OURS = {"--help", "--config", "--dist-ckpt-strictness", "--node-ip-address", "--enable-memory-saver"}

# Names in commands that stand for something of the reader's.
PLACEHOLDERS = {"DIR": "MODEL", "RUN": "runs/NAME", "FILE": "tasks.jsonl", "PATH": "tasks.jsonl"}


def run_block(block: Block, scope: dict, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block; what it prints must be what its comments say it prints."""
    if block.code.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.code, scope, name_of(block.page), None, block.line)
        test.globs = scope
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False).failed == 0
        return
    code = compile("\n" * block.line + block.code, str(block.page), "exec", dont_inherit=True)
    capsys.readouterr()
    exec(code, scope)
    said = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*\)  # (.*)$", block.code, re.M)
    for text in promised:
        if not text.startswith("the "):  # words about the output, not the output
            assert text in said, f"{name_of(block.page)}:{block.line} promises {text!r}, got {said}"


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_the_python_of_a_page_runs(page: Path, documented: Path, capsys, monkeypatch):
    monkeypatch.setattr(agentrl.envs.registry, "_registry", dict(agentrl.envs.registry._registry))
    scope: dict = {"__name__": "documented"}
    for block in blocks(page):
        if block.language == "python" and block.runs:
            run_block(block, scope, capsys)


def test_nearly_all_python_is_run():
    shown = [block for page in PYTHON_PAGES for block in blocks(page) if block.language == "python"]
    assert len(shown) > 15 and all(block.runs for block in shown)


# -- README's environment ----------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> str:
    (tmp_path / "shop.py").write_text(shop_source(), encoding="utf-8")
    return f"{tmp_path / 'shop.py'}:Shopping"


def test_the_readmes_environment_is_short_and_the_one_tested_elsewhere():
    source = shop_source()
    assert len(source.splitlines()) <= 30
    assert source == (ROOT / "tests" / "envs" / "example_env.py").read_text(encoding="utf-8")


def test_the_readmes_environment_passes_the_checker_without_warnings(shop: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(agentrl.make(shop))


def test_the_readmes_environment_is_played_to_its_reward(shop: str):
    scope: dict = {}
    exec(shop_source(), scope)
    trajectory = play(shop, shopper(scope["PRICES"]), index=3, split="test")
    assert (trajectory.error, trajectory.reward, trajectory.success, trajectory.num_turns) == (None, 1.0, True, 2)
    assert [message["role"] for message in trajectory.messages][-2:] == ["tool", "assistant"]
    (segment,) = trajectory.segments
    assert 0 < segment.num_sampled < len(segment)
    wrong = play(shop, ["7"], index=3, split="test")
    assert (wrong.reward, wrong.success) == (0.0, False)


def test_the_custom_generate_function_plays(documented: Path):
    scope: dict = {}
    exec(shop_source(), scope)
    policy = shopper(scope["PRICES"])
    trajectory = play("shop.py:Shopping", policy, index=3, generate="reminder.py:generate")
    assert (trajectory.error, trajectory.reward, str(trajectory.stop_reason)) == (None, 1.0, "done")
    assert {"role": "user", "content": "Be brief."} in trajectory.messages


# -- commands ----------------------------------------------------------------------------------------


def filled(words: list[str]) -> list[str]:
    """A command line with its placeholders replaced by what the test folder holds."""
    out = []
    for word in words:
        head, equals, value = word.partition("=")
        if re.fullmatch(r"models/\S+|Qwen/\S+|my-model|my-agent", word) and out[-1] == "--hf-checkpoint":
            word = "MODEL"
        elif word in PLACEHOLDERS:
            word = PLACEHOLDERS[word]
        elif equals and value in PLACEHOLDERS:
            word = f"{head}={PLACEHOLDERS[value]}"
        out.append(word)
    return out


COMMAND_LINES = [(page, words) for page in PAGES for words in command_lines(page)]


def test_commands_are_found():
    found = {words[1] for _, words in COMMAND_LINES}
    assert {"train", "eval", "export", "serve-retriever"} <= found and len(COMMAND_LINES) > 15


@pytest.mark.parametrize(
    ("page", "words"), COMMAND_LINES, ids=lambda v: name_of(v) if isinstance(v, Path) else " ".join(v[1:])[:60]
)
def test_a_command_is_accepted(page: Path, words: list[str], documented: Path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # `agentrl env play`: the person leaves at once
    command, argv = words[1], filled(words[2:])
    config = None
    if command == "train":
        config = load_config(argv)
    elif command == "eval":
        config = load_eval_config(argv)
    elif command in SMALL_COMMANDS:
        load_options(SMALL_COMMANDS[command], argv)
    elif command == "fetch-model":
        assert argv[0] in MODELS
        load_options(fetch_model.Options, argv[1:])
    else:
        importlib.import_module(f"agentrl.cli.{command}").run(argv)
    if config is not None and "--config" not in argv:
        held_out = [config.prompt_env_spec(path) for _, path in config.eval_prompt_data]
        for spec, arguments in [config.env_spec(), *held_out] if config.env or config.prompt_data else held_out:
            agentrl.make(spec, **arguments).close()
    for flag, load in (("--custom-generate-function-path", _generate), ("--custom-rm-path", agentrl.rewards.load)):
        if flag in argv:
            assert callable(load(argv[argv.index(flag) + 1]))


def _generate(spec: str):
    from agentrl.rollout.generate_hook import load_generate_function

    return load_generate_function(spec)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_named_in_text_exist(page: Path):
    for words in inline_commands(page):
        assert words[1] in COMMANDS or words[1].startswith("-"), words
        unknown = [word for word in words[2:] if word.startswith("--") and not known_flag(words[1], word)]
        assert not unknown, words


def known_flag(command: str, flag: str) -> bool:
    """Whether a command takes a flag, whatever stands behind it."""
    if flag == "--help":
        return True
    try:
        if command in OPTIONS:
            load_options(OPTIONS[command], [flag])
        else:
            parse_flags({"train": Config, "eval": EvalConfig, "plan": PlanOptions}[command], [flag])[0].readable()
    except ConfigError as error:
        return "got nothing" in str(error)
    return True


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "configuration.md"], ids=name_of)
def test_flags_named_in_text_exist(page: Path):
    commands = ("train", "eval", "plan", *OPTIONS)
    text = page.read_text(encoding="utf-8")
    for flag in set(re.findall(r"`(--[a-z][a-z0-9-]*)(?<!-)(?![\w-])", text)) - NOT_OURS:
        of_others = flag[2:] in {*IMPLIED, *NOT_AVAILABLE, *ADVICE}
        assert of_others or any(known_flag(command, flag) for command in commands), flag


def test_make_targets_extras_and_modules_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"-e '\.\[(\w+)\]'", text)) <= set(extras)
    for module in re.findall(r"python -m (agentrl[\w.]*)", text):
        assert importlib.util.find_spec(module), module


PRINTED = [
    file
    for pattern in ("README.md", "docs/**/*.md", "agentrl/**/*.py", "agentrl/assets/new_env/*", "envs_examples/**/*.md")
    for file in ROOT.glob(pattern)
]


INSTALL = re.compile(r"pip install (?:-\S+ )*|pypi\.org/project/")


@pytest.mark.parametrize("file", [file for file in PRINTED if INSTALL.search(file.read_text())], ids=name_of)
def test_install_lines_name_this_project_and_not_its_namesake(file: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    assert project == DISTRIBUTION != "agentrl"
    text = file.read_text(encoding="utf-8")
    for found in INSTALL.finditer(text):
        assert not re.match(r"['\"]?agentrl(?!-toolkit)\b", text[found.end() :]), text[found.start() :][:80]


def test_packages_that_pages_import_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in wanted}
    python = "\n".join(block.code for page in PYTHON_PAGES for block in blocks(page) if block.language == "python")
    shown = {"shop", *(Path(block.file).stem for page in PAGES for block in blocks(page) if block.file)}
    imported = set(re.findall(r"^(?:from|import) (\w+)", python, re.M)) - {"agentrl", *shown, *sys.stdlib_module_names}
    assert imported <= declared and "pandas" in imported


# -- links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name_of(page)} links to {target}; there are {sorted(anchors(file))}"


def test_every_page_is_reached_from_the_readme():
    seen, todo = set(), [README]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in links(page):
            file = (page.parent / target.partition("#")[0]).resolve()
            file = file / "README.md" if file.is_dir() else file
            todo += [file] if file.suffix == ".md" and file.is_file() else []
    missing = [name_of(page) for page in PAGES if page not in seen]
    assert not missing
