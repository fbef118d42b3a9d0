"""A container runtime for tests: a process-id namespace and the given arguments, none of the walls.

Like a real one it takes ``info``, ``run [options] IMAGE [arguments]`` and ``rm``, and hands standard input, output and
error through. What it was asked is written down beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    command, *arguments = sys.argv[1:]
    with (Path(__file__).parent / "asked.txt").open("a") as asked:
        asked.write(f"{command} {arguments[-1] if command == 'rm' else ''}\n")
    if command != "run":
        return
    image = next(number for number, word in enumerate(arguments) if not word.startswith("--"))
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    program = ["unshare", *user, "--pid", "--fork", "--kill-child", sys.executable, *arguments[image + 1 :]]
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
