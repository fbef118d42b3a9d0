"""Tasks and their order, the account of every task, stored trajectories, the run folder."""

from agentrl.data.account import DataBuffer, Draw, load_source
from agentrl.tasks.source import DataSource, TaskSource, env_label, held_out_tasks

__all__ = ["DataBuffer", "DataSource", "Draw", "TaskSource", "env_label", "held_out_tasks", "load_source"]
