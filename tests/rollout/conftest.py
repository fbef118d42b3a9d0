"""Fixtures: a small byte-level tokenizer with Qwen's control tokens, chat templates, a loop with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rollout_cases import TEMPLATES, make_tokenizer

from agentrl.rollout.template.chat import ChatTemplate


@pytest.fixture(scope="session")
def hf_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_dir(hf_tokenizer, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    hf_tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return str(path)


@pytest.fixture(scope="session")
def chats(hf_tokenizer) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(hf_tokenizer, chat_template=source) for name, source in TEMPLATES.items()}


@pytest.fixture(scope="session")
def chat(chats) -> ChatTemplate:
    return chats["keeping"]


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine on a fresh loop, with a time limit so that no test hangs."""

    def runner(coroutine: Coroutine[Any, Any, Any], timeout: float = 20.0) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, timeout))

    return runner
