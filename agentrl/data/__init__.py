"""The account of every task, stored trajectories, checkpoints, the run folder."""
