# Each target sets up what it lacks; a second run starts at once. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := systemd-container cloud-init openssh-server sudo nftables rsync iproute2
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove mutants lint bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## a virtual environment in .venv with everything; Debian packages when root

$(VENV)/.ready: pyproject.toml tools/debian.sh
	@sh tools/debian.sh $(DEBIAN)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing awsddp and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local,dev]'
	@echo "installing $(TORCH), the CPU build, and $(TORCHVISION), alone: its requirement names torch for CUDA"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --extra-index-url $(TORCH_INDEX) --no-deps '$(TORCHVISION)'
	@touch $@

demo: setup ## two local nodes, four ranks, a trained model, nothing left
	@$(BIN)/awsddp run --local --nodes 2 --world-size 4 -y

test: setup ## one case of every kind, at most 8 minutes on 2 cores
	@$(PYTEST) -n 2 --dist loadfile -m "not prove"

prove: setup ## the long matrices from a new seed (AWSDDP_SEED), at most 45 minutes; FULL=1 runs them whole
	@AWSDDP_FULL=$(FULL) AWSDDP_SEED=$${AWSDDP_SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')} $(PYTEST) -n 2 --dist loadfile -m prove

mutants: setup ## small mutations of the code, none of which may survive its test
	@$(BIN)/python tools/mutants.py

lint: setup ## format, lint, types
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

bench: setup ## the programs behind the README's figures
	@for program in benchmarks/[a-z]*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean: ## remove what the targets made
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
