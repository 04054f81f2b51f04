# Everything runs in .venv, which is made on first use from nothing but python3.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CONSTRAINTS := $(CURDIR)/constraints.txt
STAMP := $(VENV)/.setup

# The second is what newer versions of pip read inside build environments.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Files of tests that compare numbers, and what they are run under: vector units, BLAS kernels and threads of others.
NUMERICS := $(patsubst %,tests/test_%.py,numbers losses reference retrieval products modules triton)
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
# Of them, in a minute: what a machine without AVX-512 would see.
SHORT := $(NUMERICS) -k 'not products and not modules and not 32768 and (not triton or number_of_rows or retrieval or tie)'
PASSIVE := OMP_WAIT_POLICY=passive# more threads than cores are not to spin
TWO_WORKERS := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup test test-cpus test-gpu lint format demo bench bench-ranks clean

help:
	@echo "make setup        create .venv and install megabatch into it, with its tools"
	@echo "make test         lint, types and all tests"
	@echo "make test-cpus    the tests of numbers under other vector units, BLAS kernels and numbers of threads"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make lint         ruff and mypy only"
	@echo "make format       let ruff rewrite what it can"
	@echo "make demo         dense against megabatch under a memory limit; a model trained; a step at batch 65,536"
	@echo "make bench        time and memory of every loss against its peers"
	@echo "make bench-ranks  the same over several ranks, and what gradients come out on them"
	@echo "make clean        remove caches and build output (.venv stays)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,bench,triton]'
	@touch $@

test: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(AVX2) $(PY) -m pytest -q $(TWO_WORKERS) $(SHORT)

# All of them, also after one that fails.
test-cpus: setup
	@failed=; \
	for cpu in ATEN_CPU_CAPABILITY=default '$(AVX2)' MKL_CBWR=COMPATIBLE \
	           OMP_NUM_THREADS=1 '$(PASSIVE) OMP_NUM_THREADS=2' '$(PASSIVE) OMP_NUM_THREADS=4'; do \
		echo "== $$cpu"; \
		env $$cpu $(PY) -m pytest -q $(TWO_WORKERS) $(NUMERICS) || failed="$$failed\n$$cpu"; \
	done; \
	if [ -n "$$failed" ]; then printf "failed under:$$failed\n"; exit 1; fi

test-gpu: setup
	TRITON_INTERPRET=0 $(PY) -m pytest -m gpu

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

demo: setup
	$(PY) -m tools.demo

bench: setup
	$(PY) -m megabatch bench loss

bench-ranks: setup
	$(PY) -m megabatch bench ring
	$(PY) -m megabatch bench gradients

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
