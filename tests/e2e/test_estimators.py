"""Every estimator trains the embedded model with the settings that docs/algorithms.md gives it."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLE = PAGE.split("## Settings")[1].split("\n## ")[0]
SETTINGS = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", TABLE, re.M))


@pytest.mark.parametrize("name", SETTINGS)
def test_it_reaches_four_in_five_on_held_out_tasks(start, tmp_path, name):
    run = tmp_path / "run"
    command = start("train", "--env", "search", *shlex.split(SETTINGS[name]), "--output-dir", str(run))
    assert command.wait(540) == 0, command.text[-3000:]
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    success = [line["sets"]["search"]["success"]["mean"] for line in lines]
    assert success[0] < 0.6 and success[-1] >= 0.8, success
