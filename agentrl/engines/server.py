"""``python -m agentrl.engines.server <SGLang's own arguments>``: one engine of a run.

SGLang's server, unchanged, with what a run needs around it:

- the CPU backend where there is no CUDA device (:mod:`agentrl.engines.cpu_backend`), with attention in few calls
  (:mod:`agentrl.engines.cpu_attention`), or the deterministic mode if asked for
  (:mod:`agentrl.engines.cpu_deterministic`);
- the API key from the environment (``AGENTRL_API_KEY``), never from the arguments, and shown as ``***``
  where SGLang logs its configuration;
- every socket on loopback unless ``--host`` says otherwise: the rendezvous store of torch, which would
  listen on all addresses, included; an engine of one process has no store that listens at all;
- death together with the process that started it;
- one gloo device shared by all of SGLang's process groups: each would open a listening socket and run
  a thread that wakes up a hundred times a second;
- only the model that is served is imported, not SGLang's whole collection (2 s and 100 MB);
- a scheduler that is paused for new weights sleeps until it is asked for something;
- an update of the weights by files maps them in the thread that loads;
- requests find in the prefix cache what the weights computed that they are answered by, and no other;
- tools of a chat request reach the chat template as the client sent them, as they do in training; SGLang would add an
  empty field to each, which a model has never seen;
- files that SGLang keeps in ``/dev/shm`` are put into the engine's private temporary folder, which is
  removed with the engine, and semaphores there get a name by which the warden finds them.

Child processes that are spawned, as on every CUDA machine, import this module again under another name: what has to
hold in them too is done at import.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.engines import cpu_backend
from agentrl.processes.ahead import Arguments
from agentrl.processes.imports import compiler_left_out, kernels_unread
from agentrl.processes.server import die_with_owner, take_api_key
from agentrl.processes.warden import SCRATCH_ENV

cpu_backend.install()

LOOPBACK = ("127.0.0.1", "localhost")


def keep_store_on_loopback() -> None:
    """Make torch's rendezvous server listen on loopback when that is the address it is given.

    It asks for no key. A world of one process needs none: its store stays in memory.
    """
    # `torch.distributed.rendezvous` as an attribute is a function of that name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    store_class = rendezvous.TCPStore

    def store(host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
        world_size = kwargs.get("world_size", args[0] if args else None)
        is_master = kwargs.get("is_master", args[1] if len(args) > 1 else False)
        if is_master and world_size == 1:
            from torch.distributed import HashStore

            return HashStore()
        if is_master and host_name in LOOPBACK:
            listener = socket.create_server(("127.0.0.1", port), backlog=1024)
            kwargs["master_listen_fd"] = listener.detach()
        return store_class(host_name, port, *args, **kwargs)

    vars(rendezvous)["TCPStore"] = store


def share_gloo_device() -> None:
    """Give all gloo process groups of a process one device, on the interface asked for."""
    from torch.distributed import distributed_c10d

    devices: dict[int, Any] = {}

    class SharedDeviceGloo(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            # By process id: a device made before a fork is of no use after it.
            device = devices.get(os.getpid())
            if device is None:
                interface = os.environ.get("GLOO_SOCKET_IFNAME")
                device = self.create_device(interface=interface) if interface else self.create_default_device()
                devices[os.getpid()] = device
            options = self._Options()  # type: ignore[attr-defined]  # the stubs have another name
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    vars(distributed_c10d)["ProcessGroupGloo"] = SharedDeviceGloo


def import_only_served_model(model_path: str) -> None:
    """Have SGLang skip the modules of models other than the one in ``model_path``."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    package = importlib.util.find_spec("sglang.srt.models")
    assert package is not None and package.submodule_search_locations
    files = list(Path(package.submodule_search_locations[0]).glob("*.py"))
    wanted = [f"class {name}(".encode() for name in config.get("architectures") or ()]
    keep = [file.stem for file in files if any(name in file.read_bytes() for name in wanted)]
    if keep:
        skip = sorted({file.stem for file in files} - {*keep, "registry", "transformers"})
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(skip))


def leave_out_megatron() -> None:
    """SGLang's tensor dumper, a debugging aid, imports Megatron where it is installed: seconds and memory."""
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # None: it cannot be imported


def keep_shared_files_private() -> None:
    """Put SGLang's load snapshot, a mapped file in ``/dev/shm``, into the temporary folder."""
    from sglang.srt.managers import load_snapshot

    folder = tempfile.gettempdir()
    load_snapshot.shm_path_for = lambda name: os.path.join(folder, f"loads_{os.path.basename(name)}")
    if run := os.environ.get(SCRATCH_ENV):
        vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{os.path.basename(run)}"


def sleep_while_paused() -> None:
    """Have a paused scheduler wait for the next request, as an idle one does where ``--sleep-on-idle`` is given.

    SGLang's asks again and again: on two cores it takes the one that sends or loads weights meanwhile.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def map_files_in_one_thread() -> None:
    """Have an update of the weights by files map them without threads, by SGLang's own switch for that.

    To map a file is no work to share out. Handing small tensors over between threads costs milliseconds where others
    want the cores, and generation stands still meanwhile.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    in_one_thread = {"enable_multithread_load": False}
    weight_updater.LoadConfig = functools.partial(weight_updater.LoadConfig, model_loader_extra_config=in_one_thread)


def keep_versions_apart() -> None:
    """What an update of the weights is to SGLang's scheduler, beside the weights.

    - Keys and values in the prefix cache are found only by requests that came after the same update: each update opens
      a namespace (SGLang's ``extra_key``), which requests that still wait move to. A running one stays in its own: what
      it leaves there no new request finds. So the cache need not be dropped, which cannot be done with requests in
      flight, and a request and an update that cross leave nothing of one version in the other.
    - A token whose step was begun before the update counts as the old version's: with SGLang's overlapped scheduling
      it is handed out one step later, and SGLang counts the tokens that are handed out.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    name, change = Scheduler._maybe_namespace_elastic_radix_cache, Scheduler.record_weight_version_change
    updates = itertools.count(1)
    namespace = "@0"

    def named(self: Any, request: Any) -> None:
        name(self, request)
        request.extra_key = (request.extra_key or "") + namespace

    def changed(self: Any, new_version: str | None) -> None:
        nonlocal namespace
        if new_version is None:  # more of this version is to come
            return
        known = {request: len(request.weight_version_events) for request in _under_way(self)}
        old_version = get_serving().weight_version
        change(self, new_version)
        if new_version != old_version:
            for request, events in known.items():
                del request.weight_version_events[events:]
                event = WeightVersionEvent(old_version=old_version, num_output_tokens=len(request.output_ids) + 1)
                request.weight_version_events.append(event)
        namespace = f"@{next(updates)}"
        for request in self.waiting_queue:
            request.extra_key = (request.extra_key or "").rpartition("@")[0] + namespace

    Scheduler._maybe_namespace_elastic_radix_cache = named
    Scheduler.record_weight_version_change = changed


def _under_way(scheduler: Any) -> list[Any]:
    """Requests of which a step was begun that will give a token, and that token is not handed out yet."""
    steps = getattr(scheduler, "result_queue", ())
    return [r for step, _ in steps for r in step.reqs if not r.finished() and r.inflight_middle_chunks <= 0]


def redact_keys() -> None:
    """Hide keys where SGLang logs its resolved configuration."""
    from sglang.srt.entrypoints import engine

    for_logging = engine._server_args_for_logging

    def without_keys(server_args: Any) -> dict[str, Any]:
        shown = for_logging(server_args)
        return {name: "***" if name.endswith("api_key") and value else value for name, value in shown.items()}

    engine._server_args_for_logging = without_keys


def leave_tools_as_sent() -> None:
    """Keep ``"defer_loading": null`` out of the tools that chat templates render."""
    from sglang.srt.entrypoints.openai import protocol

    dump = protocol.Tool.model_dump

    def without_empty(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        fields = dump(self, *args, **kwargs)
        if fields.get("defer_loading", 0) is None:
            del fields["defer_loading"]
        return fields

    protocol.Tool.model_dump = without_empty


def take_calls_in_turn() -> None:
    """``POST /in_turn`` with ``[[route, body], ...]``: what is asked for at a weight update, one after the other.

    One request instead of five, each of which takes about a millisecond while generation stands still. It ends at the
    first call that is refused, with the answer to that.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import io_struct
    from starlette.responses import Response

    calls = {
        "/pause_generation": (http_server.pause_generation, io_struct.PauseGenerationReqInput),
        "/begin_weight_update": (http_server.begin_weight_update, io_struct.BeginWeightUpdateReqInput),
        "/update_weights_from_distributed": (
            http_server.update_weights_from_distributed,
            io_struct.UpdateWeightsFromDistributedReqInput,
        ),
        "/update_weights_from_disk": (http_server.update_weights_from_disk, io_struct.UpdateWeightFromDiskReqInput),
        "/release_memory_occupation": (
            http_server.release_memory_occupation,
            io_struct.ReleaseMemoryOccupationReqInput,
        ),
        "/end_weight_update": (http_server.end_weight_update, io_struct.EndWeightUpdateReqInput),
        "/continue_generation": (http_server.continue_generation, io_struct.ContinueGenerationReqInput),
    }

    async def in_turn(request: Any) -> Any:
        for path, body in await request.json():
            function, kind = calls[path]
            answer = await function(kind(**body), request) or Response()  # some answer nothing
            if answer.status_code != 200:
                answer.headers["x-refused"] = path
                break
        return answer

    http_server.app.add_route("/in_turn", in_turn, methods=["POST"])


def patch() -> None:
    """What must hold in the server and in each of its children."""
    leave_out_megatron()
    keep_store_on_loopback()
    share_gloo_device()
    keep_shared_files_private()
    sleep_while_paused()
    map_files_in_one_thread()
    keep_versions_apart()
    if cpu_backend.needed():
        cpu_backend.give_memory_back()


def import_sglang(model_path: str) -> None:
    """Import what the server's processes use, before they are forked: it takes longer than all the rest of a start."""
    gc.disable()  # five thousand modules are imported: collecting in between takes a second
    leave_out_megatron()
    with compiler_left_out(), kernels_unread():
        import_only_served_model(model_path)
        for module in ("sglang.launch_server", "sglang.srt.entrypoints.http_server"):
            importlib.import_module(module)


def main(argv: list[str]) -> None:
    """Serve until stopped. ``--ahead DESCRIPTOR MODEL``: import first, then wait for the arguments.

    Raises SystemExit with SGLang's status.
    """
    die_with_owner()
    if argv[0] == "--ahead":
        arguments = Arguments(argv[1])
        import_sglang(argv[2])
        argv = arguments.wait()
    else:
        import_sglang(argv[argv.index("--model-path") + 1])
    api_key = take_api_key()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    patch()
    redact_keys()
    leave_tools_as_sent()
    take_calls_in_turn()
    if cpu_backend.needed():
        cpu_backend.fork_children()
        cpu_backend.look_at_the_machine_once()
        if "--enable-deterministic-inference" in argv:
            from agentrl.engines import cpu_deterministic

            cpu_deterministic.install()
        else:
            from agentrl.engines.cpu_attention import BatchedAttention, use_attention

            use_attention(BatchedAttention)
    server_args = prepare_server_args(argv)
    if api_key is not None:
        server_args.api_key = api_key
    gc.freeze()
    gc.enable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":  # a child that was spawned
    patch()

if __name__ == "__main__":
    main(sys.argv[1:])
