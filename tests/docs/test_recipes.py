"""The recipes for clusters are what their programs read, and what they start is a command of ours."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from shown_pages import ROOT

from agentrl.config import load_config

RECIPES = ROOT / "docs" / "recipes"
SLURM, KUBERAY = RECIPES / "slurm.sbatch", RECIPES / "kuberay.yaml"

# Of ray.io/v1, KubeRay 1.5: what is required, and what else may be there.
FIELDS = {
    "RayJob": (
        {"entrypoint", "rayClusterSpec"},
        {"backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "submissionMode"},
    ),
    "RayClusterSpec": ({"headGroupSpec"}, {"workerGroupSpecs", "rayVersion", "authOptions"}),
    "HeadGroupSpec": ({"rayStartParams", "template"}, {"serviceType"}),
    "WorkerGroupSpec": (
        {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
        {"replicas", "numOfHosts"},
    ),
    "Container": ({"name", "image"}, {"env", "resources", "volumeMounts", "ports", "command", "args"}),
}


def commands(text: str) -> list[list[str]]:
    """What is said after each `agentrl train`, up to the end of the shell's word, array or statement."""
    found = re.findall(r"agentrl train\b([^;')]*)", text)
    return [shlex.split(words.replace("$run", "/shared/run")) for words in found]


@pytest.mark.parametrize("recipe", [SLURM, KUBERAY], ids=lambda path: path.name)
def test_the_commands_are_accepted(recipe, tmp_path):
    first, again = sorted(commands(recipe.read_text()), key=lambda words: "--load" in words)
    cfg = load_config(first)
    assert cfg.auto_resume and again == ["--load", cfg.output_dir, "--auto-resume"]
    # On what the recipe asks for: two machines of eight GPUs.
    assert cfg.world_size + cfg.rollout_num_engines * cfg.rollout_num_gpus_per_engine == 16


def test_the_batch_script_is_one():
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=20)
    if linter := shutil.which("shellcheck"):
        done = subprocess.run([linter, str(SLURM)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM.read_text(), re.M))
    assert asked["nodes"] == "2" and asked["gpus-per-node"] == "8" and "requeue" in asked


def fields(kind: str, given: dict) -> dict:
    required, allowed = FIELDS[kind]
    assert required <= set(given) <= required | allowed, f"{kind}: {sorted(given)}"
    return given


def test_the_job_is_what_kuberay_takes():
    job = yaml.safe_load(KUBERAY.read_text())
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert shlex.split(fields("RayJob", job["spec"])["entrypoint"])[:2] == ["sh", "-c"]
    cluster = fields("RayClusterSpec", job["spec"]["rayClusterSpec"])
    assert cluster["authOptions"] == {"mode": "token"}, "Ray is never open"
    groups = [("HeadGroupSpec", cluster["headGroupSpec"])]
    groups += [("WorkerGroupSpec", group) for group in cluster["workerGroupSpecs"]]
    for kind, group in groups:
        assert all(isinstance(value, str) for value in fields(kind, group)["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            fields("Container", container)
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert all(isinstance(entry["value"], str) for entry in container["env"])
            for amounts in container["resources"].values():
                assert all(isinstance(amount, str) for amount in amounts.values())
