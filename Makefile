.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

help:  ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

quickstart: $(READY)  ## Train and evaluate a small retriever on generated data (3 minutes, any machine)
	$(BIN)/python scripts/quickstart.py

test: $(READY)  ## The tests but the slow ones; those for a GPU are skipped where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

# In the order of their names: files of few tests would come last, and that of all builds is one.
test-slow: $(READY)  ## The slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m slow

WORKERS ?= 8

test-gpu: $(READY)  ## The tests that need a GPU, WORKERS=8 at a time: most of their time is compiling
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and not alone" -n $(WORKERS) --dist worksteal --durations 10
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and alone"

SANITIZED ?= sanitizer.jsonl

sanitize: $(READY)  ## Every family of kernels under compute-sanitizer, in minutes on a GPU
	$(BIN)/python -m tests.kernels.sanitizer --output $(SANITIZED)

check: static test test-slow  ## What CI runs: lint, types, import layers, all tests

static: $(READY)  ## Lint, types, import layers, generated tables and the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/make_tables.py --check
	$(MAKE) docs

docs: $(READY)  ## Build the site in site/; fails at a link or a reference that leads nowhere
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs site

SUITES ?= bars heads patterns table2 figure2 table1

bench: $(READY)  ## Measure the heads on this machine's GPU; SUITES="bars heads" for some
	$(BIN)/python scripts/benchmark.py head --suite $(SUITES)

OVERRIDES ?=

table3: $(READY)  ## Train Table 3 of the paper, hours a row; OVERRIDES="steps=100 ..."
	$(BIN)/python train.py experiment=table3 $(OVERRIDES)

tables: $(READY)  ## Write the tables and figures of README.md and docs/ from the records in results/
	$(BIN)/python scripts/plot_benchmarks.py
	$(BIN)/python scripts/make_tables.py

format: $(READY)  ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

environment: $(READY)  ## The virtual environment in .venv, with pinned versions

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "sparton needs Python 3.11 to 3.14, $(PYTHON) is another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $(READY)

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

.PHONY: help quickstart test test-slow test-gpu sanitize check static docs bench table3 tables format environment clean
