# `make setup` makes .venv; every other target but test-gpu uses it and makes it when it is missing.
#
#   make setup      create or update .venv, build the C part in place
#   make demo       the nine example models: graphs, cost and times beside torch.compile's
#   make test       the tests that belong to every change
#   make test-all   those, the slow ones, and test-pythons
#   make test-pythons   what needs no torch, on the other interpreters: PYTHONS="python3.12 ..."
#   make lint       ruff and mypy
#   make bench      the benchmarks, results under benchmarks/results/
#   make parity     coverage of programs: CORPUS=DIR (a clone of the corpus; else our own small
#                   one), SAMPLE=200 files; fails when a case that was whole no longer is
#   make test-gpu   the tests on a machine with a GPU, for the interpreter at hand, without a
#                   network and without setup; PART=1/3 runs the first third

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PART ?=
TESTS ?= tests

# One thread a worker: two workers with threads of their own would fight for two cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

SOURCES := $(wildcard magjit/csrc/*.c magjit/csrc/*.h backends/magjit_triton/csrc/*.c $(addprefix backends/magjit_dvm/csrc/*,.cpp .h .inc))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: setup demo test test-all test-pythons lint format bench parity test-gpu clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: constraints.txt pyproject.toml setup.py $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,models]'
	touch $@

demo: setup
	$(BIN)/python benchmarks/demo.py

test: setup
	$(PYTEST) -m "not slow and not gpu and not fuzz" $(TESTS)

test-all: setup
	$(PYTEST) $(TESTS)
	$(MAKE) test-pythons

# The C part and the bytecode layer know CPython's versions, and nothing of torch.
PYTHONS ?= python3.12 python3.13
WITHOUT_TORCH := tests/bytecode tests/csrc tests/monitor

test-pythons:
	for python in $(PYTHONS); do \
	  if ! $$python -c '' 2>/dev/null; then echo "$$python: not here, left out"; continue; fi; \
	  venv=.venv-$$(basename $$python); \
	  test -x $$venv/bin/python || $$python -m venv $$venv || exit 1; \
	  $$venv/bin/python -m pip install -q -c constraints.txt setuptools wheel \
	    pytest pytest-xdist pytest-timeout hypothesis numpy PyYAML networkx rich || exit 1; \
	  rm -rf build/lib*; \
	  $$venv/bin/python -m pip install -q --no-deps --no-build-isolation --force-reinstall . || exit 1; \
	  PYTHONSAFEPATH=1 $$venv/bin/python -m pytest -n $(WORKERS) $(WITHOUT_TORCH) || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python benchmarks/front_end.py --json benchmarks/results/front_end.json
	$(BIN)/python benchmarks/call_cost.py --json benchmarks/results/call_cost.json
	$(BIN)/python benchmarks/dvm.py --device cpu --json benchmarks/results/dvm.json

CORPUS ?= minicorpus
SAMPLE ?= 200
SEED ?= 0
PARITY := build/parity
# What was whole when the results were last committed.
PARITY_BASE = $(if $(filter minicorpus,$(CORPUS)),minicorpus,corpus)
RUNNER := $(BIN)/python -m paritybench_runner

parity: setup
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[parity]'
	rm -rf $(PARITY)
	$(RUNNER) run --corpus $(CORPUS) --sample $(SAMPLE) --seed $(SEED) --jobs $(WORKERS) --out $(PARITY)
	$(RUNNER) report $(PARITY)
	$(RUNNER) compare benchmarks/results/paritybench/$(PARITY_BASE).json $(PARITY) --fail-on-loss

# The project goes into a folder of its own, wheels that were brought along (.whl/) into another:
# the interpreter's own packages stay as they are.
GPU_SITE := build/gpu/site
GPU_WHEELS := build/gpu/wheels
GPU_WORKERS ?= 8

test-gpu:
	rm -rf build/gpu build/lib* build/temp*
	$(PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation --target $(GPU_SITE) .
	for wheel in $(wildcard .whl/*.whl); do \
	  $(PYTHON) -m pip install -q --no-index --no-deps --target $(GPU_WHEELS) --upgrade $$wheel || exit 1; \
	done
	PYTHONPATH=$(GPU_SITE):$(GPU_WHEELS) PYTHONSAFEPATH=1 $(PYTHON) -m pytest \
	  -m "not fuzz" -n $(GPU_WORKERS) --dist loadgroup $(if $(PART),--part $(PART)) $(TESTS)

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info magjit/_C*.so
