"""Time of ``agentrl --help``, from starting the process to its end, and what it imports.

    python benchmarks/cli_help.py [--repeats 20]

Prints one JSON object and one line; exits 1 when the median of a command is not under 0.5 s or torch is imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.5
COMMANDS = (("--help",), ("train", "--help"), ("eval", "--help"), ("serve-retriever", "--help"))
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")


def seconds(words: tuple[str, ...]) -> float:
    """Wall time of one call in a fresh process."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *words], check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    return time.perf_counter() - began


def imported(words: tuple[str, ...]) -> list[str]:
    """Which of the heavy packages one call imports."""
    code = (
        "import sys; from agentrl.cli.main import main; main(sys.argv[1:]);"
        f"print(*(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=60)
    return done.stderr.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    bare = statistics.median(_bare() for _ in range(repeats))
    medians = {" ".join(words): statistics.median(seconds(words) for _ in range(repeats)) for words in COMMANDS}
    heavy = sorted({name for words in COMMANDS for name in imported(words)})
    worst = max(medians.values())
    result = {"median_s": medians, "bare_python_s": bare, "imported": heavy, "limit_s": LIMIT_S}
    print(json.dumps({"benchmark": "cli_help", **result}))
    print(
        f"agentrl --help: {medians['--help']:.2f} s, slowest help {worst:.2f} s (bare Python {bare:.2f} s), "
        f"heavy imports: {', '.join(heavy) or 'none'}; target under {LIMIT_S} s"
    )
    return int(worst >= LIMIT_S or bool(heavy))


def _bare() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
