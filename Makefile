# halfbyte: `make demo` and `make test` do all set-up in a local .venv. Variables:
#   VENV=path          another (or your own, existing) virtual environment
#   SYSTEM_SITE=1      make .venv with --system-site-packages: keep the machine's own torch
#   TORCH="torch"      what pip installs as torch (default torch==2.13.0); TORCH= installs none
#   PYTHON=python3.12  the Python to make .venv with
#   ARGS="-k packing"  extra arguments of pytest
#   CUTLASS=path       a checkout of NVIDIA's CUTLASS, whose examples test-long then runs as well
# pip's own settings (PIP_* variables, pip.conf) are used as they are.

# Waiting OpenMP threads sleep instead of spinning: on a busy machine they spin for the core that
# the thread they wait for needs.
export OMP_WAIT_POLICY ?= PASSIVE

# Programs on the virtual GPU run one to a process; BLAS threads beside its own only wait.
export OPENBLAS_NUM_THREADS ?= 1
ifdef CUTLASS
export HALFBYTE_CUTLASS := $(abspath $(CUTLASS))
endif

VENV ?= .venv
PEERS_VENV ?= .venv-peers
BIN = $(VENV)/bin
ARGS ?=

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
endif

SETUP_FLAGS = $(if $(filter 1,$(SYSTEM_SITE)),--system-site)
ifneq ($(origin TORCH),undefined)
SETUP_FLAGS += --torch "$(TORCH)"
endif

# tools/prepare_venv.py names what is missing; without any python3 only this line can.
define prepare
@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 is missing: apt-get install python3 python3-venv g++" >&2; exit 1; }
@$(PYTHON) tools/prepare_venv.py $(1) --venv "$(2)" $(SETUP_FLAGS)
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-peers lint types check bench format clean setup setup-demo setup-peers

help:
	@echo "make demo       quantize SmolLM2-135M to 4 bits and show what it cost (sets up first)"
	@echo "make test       run the tests (sets up first)"
	@echo "make test-long  the tests and the long products, then the peers' in $(PEERS_VENV)"
	@echo "make setup | setup-peers  what the tests and examples, or the peers, need; nothing else"
	@echo "make lint | types | check | format | bench | clean"

setup-demo:
	$(call prepare,demo,$(VENV))

setup:
	$(call prepare,test,$(VENV))

setup-peers:
	$(call prepare,peers,$(PEERS_VENV))

demo: setup-demo
	$(BIN)/halfbyte demo

test: setup
	$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: setup setup-peers
	$(PEERS_VENV)/bin/python -m pytest -m peers tests/peers tests/virtual/driver $(ARGS)
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "long or not long" $(ARGS)

test-peers: setup-peers
	$(PEERS_VENV)/bin/python -m pytest -m "peers and not long" tests/peers tests/virtual/driver $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: setup
	$(BIN)/python tools/check_all.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup setup-peers
	$(PEERS_VENV)/bin/python benchmarks/quantize_nvfp4.py
	@for program in $(filter-out %/timing.py %/quantize_nvfp4.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
