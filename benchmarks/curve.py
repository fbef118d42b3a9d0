"""The picture of a learning curve: held-out success of each seed, and the mean reward of training."""

from __future__ import annotations

from pathlib import Path


def points(lines: list[dict], name: str) -> dict[str, list[tuple[int, float]]]:
    """(rollouts trained on, value) of the held-out set ``name`` and of training, from a ``metrics.jsonl``."""
    key = f"eval/{name}/success"
    return {
        "held_out": [(line["step"], line[key]) for line in lines if key in line],
        "training": [(line["step"] - 1, line["rollout/reward"]) for line in lines if "train/loss" in line],
    }


def draw(results: list[dict], path: Path, *, episodes: int) -> None:
    """Draws what :func:`points` gave for each seed; ``episodes``: of one training step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "agentrl"
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for number, result in enumerate(results):
        color = f"C{number}"
        axes.plot(*zip(*result["training"], strict=True), color=color, alpha=0.35, linewidth=1)
        axes.plot(*zip(*result["held_out"], strict=True), "o-", color=color, label=f"seed {number}")
    axes.set(xlabel=f"optimizer steps of {episodes} episodes", ylabel="success", ylim=(0, 1.02))
    axes.legend(title="held-out, greedy\n(thin: training)", fontsize=8, title_fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    plt.close(figure)
