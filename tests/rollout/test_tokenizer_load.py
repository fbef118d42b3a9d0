"""A tokenizer is loaded as AutoTokenizer does, without what that imports where nothing calls for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.presets import demo_folder
from agentrl.rollout.template.chat import _TAKEN_AS_THEY_ARE, _is_described_by_file

CODE = """
import sys
from agentrl.rollout.template.chat import ChatTemplate
ChatTemplate(sys.argv[1])
assert not {"torch", "sglang"} & set(sys.modules)
"""


def test_a_tokenizer_that_its_file_describes_needs_no_torch():
    subprocess.run([sys.executable, "-c", CODE, str(demo_folder())], timeout=120, check=True)


@pytest.mark.parametrize("model_type", _TAKEN_AS_THEY_ARE)
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_it_is_what_transformers_would_load(tmp_path: Path, model_type: str, name: str):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = copied(tmp_path, model_type, name)
    assert _is_described_by_file(folder)
    ours, theirs = PreTrainedTokenizerFast.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours.chat_template, ours.special_tokens_map) == (theirs.chat_template, theirs.special_tokens_map)


def test_where_a_class_may_be_needed_transformers_decides(tmp_path: Path):
    assert not _is_described_by_file(copied(tmp_path / "a", "qwen3", "Qwen2Tokenizer"))
    assert not _is_described_by_file(copied(tmp_path / "b", "qwen2", "PreTrainedTokenizerFast"))
    assert not _is_described_by_file(tmp_path)


def copied(folder: Path, model_type: str, tokenizer_class: str) -> Path:
    """The demo's tokenizer as that of another model."""
    folder.mkdir(exist_ok=True)
    shutil.copy(demo_folder() / "tokenizer.json", folder)
    described = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"tokenizer_class": tokenizer_class}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
