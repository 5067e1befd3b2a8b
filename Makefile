# Each target sets up what it lacks; a second run starts at once. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := systemd-container cloud-init openssh-server sudo nftables rsync iproute2
PYTEST := $(BIN)/python -m pytest
# Without its bytecode each of the tests' hundreds of commands would compile awsddp again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove prove-aws mutants lint docs dist bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 11

setup: $(VENV)/.ready ## a virtual environment in .venv with everything; Debian packages when root

# torch comes before the tools: one that needs it, as Lightning does, would bring torch for CUDA.
$(VENV)/.ready: pyproject.toml tools/debian.sh
	@echo "1/4 programs of this machine"
	@sh tools/debian.sh $(DEBIAN)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2/4 $(TORCH), the CPU build: about 200 MB"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@echo "3/4 $(TORCHVISION), alone: its requirement names torch for CUDA"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --extra-index-url $(TORCH_INDEX) --no-deps '$(TORCHVISION)'
	@echo "4/4 awsddp and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local,dev]'
	@touch $@
	@echo "ready. Type: make demo   # a rehearsal; or: . $(BIN)/activate, then: awsddp"

demo: setup ## two local nodes, four ranks, a trained model, nothing left
	@$(BIN)/awsddp run --local --nodes 2 --world-size 4 -y

test: setup ## one case of every kind, at most 8 minutes on 2 cores
	@$(PYTEST) -n 2 --dist loadfile -m "not prove"

prove: setup ## the long matrices from a new seed (AWSDDP_SEED), at most 45 minutes; FULL=1 runs them whole
	@AWSDDP_FULL=$(FULL) AWSDDP_SEED=$${AWSDDP_SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')} $(PYTEST) -n 2 --dist loadfile -m prove

prove-aws: setup ## every verb on your own AWS account, at most 2 USD each: AWSDDP_REAL=cpu, then gpu
	@$(BIN)/python tools/prove_aws.py

mutants: setup ## small mutations of the code, none of which may survive its test
	@$(BIN)/python tools/mutants.py

lint: setup ## format, lint, types, docs
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

docs: setup ## the pages of docs/ as a site, on http://127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --quiet

dist: ## wheel and sdist in dist/, checked by twine and used in an empty environment
	@$(PYTHON) tools/dist.py

bench: setup ## the programs behind the figures of benchmarks/README.md
	@for program in benchmarks/[a-z]*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean: ## remove what the targets made
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
