# `make demo` and `make test` are all a newcomer needs: each does its own set-up in .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps

NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.txt' -o -name '*.in')
CXX_FILES := $(shell find csrc benchmarks examples tests -name '*.cpp' -o -name '*.h')
PY_DIRS := dtorch_ops tests benchmarks examples docs/conf.py setup.py

say = @printf '\n== %s\n' "$(1)"

.PHONY: help build demo test test-only wheel test-wheel docs test-gpu bench-gpu check-cuda-build \
	bench model model-mistakes faults asan tsan lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(STAMPS)/venv:
	$(call say,making a virtual environment in $(VENV) with $(TORCH))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)' 'setuptools>=77' 'cmake>=3.20' ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: requirements/demo.txt requirements/docs.txt  # which the tests include
$(STAMPS)/%: requirements/%.txt $(STAMPS)/venv
	$(call say,installing what 'make $*' needs)
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

# Where there is none for this Python, or this machine, the tests of it are skipped.
$(STAMPS)/ray: requirements/ray.txt $(STAMPS)/test
	$(call say,installing Ray, which some tests use)
	$(BIN)/python -m pip install --quiet -r $< || echo 'There is no Ray to be had: its tests are skipped.'
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
	$(call say,running examples/cluster.py)
	$(BIN)/python examples/cluster.py
	$(call say,running examples/profile_fetch.py)
	$(BIN)/python examples/profile_fetch.py

test: lint test-only  ## lint, type checks and all tests

test-only: $(STAMPS)/build $(STAMPS)/test $(STAMPS)/ray  ## the tests alone; ARGS='-k name' chooses
	$(call say,running the tests)
	$(BIN)/python -m pytest $(ARGS)

# Torch's own libraries are not copied into the wheel: they come with torch, and are found beside it.
OF_TORCH := --exclude 'libtorch*.so' --exclude 'libc10*.so'

wheel: $(STAMPS)/venv $(STAMPS)/wheel  ## a source archive and a wheel made from it, for $(TORCH), in dist/
	$(call say,building a source archive and from it a wheel for $(TORCH))
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair $(OF_TORCH) --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist

test-wheel: wheel  ## all tests on the wheel, in a new environment outside of the checkout
	$(call say,testing the wheel)
	$(BIN)/python tests/run_on_wheel.py '$(TORCH)' $(ARGS)

# On a machine with a GPU, which may reach no package index: no environment is made. PYTHON_GPU has a
# CUDA build of torch, setuptools, cmake, ninja, pytest and pytest-timeout; with pytest-xdist,
# ARGS='-n 4' is quicker.
PYTHON_GPU ?= $(PYTHON)

test-gpu:  ## the accelerator's tests on CUDA, with PYTHON_GPU as it is; ARGS='-k name' chooses
	$(call say,running the tests of the accelerator on CUDA)
	@$(PYTHON_GPU) tests/run_on_gpu.py $(ARGS)

bench-gpu:  ## the accelerator's benchmarks on CUDA, in the same way
	$(call say,running the benchmarks of the accelerator on CUDA)
	@$(PYTHON_GPU) tests/run_on_gpu.py --bench $(ARGS)

bench: $(STAMPS)/build $(STAMPS)/test  ## the benchmarks, each beside its baseline
	$(call say,running the benchmarks)
	$(BIN)/python -m benchmarks

model:  ## check the protocol of the shared memory (docs/model); needs spin and gcc
	$(call say,checking the model of the shared memory)
	@tests/model.sh

model-mistakes:  ## that the checker finds every mistake made in the models on purpose
	$(call say,checking what the models find)
	@tests/model.sh --mistakes

# The programs of tests/cpp/shm need no torch. SEED chooses other random numbers.
SEED ?= 1

faults: $(STAMPS)/test  ## processes stopped and killed at every step of the shared memory's protocol
	$(call say,stopping and killing processes)
	$(BIN)/python -m pytest --noconftest tests/test_faults.py $(ARGS)

asan:  ## shared memory full of garbage, under AddressSanitizer and UBSan; SEED=n
	$(call say,corrupting the shared memory under AddressSanitizer)
	@$(MAKE) -s -C tests/cpp/shm VARIANT=asan corruption stress asking
	build/shm/asan/corruption 100000 $(SEED)
	build/shm/asan/stress 5 $(SEED)
	for what in abandon drop wait; do build/shm/asan/asking $$what || exit 1; done

tsan:  ## threads of consumer and producers at once, under ThreadSanitizer; SEED=n
	$(call say,stressing the shared memory under ThreadSanitizer)
	@$(MAKE) -s -C tests/cpp/shm VARIANT=tsan stress
	build/shm/tsan/stress 10 $(SEED)

# Without a GPU, and without nvcc: a CUDA build of torch is all it needs (several GB).
CUDA_TORCH ?= torch==2.14.1
CUDA_PYTHON ?= $(VENV)-cuda/bin/python

$(VENV)-cuda/bin/python:
	$(call say,making a virtual environment in $(VENV)-cuda with $(CUDA_TORCH))
	$(PYTHON) -m venv $(VENV)-cuda
	$@ -m pip install --quiet '$(CUDA_TORCH)' 'setuptools>=77' 'cmake>=3.20' ninja

check-cuda-build: $(CUDA_PYTHON)  ## compile and link all, CUDA's part too, against a CUDA build of torch
	$(call say,building against $(CUDA_TORCH))
	$(CUDA_PYTHON) tests/check_cuda_build.py

docs: $(STAMPS)/build $(STAMPS)/docs  ## the pages, into build/docs; warnings are errors
	$(call say,building the pages: build/docs/index.html)
	$(BIN)/python -m sphinx -b html -q -E -W -n --keep-going docs build/docs

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
