"""The ``agentrl`` command: finds the subcommand, runs it, turns errors into one clear message and an exit code.

Nothing heavy is imported before a subcommand asks for it; ``agentrl --help`` must answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from agentrl.errors import AgentRLError
from agentrl.loading import toml_beside
from agentrl.processes.signals import Terminated, printable, raise_on_signals

WORDS = toml_beside(__file__, "help.toml")
COMMANDS: dict[str, str] = {name: words["about"] for name, words in WORDS.items()}
"""Subcommand -> one line on what it does; each lives in the module of its name."""

INTERRUPTED = 130


def usage() -> str:
    """What ``agentrl --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentrl COMMAND [OPTIONS]",
            "",
            "Train language-model agents that act in many turns, and evaluate them on held-out tasks.",
            "",
            *lines,
            "",
            "`agentrl COMMAND --help` shows the options of a command.",
            "First run: agentrl train --env search",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code.

    0 is success, 1 a failure of the run, 2 a wrong flag, key, name or file, 3 a checkpoint that cannot be used,
    4 a run folder that cannot be written, 5 a part of the run was lost and another start may cure it, 130 Ctrl-C,
    143 SIGTERM, 129 SIGHUP.
    ``AGENTRL_TRACEBACK=1`` in the environment shows where an error came from.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with raise_on_signals():
            return _dispatch(words)
    except AgentRLError as error:
        return _fail(error, str(error), error.exit_code)
    except ModuleNotFoundError as error:
        from agentrl.cli.extras import hint_for

        hint = hint_for(error)
        if hint is None:
            raise
        return _fail(error, hint, 2)
    except Terminated as error:
        return _fail(error, str(error), error.exit_code)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (`| head`) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = words[0], words[1:]
    if name in ("--version", "-V"):
        name = "version"
    if name not in COMMANDS:
        from agentrl.config.names import nearest

        close = nearest(name, COMMANDS)
        hint = f"Did you mean `agentrl {close}`?" if close else "`agentrl --help` lists the commands."
        print(f"error: unknown command {name!r}. {hint}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"agentrl.cli.{name.replace('-', '_')}")
    if any(word in ("-h", "--help") for word in rest):
        print(help_of(command, rest))
        return 0
    return int(command.run(rest) or 0)


def help_of(command: ModuleType, rest: Sequence[str] = ()) -> str:
    """Help of a command's module: its own ``usage``, else its words of ``help.toml`` and its ``Options``, if any."""
    if hasattr(command, "usage"):
        return command.usage(rest)
    name = command.__name__.rpartition(".")[2].replace("_", "-")
    words = WORDS.get(name) or WORDS["env"][name.removeprefix("env-")]
    if not hasattr(command, "Options"):
        return f"usage: agentrl {words['synopsis']}\n\n{words['intro']}"
    from agentrl.config.help import command_help

    return command_help(words["synopsis"], words["intro"], command.Options)


def _fail(error: BaseException, message: str, code: int) -> int:
    if os.environ.get("AGENTRL_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    print(f"error: {printable(message)}", file=sys.stderr)  # it may hold what a server or a model said
    return code


if __name__ == "__main__":
    sys.exit(main())
