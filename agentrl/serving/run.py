"""``agentrl serve``: a model behind an OpenAI-compatible address, for agents that are not ours.

SGLang's own endpoints (``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``) on the engine pool that training
and evaluation use: an engine that dies is replaced. Engines and router listen on loopback always; only the gateway
before them (:mod:`agentrl.serving.gateway`) takes the address that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.presets import DEMO, model_folder
from agentrl.config.schema import ServeOptions
from agentrl.config.template import template_source, template_variables
from agentrl.data.files import storage_errors
from agentrl.engines.engine import EngineSpec, available_memory
from agentrl.engines.options import engine_threads
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, ConfigError, EngineError
from agentrl.processes.network import is_loopback
from agentrl.processes.server import API_KEY_ENV, new_api_key, port_is_free
from agentrl.processes.signals import cancel_on_signals, printable, write_log_to
from agentrl.processes.warden import Warden

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate

log = logging.getLogger(__name__)

_CPU_TOKENS = 65536
_CPU_SHARE = 0.4


@dataclass(frozen=True)
class Served:
    """A model that is being served."""

    base_url: str
    model: str
    key: str
    """Empty where no key is asked for."""
    key_is_new: bool


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM, which are the way to end it.
    Raises ConfigError: no such model, or an address that would be open to others without a key.
    Raises EngineError: engines or router did not start, or cannot be kept running. No process is left by then."""
    key, is_new = _key(options)
    model = _model_folder(options)
    if options.port and not port_is_free(options.host, options.port):
        raise ConfigError(
            f"--port {options.port}: it is in use, or {options.host} is no IPv4 address of this machine. Give another, "
            "or 0 for a free one"
        )
    name = options.served_model_name or _name(options, model)
    if options.log_dir is not None:
        with storage_errors(Path(options.log_dir)):
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    write_log_to(Path(options.log_dir) / "serve.log" if options.log_dir else None, "warning")
    # A call of a tool that does not exist is the client's to answer; SGLang would drop it.
    os.environ.setdefault("SGLANG_FORWARD_UNKNOWN_TOOLS", "true")
    with Warden() as warden, warden.scratch():
        spec = engine_spec(options, model, name)
        try:
            asyncio.run(_serve(options, spec, Served("", name, key, is_new)))
        except KeyboardInterrupt:
            print("stopped", flush=True)


async def _serve(options: ServeOptions, spec: EngineSpec, served: Served) -> None:
    from agentrl.engines.pool import EnginePool
    from agentrl.serving.gateway import Gateway

    with cancel_on_signals():
        pool = EnginePool(
            spec,
            options.rollout_num_engines,
            log_dir=options.log_dir,
            policy=options.router_policy,
            start_timeout=options.engine_timeout,
        )
        gateway: Gateway | None = None
        print(f"starting {options.rollout_num_engines} engine(s) for {spec.model_path}", flush=True)
        try:
            await pool.start()
            gateway = Gateway(pool.router_url, pool.router_key, key=served.key, host=options.host, port=options.port)
            port = await gateway.start()
            url = f"http://{options.host.replace('0.0.0.0', '127.0.0.1')}:{port}/v1"
            await _check(url, served.key)
            _announce(replace(served, base_url=url), options)
            raise EngineError(await pool.wait_until_broken())
        finally:
            if gateway is not None:
                await asyncio.shield(gateway.stop())
            with contextlib.suppress(AgentRLError):
                await asyncio.shield(pool.stop())


def engine_spec(options: ServeOptions, model: str, name: str) -> EngineSpec:
    """What the engines serve: the checkpoint, with the parsers that its chat template asks for."""
    world = World.here()
    tool_parser, reasoning_parser = parsers(options, model)
    extra = {
        "served-model-name": name,
        "tool-call-parser": tool_parser,
        "reasoning-parser": reasoning_parser,
        "chat-template": options.chat_template,
        "default-chat-template-kwargs": options.apply_chat_template_kwargs or None,
        **{key.replace("_", "-"): value for key, value in options.sglang.items()},
    }
    spec = EngineSpec(
        model_path=model,
        device=world.device,
        dtype={"bf16": "bfloat16", "fp32": "float32", "auto": None}[options.dtype],
        tp=world.engine_ranks(options),
        max_total_tokens=_CPU_TOKENS,
        context_length=options.context_length,
        threads=options.threads or engine_threads(options),
        seed=options.seed,
        extra=extra,
    )
    if world.has_gpu:
        return replace(spec, max_total_tokens=None)
    # KV cache on the CPU: what fits into a part of the memory that is free now
    share = _CPU_SHARE * available_memory() / options.rollout_num_engines
    fits = int(share / max(1, spec.kv_bytes() / spec.cpu_tokens))
    return replace(spec, max_total_tokens=max(4096, min(_CPU_TOKENS, fits)))


_NOT_SERVED = ("seed_oss", "nemotron", "apriel", "smollm3_python")  # SGLang has no detector of their calls
# Families that do not think between <think> tags.
_REASONING = {"gpt-oss": "gpt-oss", "kimi_k3": "kimi_k3", "minimax-m3": "minimax-m3", "gemma4": "gemma4"}


def parsers(options: ServeOptions, model: str) -> tuple[str | None, str | None]:
    """SGLang's tool-call parser and reasoning parser for the model: as asked for, or as its chat template is.
    Raises ConfigError: no tokenizer or chat template there."""
    from agentrl.rollout.template.chat import ChatTemplate
    from agentrl.rollout.template.check import no_format

    chosen = [options.tool_call_parser, options.reasoning_parser]
    if "auto" in chosen:
        chat = ChatTemplate(model, chat_template=template_source(options), variables=template_variables(options))
        # Our names of call formats are SGLang's, where it has the format.
        served = "none" if chat.call_format in _NOT_SERVED else chat.call_format
        if chosen[0] == "auto" and chat.takes_tools and served == "none":
            unread = no_format(chat) if chat.call_format == "none" else f"SGLang has no parser for {chat.call_format!r}"
            log.warning("%s: what the model writes as calls stays in the text", unread)
        automatic = (served, _reasoning_parser(chat))
        chosen = [own if word == "auto" else word for word, own in zip(chosen, automatic, strict=True)]
    tool_parser, reasoning_parser = (None if word == "none" else word for word in chosen)
    return tool_parser, reasoning_parser


def _reasoning_parser(chat: ChatTemplate) -> str:
    """For templates that decide about thinking. SGLang takes an answer without tags for thought where it is on."""
    source = chat.template_source
    if chat.call_format in _REASONING:
        return _REASONING[chat.call_format]
    if chat.opening:
        return "deepseek-r1"
    if chat.call_format == "deepseekv31":
        return "deepseek-v3"
    if "enable_thinking" in source and "</think>" in source:
        return "glm45" if chat.call_format in ("glm", "glm47") else "qwen3"
    return "none"


def _key(options: ServeOptions) -> tuple[str, bool]:
    """The key that clients must send, and whether it was made here."""
    loopback = is_loopback(options.host)
    given = os.environ.pop(API_KEY_ENV, "")
    if not options.api_key:
        if not loopback:
            raise ConfigError(
                f"--no-api-key with --host {options.host}: whoever reaches that address could use the model and its "
                "engines. Serve on loopback, or with a key"
            )
        return "", False
    if given:
        return given, False
    if not sys.stdout.isatty():
        raise ConfigError(
            f"standard output is no terminal, so a key made here could not be shown without landing in a file: put one "
            f"into the environment variable {API_KEY_ENV}" + (", or give --no-api-key" if loopback else "")
        )
    return new_api_key(), True


def _model_folder(options: ServeOptions) -> str:
    if options.run is not None:
        from agentrl.data.checkpoint import CheckpointStore

        return str(CheckpointStore.open_run(options.run, which=options.checkpoint).hf_folder)
    folder = Path(model_folder(options.hf_checkpoint or DEMO))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--hf-checkpoint {folder}: no model there (no config.json); give the folder of an HF model")
    return str(folder)


def _name(options: ServeOptions, model: str) -> str:
    """The name clients ask for: the run and its step, or the folder's name."""
    path = Path(model).resolve()
    if options.run is not None:
        run = Path(options.run).resolve()
        run = run.parent.parent if run.name.startswith("step_") else run
        return f"{run.name}@{int(path.parent.name.rpartition('_')[2])}"
    return path.name


async def _check(base_url: str, key: str) -> None:
    """Raises EngineError when the router does not pass requests on."""
    import httpx

    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            answer = await client.get(f"{base_url}/models", headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise EngineError(f"{base_url}/models does not answer as it should: {error}") from None


def _announce(served: Served, options: ServeOptions) -> None:
    """Tell a person how to use it, and a program (in words of a shell) that it is ready."""
    name = shlex.quote(served.model)
    hello = {"model": served.model, "messages": [{"role": "user", "content": "Hello"}]}
    asks = f' \\\n    -H "Authorization: Bearer ${API_KEY_ENV}"' if served.key else ""
    env = f" --api-key-env {API_KEY_ENV}" if served.key else ""
    lines = [f"base URL  {served.base_url}", f"model     {served.model}"]
    if not is_loopback(options.host):
        reach = f"{options.host}:{served.base_url.rpartition(':')[2].removesuffix('/v1')}"
        lines.append(f"WARNING   {reach} is open to the network: the key is asked for, but nothing is encrypted")
    if served.key_is_new:
        lines += ["", "The key, shown this once:", "", f"export {API_KEY_ENV}={served.key}"]
    lines += [
        "",
        "Try it:",
        "",
        f"curl {served.base_url}/chat/completions{asks} \\",
        '    -H "Content-Type: application/json" \\',
        f"    -d {shlex.quote(json.dumps(hello))}",
        "",
        f"agentrl eval --env search --base-url {served.base_url} --model {name}{env}",
        "",
        f"ready base_url={served.base_url} model={name}",
    ]
    print(printable("\n".join(lines)), flush=True)
