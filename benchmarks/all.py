"""Runs every benchmark, one after the other, and prints the table of figures: ``make bench``.

    python benchmarks/all.py [NAME ...]

Exits 1 when a benchmark missed its target or failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = {"demo": 3 * 1800.0}
DEFAULT_LIMIT_S = 1200.0


def run(script: Path) -> tuple[bool, str, float]:
    """``(reached its target, the line it printed for people, seconds)`` of one benchmark."""
    began = time.monotonic()
    limit = LIMIT_S.get(script.stem, DEFAULT_LIMIT_S)
    try:
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=limit, cwd=HERE.parent
        )
    except subprocess.TimeoutExpired:
        return False, f"not done within {limit:.0f} s", time.monotonic() - began
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    spoken = [line for line in lines if not line.startswith("{")] or lines
    failed = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.returncode == 0, spoken[-1] if spoken else failed, time.monotonic() - began


def main() -> int:
    scripts = sorted(path for path in HERE.glob("*.py") if path.stem not in ("all", "curve"))
    wanted = sys.argv[1:]
    unknown = set(wanted) - {path.stem for path in scripts}
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(p.stem for p in scripts)}")
        return 2
    rows = []
    for script in scripts:
        if not wanted or script.stem in wanted:
            print(f"running {script.stem} ...", flush=True)
            rows.append((script.stem, *run(script)))
    width = max((len(name) for name, *_ in rows), default=0)
    print()
    for name, reached, line, seconds in rows:
        print(f"{'ok    ' if reached else 'MISSED'}  {name:<{width}}  {line}  ({seconds:.0f} s)")
    return int(not all(reached for _, reached, *_ in rows))


if __name__ == "__main__":
    sys.exit(main())
