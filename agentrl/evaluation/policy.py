"""The policy of an evaluation: engines of its own, or a server that is there already."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from agentrl.config.schema import EvalConfig
from agentrl.engines.options import engine_spec
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.rollout.conversation import Chat, Client
from agentrl.rollout.options import open_chat, template_notes


@dataclass(frozen=True)
class Policy(Generic[Client]):
    """What episodes are played with.

    ``broken`` says why no answer can be expected any more, ``trouble`` why the last attempt got none; or None.
    ``notes`` collects what a person should know of the policy, ``about_template`` what is known of its chat template
    from the start.
    """

    client: Client
    chat: Chat[Client]
    broken: Callable[[], str | None] = lambda: None
    trouble: Callable[[], str | None] = lambda: None
    notes: list[str] = field(default_factory=list)
    about_template: list[str] = field(default_factory=list)


def model_folder(cfg: EvalConfig) -> str | None:
    """The HF folder to serve: ``--hf-checkpoint``, or that of a checkpoint of ``--run``; None with ``--base-url``.
    Raises CheckpointError: the run has no such complete checkpoint."""
    if cfg.base_url is not None:
        return None
    if cfg.run is None:
        return str(cfg.hf_checkpoint)
    from agentrl.data.checkpoint import CheckpointStore

    return str(CheckpointStore.open_run(cfg.run, which=cfg.checkpoint).hf_folder)


def settled(cfg: EvalConfig) -> EvalConfig:
    """``cfg`` with the name of the server's model, so that the record says which was evaluated; asked for if need be.
    Raises AgentRLError: no server answers, its key is wrong, or it has several models and none was chosen."""
    if cfg.base_url is None or cfg.model is not None:
        return cfg
    from agentrl.rollout.policies.openai import served_model

    return cfg.replace(model=served_model(cfg))


def model_identity(cfg: EvalConfig, folder: str | None) -> dict[str, Any]:
    """What makes two evaluations ones of the same model: the server's address and name, or the weights' digest."""
    if folder is None:
        return {"base_url": str(cfg.base_url).rstrip("/"), "model": cfg.model}
    return {"digest": model_digest(Path(folder))}


def model_digest(folder: Path) -> str:
    """Digest of a model folder: its configuration, and of each file of weights the name, size, first and last MiB.

    Two trainings of one model differ everywhere, so a sample tells them apart without reading all of a large model.

    Raises CheckpointError: a file cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in sorted(p for p in folder.iterdir() if p.is_file()):
            if file.suffix in (".json", ".jinja", ".model"):
                digest.update(f"{file.name}\0".encode() + file.read_bytes())
            elif file.suffix in (".safetensors", ".bin"):
                size, mib = file.stat().st_size, 1 << 20
                with file.open("rb") as stream:
                    digest.update(f"{file.name}\0{size}\0".encode() + stream.read(mib))
                    stream.seek(max(size - mib, min(size, mib)))
                    digest.update(stream.read(mib))
    except OSError as error:
        raise CheckpointError(f"{folder}: the model cannot be read: {error}") from error
    return f"sha256:{digest.hexdigest()}"


@contextlib.asynccontextmanager
async def open_policy(
    cfg: EvalConfig, model: str | None, *, logs: Path, environments: Sequence[tuple[str, dict[str, Any]]] = ()
) -> AsyncIterator[Policy]:
    """Start engines with the HF folder ``model``, or connect to ``--base-url`` (None); ends with everything stopped.
    The model's chat template is tried out with the ``environments``.
    Raises AgentRLError: engines do not start, or no server answers.
    Raises ConfigError: an environment has tools, and calls cannot be read as the model's chat template writes them."""
    if model is None:
        from agentrl.rollout.policies.openai import open_server

        async with open_server(cfg) as (server, its_chat):
            yield Policy(server, its_chat, broken=server.broken, trouble=lambda: server.trouble, notes=server.notes)
        return
    from agentrl.engines.pool import EnginePool
    from agentrl.rollout.policies.sglang import EngineClient

    chat = open_chat(cfg, model)
    about_template = template_notes(cfg, chat, environments, training=False)
    pool = EnginePool(
        engine_spec(cfg, model, World.here()),
        cfg.rollout_num_engines or 1,
        log_dir=logs,
        policy=cfg.router_policy,
        start_timeout=cfg.engine_timeout,
        health_interval=cfg.rollout_health_check_interval,
        health_timeout=cfg.rollout_health_check_timeout,
        min_engines=cfg.rollout_min_engines,
    )
    try:
        await pool.start()
        async with EngineClient(pool.router_url, pool.router_key) as client:
            yield Policy(client, chat, broken=lambda: pool.broken, about_template=about_template)
    finally:
        with contextlib.suppress(AgentRLError):
            await asyncio.shield(pool.stop())


def described(cfg: EvalConfig, model: str | None) -> str:
    """The policy in a line, for a person."""
    if model is None:
        return f"{cfg.model or 'the model'} at {cfg.base_url}"
    return model
