# `make demo` and `make test` are all a newcomer needs: each does its own set-up in .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps

NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.txt' -o -name '*.in')
CXX_FILES := $(shell find csrc examples tests -name '*.cpp' -o -name '*.h')
PY_DIRS := dtorch_ops tests benchmarks examples setup.py

say = @printf '\n== %s\n' "$(1)"

.PHONY: help build demo test test-only bench lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMPS)/venv:
	$(call say,making a virtual environment in $(VENV) with $(TORCH))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)' 'setuptools>=77' 'cmake>=3.20' ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: requirements/demo.txt  # which the tests include
$(STAMPS)/%: requirements/%.txt $(STAMPS)/venv
	$(call say,installing what 'make $*' needs)
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

$(STAMPS)/build: $(STAMPS)/venv setup.py pyproject.toml $(NATIVE)
	$(call say,building the native library (a few minutes the first time))
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

build: $(STAMPS)/build  ## build the package in place, into .venv

demo: $(STAMPS)/build $(STAMPS)/demo  ## train on real digits and serve them, without blocking
	$(call say,running examples/train_digits.py)
	$(BIN)/python examples/train_digits.py
	$(call say,running examples/worker_pool.py)
	$(BIN)/python examples/worker_pool.py

test: lint test-only  ## lint, type checks and all tests

test-only: $(STAMPS)/build $(STAMPS)/test  ## the tests alone; ARGS='-k name' chooses
	$(call say,running the tests)
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMPS)/build $(STAMPS)/test  ## the benchmarks, each beside its baseline
	$(call say,running the benchmarks)
	$(BIN)/python -m benchmarks

lint: $(STAMPS)/build $(STAMPS)/lint $(STAMPS)/test  ## formatting, lint and type checks
	$(call say,checking format, lint and types)
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(STAMPS)/lint  ## format all sources
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -rf dtorch_ops/lib dtorch_ops/include dtorch_ops/share dtorch_ops/_build_info.py dtorch_ops/*.so
