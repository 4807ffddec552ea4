# make serve | test | test-all | lint | install | clean. Each does its own set-up in .venv; a second run takes seconds.
#   make serve ARGS="--port 9000"      flags for streamkv serve
#   make test ARGS="-k config -x"      flags for pytest
#   make PYTHON=/path/to/python3.12    another Python than the first fitting one on the PATH

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test test-all lint clean

VENV := .venv
PY := $(VENV)/bin/python
DONE := $(VENV)/.done
ARGS ?=
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)

help:
	@sed -n 's/^# //p' Makefile | head -4

install: $(DONE)/model
	@echo "StreamKV is installed in $(VENV). Start it with: make serve"

serve: $(DONE)/model
	@exec $(PY) -m streamkv serve $(ARGS)

test: $(DONE)/test $(DONE)/model
	@TRITON_INTERPRET=1 $(PY) -m pytest -m "not long and not docker and not gpu" $(ARGS)

test-all: $(DONE)/test $(DONE)/model
	@TEST_ALL=1 TRITON_INTERPRET=1 $(PY) -m pytest -m "not gpu" $(ARGS)

lint: $(DONE)/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(DONE)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs -r rm -rf

# A stamp in .venv/.done stands for each finished step, so an interrupted one starts again.

$(DONE)/venv:
	@if [ -z "$(PYTHON)" ]; then \
		echo "StreamKV needs Python 3.11 or 3.12; found: $$(python3 --version 2>&1 || true)." >&2; \
		echo "On Debian or Ubuntu: apt install python3 python3-venv. Or name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; fi
	@if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "$(PYTHON) lacks the venv module. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; fi
	@if $(PY) -m pip --version >/dev/null 2>&1; then echo "==> Using the virtual environment in $(VENV)"; \
	else echo "==> 1/4 Making a virtual environment in $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); fi
	@mkdir -p $(DONE) && touch $@

$(DONE)/torch: constraints.txt | $(DONE)/venv
	@echo "==> 2/4 Installing PyTorch (the largest download; the README says how to take its CPU build)"
	@$(PY) -m pip install --constraint constraints.txt torch
	@touch $@

$(DONE)/project: pyproject.toml constraints.txt | $(DONE)/torch
	@echo "==> 3/4 Installing StreamKV and what it needs"
	@$(PY) -m pip install --constraint constraints.txt --editable .
	@touch $@

$(DONE)/model: | $(DONE)/project
	@echo "==> 4/4 Fetching the built-in model"
	@$(PY) -m streamkv fetch
	@touch $@

$(DONE)/test: pyproject.toml constraints.txt | $(DONE)/project
	@echo "==> Installing what the tests need"
	@$(PY) -m pip install --constraint constraints.txt --editable '.[test]'
	@touch $@
