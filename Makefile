# kvferry: one command per wish. Each sets up .venv first, and only when something changed.
#
#   make built    what all others begin with: .venv with kvferry and both compat packages in it, native code built
#   make demo     two processes, one real transformer, its KV cache handed over
#   make demo-vllm  two real vLLM servers, the pool and a router; the first run installs vLLM (2.5 GB, some minutes)
#   make test     all tests: the native core's, those that need numpy alone, then those that need torch
#   make quick    half a minute: what changed is rebuilt, the core's tests and the fast ones of the others run
#   make test-vllm  the connector for vLLM, against vLLM itself, in an environment of its own (2.5 GB, some minutes at first)
#   make check    what a change must pass: format, lint, types, layers, sanitizers, all tests, the examples in the docs;
#                 peers are killed and stopped ten times as often as in `make test`, which takes some minutes more
#   make bench    how fast, against the limits of this machine
#   make bench-vllm  the connector for vLLM: first tokens on every way, what a dead pool costs, what a step costs
#   make clean    forget everything built; `make distclean` forgets .venv too
#
#   PYTHON=/path/to/python3   another interpreter (3.10 to 3.13; 3.11 where there is one)
#   TORCH=no                  leave out the tests that need torch

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
TORCH ?= yes
VLLM_RELEASES ?= 0.27.1 0.29.0
VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test test-vllm quick check bench bench-vllm clean distclean built test-numpy test-torch lint sanitizers need-python

help:
	@sed -n 's/^#   //p' Makefile

demo: built
	@$(PYTHON) tools/environment.py torch
	@$(VENV_PYTHON) -m demo

demo-vllm: built
	@$(PYTHON) tools/vllm_environment.py
	@.venv-vllm/bin/python -m demo.serving $(ARGS)

test: built
	@$(MAKE) --no-print-directory test-numpy test-torch

test-vllm: built
	@$(PYTHON) tools/vllm_environment.py $(VLLM_RELEASES)
	@.venv-vllm/bin/python -m pytest -m vllm $(ARGS)

quick: built
	@$(VENV_PYTHON) tools/core_tests.py
	@$(PYTEST) -q -m "not slow and not torch and not vllm"

check: built lint sanitizers
	@KVFERRY_CAMPAIGN=long $(MAKE) --no-print-directory test-numpy test-torch

bench-vllm: built
	@$(PYTHON) tools/vllm_environment.py
	@.venv-vllm/bin/python benchmarks/vllm.py $(ARGS)

bench: built
	@$(VENV_PYTHON) benchmarks/transfer.py $(ARGS)

clean:
	rm -rf .build compat/*/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .venv/*-editable.stamp

distclean: clean
	rm -rf .venv .venv-vllm

# --- steps -------------------------------------------------------------------------------------------------------

need-python:
	@test -n "$(PYTHON)" || { echo "This machine is missing Python 3: apt install python3 python3-venv python3-dev g++"; exit 1; }

built: need-python
	@$(PYTHON) tools/environment.py base
	@$(VENV_PYTHON) tools/build.py

test-numpy:
	@$(VENV_PYTHON) tools/core_tests.py
	@$(PYTEST) -m "not torch and not vllm"

# Status 3: there is no torch for this Python, which has been said; anything else but 0 is a failure.
test-torch:
ifeq ($(TORCH),no)
	@echo "· TORCH=no: the tests that need torch are left out"
else
	@$(PYTHON) tools/environment.py torch; status=$$?; \
	if [ $$status -eq 0 ]; then $(PYTEST) -m torch; elif [ $$status -ne 3 ]; then exit $$status; fi
endif

lint:
	@$(PYTHON) tools/environment.py base check
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

sanitizers:
	@$(VENV_PYTHON) tools/core_tests.py strict address thread
