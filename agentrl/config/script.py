"""The flags of a slime launch script, and what each becomes here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.megatron_options import CHECKPOINT
from agentrl.config.megatron_options import problems as megatron_problems
from agentrl.config.names import ADVICE, FROM_CHECKPOINT, IMPLIED, NOT_AVAILABLE, renamed
from agentrl.config.options import options
from agentrl.config.parse import parse_flags
from agentrl.config.schema import Config
from agentrl.errors import ConfigError

_END = "\n"
_PROGRAM = re.compile(r"(?:.*/)?(train(?:_async)?\.py)$")
_EXPANDED = re.compile(r"\$\{(\w+)\[[@*]\]\}$")
_INSIDE = r"[^()]*+"
for _ in range(4):
    _INSIDE = rf"(?:[^()]|\({_INSIDE}\))*+"
_COMMAND = re.compile(rf"\$\({_INSIDE}\)|`[^`]*`")
"""A command or a sum whose output stands in the script's place, with others inside it."""
_HELD = re.compile("\ue000(\\d+)\ue001")
_ROOM_FOR_PROMPTS = 4096
_CALLED = {
    "custom-rm-path": "f(text, answer), see docs/rewards.md",
    "custom-generate-function-path": "generate(ctx), see docs/training.md",
}


@dataclass(frozen=True)
class Flag:
    """One flag of the script, without dashes, and the words behind it."""

    name: str
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"--{self.name}", *map(quoted, self.words)])


@dataclass(frozen=True)
class Translation:
    """What becomes of a flag of the script: ``kept`` here (None: left out), and why."""

    given: Flag
    kept: Flag | None
    remark: str


def read_script(path: Path) -> tuple[str, list[Flag], list[str]]:
    """``(program, flags, absent)`` of the last call of slime's ``train.py`` or ``train_async.py`` in a shell script.

    Arrays of the script are put in where the call names them, those of files that it sources too, where these are
    there; ``absent`` are those that are nowhere. Variables and commands in ``$(...)`` stay as they are written.

    Raises ConfigError: the file cannot be read as a shell script, or calls neither."""
    words = list(_words(path))
    arrays = _arrays(words)
    calls = [(n, found[1]) for n, word in enumerate(words) if (found := _PROGRAM.match(word))]
    if not calls:
        raise ConfigError(f"{path} calls no train.py or train_async.py: expected a launch script of slime.")
    position, program = calls[-1]
    behind = words[position + 1 :]
    ends = [n for n, word in enumerate(behind) if word and set(word) <= set(";&|()" + _END)]
    taken: list[str] = []
    absent: list[str] = []
    behind = behind[: ends[0] if ends else None]
    for before, word in zip(["", *behind], behind, strict=False):
        array = _EXPANDED.match(word)
        if array:
            taken += arrays.get(array[1], [])
            absent += [] if array[1] in arrays else [word]
        elif not re.match(r"\d?[<>]", word) and not re.fullmatch(r"\d?[<>]+", before):  # nor what that names
            taken.append(word)
    return program, _flags(taken), absent


def _words(path: Path, inside: tuple[Path, ...] = ()) -> Iterator[str]:
    """Words of a script, line ends among them; a file that it sources stands in place of that line, if it is there."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ")
    commands = [found[0] for found in _COMMAND.finditer(text)]
    numbers = iter(range(len(commands)))
    text = _COMMAND.sub(lambda _: f"\ue000{next(numbers)}\ue001", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|" + _END)
    lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", " \t\r", True
    try:
        words = [_HELD.sub(lambda n: commands[int(n[1])], word) for word in lexer]
    except ValueError as error:
        raise ConfigError(f"{path}: not a shell script that can be read: {error}") from None
    for before, word in zip([_END, *words], words, strict=False):
        if before in ("source", "."):
            sourced = Path(re.sub(r"\$\{?\w*DIR\w*\}?|^\$\(.*\)", lambda _: str(path.parent), word))
            if sourced.is_file() and sourced not in inside:
                yield from (_END, *_words(sourced, (*inside, path)), _END)
                continue
        yield word


def _arrays(words: Sequence[str]) -> dict[str, list[str]]:
    """``NAME=( ... )`` of a script; a later one of the same name counts, ``+=`` adds."""
    arrays: dict[str, list[str]] = {}
    for n, word in enumerate(words):
        head = re.match(r"(\w+)(\+?)=$", word)
        if head and words[n + 1 : n + 2] and words[n + 1].startswith("("):
            rest = words[n + 2 :]
            closing = next((k for k, w in enumerate(rest) if ")" in w and set(w) <= set("()" + _END)), len(rest))
            members = [w for w in rest[:closing] if w.strip(_END)]
            arrays[head[1]] = (arrays.get(head[1], []) if head[2] else []) + members
    return arrays


def _flags(words: Sequence[str]) -> list[Flag]:
    found: list[Flag] = []
    for word in words:
        if word.startswith("--"):
            name, sep, value = word[2:].partition("=")
            found.append(Flag(name, (value,) if sep else ()))
        elif found:
            found[-1] = Flag(found[-1].name, (*found[-1].words, word))
    return found


def translate(program: str, flags: Sequence[Flag]) -> list[Translation]:
    """What each flag becomes, in their order, and what follows from defaults that differ."""
    given = {flag.name: flag for flag in flags}
    done = [_translated(flag, given) for flag in flags]
    if program == "train_async.py":
        ahead = Flag("async-buffer-size", ("1",))
        done.insert(0, Translation(ahead, ahead, "train_async.py plays one rollout ahead of the trained one"))
    return done + list(_added(given))


def _translated(flag: Flag, given: dict[str, Flag]) -> Translation:
    name, words = flag.name, flag.words
    known = {option.flag[2:] for option in options(Config).values()}
    right = None if name in known else renamed(name, known)
    new, *value = right[2:].split() if right else [name]
    reason = FROM_CHECKPOINT if new.replace("-", "_") in CHECKPOINT else IMPLIED.get(name)
    if reason is not None:
        return Translation(flag, None, f"needless: {reason}")
    if name in NOT_AVAILABLE:
        return Translation(flag, None, f"not available yet: {NOT_AVAILABLE[name]}")
    if name in ADVICE:
        return Translation(flag, None, ADVICE[name])
    if name == "ref-load" and not {"use-kl-loss", "kl-coef"} & set(given):
        return Translation(flag, None, "needless: there is no KL loss, so no reference model")
    if name == "ref-load":
        note = "the reference is --hf-checkpoint; `agentrl convert` makes a Hugging Face folder of another"
        return Translation(flag, None, note)
    if name == "load" and words and given.get("save", flag).words != words:
        note = "--load takes a run of agentrl; `agentrl convert` makes a Hugging Face folder of slime's checkpoint"
        return Translation(flag, None, note)
    if name == "load":
        return Translation(flag, flag, "goes on if the folder holds a run of agentrl, else starts afresh")
    if name in _CALLED and words:
        place = re.sub(r"\.(\w+)$", r":\1", words[0]) if ":" not in words[0] else words[0]
        return Translation(flag, Flag(name, (place,)), f"the function is called as {_CALLED[name]}")
    if right is not None:
        return _checked(flag, Flag(new, tuple(value) or words), f"called {right} here")
    return _checked(flag, flag, "the same here")


def _checked(flag: Flag, kept: Flag, remark: str) -> Translation:
    """``kept``, unless `agentrl train` would not take it. A variable may hold anything, so it is not looked at."""
    unknown = any(re.search(r"[$`]", word) for word in kept.words)
    read = parse_flags(Config, [f"--{kept.name}", *kept.words])[0]
    problems = [*read.problems, *megatron_problems(read.values.get("megatron", {}), {})]
    if problems and not (unknown and "expected" in problems[0]):
        return Translation(flag, None, problems[0])
    return Translation(flag, kept, remark)


def _added(given: dict[str, Flag]) -> Iterator[Translation]:
    """What slime has as a default and `agentrl train` has not."""
    for side in ("rollout", "eval"):
        length, context = given.get(f"{side}-max-response-len"), f"{side}-max-context-len"
        if length and context not in given and length.words and length.words[0].isdecimal():
            room = int(length.words[0]) + _ROOM_FOR_PROMPTS
            note = f"an episode's limit; here the response and {_ROOM_FOR_PROMPTS} tokens of prompt"
            yield Translation(Flag(context), Flag(context, (str(room),)), note)
    if "eval-interval" in given and "eval-temperature" not in given:
        value = given.get("rollout-temperature", Flag("", ("1.0",))).words
        note = "slime evaluates at the temperature of training; the default here is greedy"
        yield Translation(Flag("eval-temperature"), Flag("eval-temperature", value), note)
    if "use-rollout-logprobs" not in given:
        recomputed = Flag("no-use-rollout-logprobs")
        yield Translation(recomputed, recomputed, "slime computes old log-probabilities anew; here the engine's count")


def quoted(word: str) -> str:
    """A word for a shell. Variables and commands in it are still expanded; a command alone may become several words."""
    if _COMMAND.fullmatch(word):
        return word
    if not re.search(r"[$`]", word):
        return shlex.quote(word)
    ends = [0, *(end for found in _COMMAND.finditer(word) for end in found.span()), len(word)]
    parts = [word[first:end] for first, end in zip(ends, ends[1:], strict=False)]  # text, command, text, ...
    return '"' + "".join(p if n % 2 else re.sub(r'(["\\`])', r"\\\1", p) for n, p in enumerate(parts)) + '"'
