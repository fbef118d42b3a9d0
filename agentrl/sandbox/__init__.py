"""Where the model's Python code runs: tiers, limits, and the session of an episode."""

from agentrl.sandbox.session import Result, Session
from agentrl.sandbox.tiers import TIERS, Limits, Sandbox, resolve

__all__ = ["TIERS", "Limits", "Result", "Sandbox", "Session", "resolve"]
