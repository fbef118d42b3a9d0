# agentrl with all it needs, for a CPU or for NVIDIA GPUs:
#
#   docker build -t agentrl .                          # CPU: the pinned set of `make venv`
#   docker build -t agentrl:gpu --build-arg DEVICE=gpu .
#   docker run --rm -it --shm-size 2g agentrl train --env search
#   docker run --rm -it --gpus all --shm-size 16g --ipc host -v "$PWD:/work" agentrl:gpu train --env search ...
#
# Runs are written to runs/ below /work.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# bubblewrap: the sandbox of the Python tool. A compiler: torch and SGLang build small kernels when they start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap g++ && rm -rf /var/lib/apt/lists/*
COPY . /opt/agentrl
WORKDIR /opt/agentrl
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN sh requirements/install.sh python3 .venv requirements/cpu.lock "$TORCH_CPU_INDEX"

FROM nvidia/cuda:12.9.1-cudnn-devel-ubuntu24.04 AS gpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap g++ git python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
COPY . /opt/agentrl
WORKDIR /opt/agentrl
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir --editable ".[gpu,retriever,tools]"

# hadolint ignore=DL3006
FROM ${DEVICE}
RUN useradd --create-home --uid 10001 agentrl && install -d -o agentrl /work
USER 10001
WORKDIR /work
ENV PATH=/opt/agentrl/.venv/bin:$PATH
ENTRYPOINT ["agentrl"]
CMD ["--help"]
