"""Real templates as model makers publish them: every request is what transformers renders of the whole history."""

from __future__ import annotations

from published_templates import published_template, published_templates


def test_the_templates_are_there():
    assert len(list(published_templates().glob("*.jinja"))) > 60
    assert "enable_thinking" in published_template("Qwen-Qwen3-0.6B")
