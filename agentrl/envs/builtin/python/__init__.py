"""Problems that are solved by writing and running Python."""

from agentrl.envs.builtin.python.env import PythonEnv

__all__ = ["PythonEnv"]
