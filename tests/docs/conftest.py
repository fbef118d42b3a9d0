"""A folder in which every example of the documentation finds what it names."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from finished_run import shop_source, write_evaluation, write_run
from shown_pages import PAGES, ROOT, blocks

from agentrl import runs
from agentrl.config.layers import resolve

TASK = {"prompt": "1 + 1 = ?", "label": "2"}
QUESTION = {"question": "Who?", "golden_answers": ["She"]}
PASSAGE = {"id": "1", "title": "She", "text": "Her."}
DATA_FILES = {
    "tasks.jsonl": TASK,
    "held_out.jsonl": TASK,
    "questions.jsonl": QUESTION,
    "corpus.jsonl": PASSAGE,
    "passages.jsonl": PASSAGE,
    "data/passages.jsonl": PASSAGE,
}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Data files, a model, finished runs, and every file that a page shows."""
    from agentrl.demo import MODEL_DIR

    folder = tmp_path_factory.mktemp("documented")
    (folder / "data").mkdir()
    for name, record in DATA_FILES.items():
        (folder / name).write_text(json.dumps(record) + "\n", encoding="utf-8")
    for page in PAGES:
        for block in blocks(page):
            if block.file:
                (folder / block.file).write_text(block.code, encoding="utf-8")
    shutil.copytree(ROOT / "envs_examples", folder / "envs_examples")
    shutil.copytree(MODEL_DIR, folder / "MODEL")
    sizes = json.loads((folder / "MODEL" / "config.json").read_text(encoding="utf-8"))
    (folder / "MODEL" / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 32768}))
    (folder / "shop.py").write_text(shop_source(), encoding="utf-8")
    (folder / "run-qwen3-4B.sh").write_text("python train.py --colocate --lr 1e-6\n", encoding="utf-8")
    episodes = write_run(folder / "runs" / "NAME", folder / "shop.py")
    (folder / "runs" / "NAME" / "checkpoints" / "step_000001").mkdir(parents=True)
    for name in ("NAME", "NAME2", "before", "after"):
        write_evaluation(folder / "runs" / f"eval-{name}", episodes)
    return folder


@pytest.fixture
def documented(prepared: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of :func:`prepared` as the working directory, in which runs from Python are those finished ones.

    The example of docs/python.md is run as printed in ``tests/e2e/test_toolkit.py``.
    """
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(folder))

    def finished(command, config_class, options, progress):
        values = {name: runs.plain(value, folder) for name, value in options.items()}
        (folder / "options.json").write_text(json.dumps(values), encoding="utf-8")
        resolve(config_class, ["--config", str(folder / "options.json")])
        return folder / "runs" / ("NAME" if command == "train" else "eval-NAME")

    monkeypatch.setattr(runs, "run_command", finished)
    return folder
