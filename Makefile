# `make` lists the targets. Each sets up .venv by itself; a second call installs nothing.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv test lint format kernels demo clean

# The Python that makes .venv (3.11, 3.12 or 3.13), and the torch put into it before the rest, so that nothing else picks one.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with the package (editable), torch and the development tools

$(READY): pyproject.toml
	@test -x $(BIN)/python || { \
	    $(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(None if ok else \
	        f"tinyvllm needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. Try: make venv PYTHON=python3.12")' && \
	    $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet '$(TORCH)' --editable '.[dev]'
	@touch $@

test: lint ## everything that CI runs: lint, the kernels' compilation (where nvcc is), all tests
	$(BIN)/python -m cuda_ext.check --allow-missing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(READY) ## ruff (rules and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

kernels: $(READY) ## compile every .cu for sm_80 and sm_90a: no warning, no spill (needs nvcc, no GPU)
	$(BIN)/python -m cuda_ext.check

demo: $(READY) ## answer the bundled prompts with the bundled model
	$(BIN)/tinyvllm generate --model demo --table --prompts tinyvllm_cli/demo/prompts.txt

clean: ## remove all that make made, .venv included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tinyvllm_cli cuda_ext tests -name __pycache__ -type d -prune -exec rm -rf {} +
