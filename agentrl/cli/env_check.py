"""``agentrl env check NAME``."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.cli.env import PlayedOptions
from agentrl.config.layers import load_options
from agentrl.processes.signals import printable

Options = PlayedOptions


def run(name: str, argv: Sequence[str]) -> int:
    """Check and print the report; returns the exit code."""
    given = load_options(PlayedOptions, argv)
    from agentrl.envs.checks.checker import BLOCKING, CHECKS, Report, maker_of, name_of, run_checks

    width = max(len(name) for name in (BLOCKING, *map(name_of, CHECKS)))
    begun: list[str] = []

    def starting(check: str) -> None:
        begun.append(check)
        print(f"{check:<{width}}  ", end="", flush=True)

    report = Report(name)
    for result in run_checks(maker_of(name, given.arguments()), starting):
        report.results.append(result)
        before = "" if result.name in begun else f"{result.name:<{width}}  "
        print(f"{before}{result.outcome:<7}  {printable(result.reason)}".rstrip(), flush=True)
    if report.ok:
        print(f"\n{name} passes.")
        return 0
    print(f"\n{name}: {len(report.failed)} of {len(report.results)} checks failed.")
    return 1
