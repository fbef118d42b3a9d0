"""Where the model's Python code runs: tiers, limits, and the session of an episode."""

from agentrl.tools.sandbox.limits import Limits
from agentrl.tools.sandbox.session import Result, Session
from agentrl.tools.sandbox.tiers import TIERS, Sandbox, resolve

__all__ = ["TIERS", "Limits", "Result", "Sandbox", "Session", "resolve"]
