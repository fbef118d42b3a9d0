"""``agentrl.engines.server`` as on a CUDA machine: SGLang spawns its children in place of forking them."""

import runpy

from agentrl.engines import cpu_backend

if __name__ == "__main__":
    cpu_backend.fork_children = lambda: None
    # Children import what is the main module here by its name.
    runpy.run_module("agentrl.engines.server", run_name="__main__", alter_sys=True)
