SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install train test lint types format docs docs-check site audit bench report tensorboard doctor clean

BIN := .venv/bin
READY := .venv/.ready
PYENV_ROOT ?= $(HOME)/.pyenv
UV_PYTHON_INSTALL_DIR ?= $(HOME)/.local/share/uv/python
RUN ?= runs/tiny
ARGS ?=

# 3.12 comes first because every pinned package has a wheel for it.
CANDIDATES = $(foreach v,3.12 3.13 3.14,python$v $(wildcard $(PYENV_ROOT)/versions/$v.*/bin/python \
	$(UV_PYTHON_INSTALL_DIR)/*/bin/python$v)) python3
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

# A pyenv shim may stand for a version that does not run, so each candidate is tried.
PYTHON ?= $(shell for p in $(CANDIDATES); do "$$p" -c '$(USABLE)' >/dev/null 2>&1 && echo "$$p" && break; done)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s%s\n", $$1, $$2}' Makefile

install: $(READY) ## make .venv from constraints.txt

train: $(READY) ## train the recipe tiny on two CPU ranks, about two minutes (ARGS="optim.lr=1e-3 ...")
	@$(BIN)/k3train train recipe=tiny $(ARGS)

test: $(READY) ## run the tests that take under a minute each (ARGS="-m slow", ARGS=tests/unit)
	@$(BIN)/python -m pytest -q -m 'not slow' --cov --cov-report= $(ARGS)
	@echo "coverage: $$($(BIN)/coverage report --format=total)%"

lint: $(READY) ## ruff: rules and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: $(READY) ## mypy
	@$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: $(READY) ## write what docs/ has of the code anew: keys, recipes, commands, pictures
	@$(BIN)/python -m launch.reference

docs-check: $(READY) ## fail when one of those is out of date
	@$(BIN)/python -m launch.reference --check

site: $(READY) ## build the documentation as a site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

audit: $(READY) ## look for known vulnerabilities in the pinned packages (needs pip-audit and its service)
	@$(BIN)/python -m launch.audit $(ARGS)

bench: $(READY) ## run every benchmark, on a CPU in its quick form, on GPUs with the GPU tests (ARGS="--only kda")
	@$(BIN)/python benchmarks/suite.py $(ARGS)

report: $(READY) ## write the curves of RUN (runs/tiny) as one HTML page
	@$(BIN)/k3train report $(RUN)

tensorboard: $(READY) ## serve the curves of all runs
	@$(BIN)/tensorboard --logdir runs

doctor: $(READY) ## say what is installed, what is used, and why not
	@$(BIN)/k3train doctor

clean: ## remove .venv and caches; runs stay
	rm -rf .venv build dist site *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "k3train needs Python 3.12 or newer with venv: install python3.12 and \
	python3.12-venv, or run \`pyenv install 3.12\`" >&2; exit 1; }
	@"$(PYTHON)" -c '$(USABLE)' || { echo "$(PYTHON) is not a Python 3.12 or newer with venv" >&2; exit 1; }
	@echo "installing into .venv with $$("$(PYTHON)" --version); this takes a few minutes once"
	@"$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
