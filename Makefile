# Two commands matter: `make demo` (set up and see it work) and `make test`. All of them set up what they lack.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench rivals clean

help:  ## show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv with pinned packages; quick when nothing changed

# torch first and alone: it is by far the largest download, and an interrupted one then repeats nothing else.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vivace needs Python 3.11 or newer, found " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## sample answers of the model that ships, their speed, and whether they are identical
	$(BIN)/vivace demo

WORKERS ?= 2
test: setup  ## the test suite in WORKERS processes; options in ARGS, e.g. make test ARGS="-k decode"
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

check: setup  ## lint, format, types and the architecture test: exactly what CI runs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: setup  ## apply lint fixes and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## decode speed of every method on the packaged prompts
	$(BIN)/vivace bench decode --methods plain,lookup,multirate

RUNS ?= runs/rivals
rivals: setup  ## train every rival on DATA="FILE ..." and measure all methods in one run; hours
	$(BIN)/python -m benchmarks.rivals train --runs $(RUNS) $(foreach file,$(DATA),--data $(file))
	$(BIN)/python -m benchmarks.rivals measure --runs $(RUNS) --json $(RUNS)/rivals.json

clean:  ## remove caches and the environment
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
