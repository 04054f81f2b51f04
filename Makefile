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

# Other versions than those of constraints.txt, in an environment of their own: make test-with WITH='torch==2.8.0'.
# What they need in versions of its own is chosen by pip: the newest that fits.
WITH ?=
TESTS ?=
WITH_VENV := .venv-$(subst $(eval ) ,-,$(subst ==,-,$(strip $(WITH))))
WITH_CONSTRAINTS := $(CURDIR)/$(WITH_VENV)/constraints.txt
FOLLOWERS := torchvision triton timm tokenizers huggingface_hub

.DEFAULT_GOAL := help
.PHONY: help setup browser test test-cpus test-with test-gpu lint format demo bench bench-ranks study docs release-check clean

help:
	@echo "make setup        create .venv and install megabatch into it, with its tools"
	@echo "make test         lint, types and all tests"
	@echo "make browser      install Chromium with apt-get if it is missing, for the tests of the report page"
	@echo "make test-cpus    the tests of numbers under other vector units, BLAS kernels and numbers of threads"
	@echo "make test-with    all tests with other versions, in an environment of their own: WITH='torch==2.8.0'"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make lint         ruff and mypy only"
	@echo "make format       let ruff rewrite what it can"
	@echo "make demo         dense against megabatch under a memory limit; a model trained; a step at batch 65,536"
	@echo "make bench        time and memory of every loss against its peers"
	@echo "make bench-ranks  the same over several ranks, and what gradients come out on them"
	@echo "make study        what is left of the study of batch sizes; QUICK=1: one cell again, compared with what was kept"
	@echo "make docs         the documentation as a site, in build/docs; warnings are errors, links are checked"
	@echo "make release-check  wheel and sdist; the wheel installed in a clean environment and tried"
	@echo "make clean        remove caches and build output (.venv stays)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,bench,triton]'
	@touch $@

# Tests look at a page in Chromium. They are skipped where there is none and none can be installed.
browser:
	@for name in chromium chromium-browser google-chrome chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ timeout 900 apt-get update -q && timeout 900 apt-get install -q -y --no-install-recommends chromium; } \
		>/dev/null 2>&1 || echo "browser: there is no Chromium and none could be installed: its tests are skipped"

test: lint browser
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

test-with: $(WITH_VENV)/.setup
	$(WITH_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

$(WITH_VENV)/.setup: pyproject.toml constraints.txt
	@test -n '$(WITH)' || { echo "test-with: WITH must name versions, as in WITH='torch==2.8.0'"; exit 2; }
	@test -x $(WITH_VENV)/bin/python || $(PYTHON) -m venv $(WITH_VENV)
	@grep -v -i $(foreach name,$(FOLLOWERS) $(foreach pin,$(WITH),$(firstword $(subst ==, ,$(pin)))),-e '^$(name)==') \
		$(CONSTRAINTS) > $(WITH_CONSTRAINTS)
	@printf '%s\n' $(WITH) >> $(WITH_CONSTRAINTS)
	PIP_CONSTRAINT=$(WITH_CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(WITH_CONSTRAINTS) \
		$(WITH_VENV)/bin/python -m pip install --quiet -e '.[dev,bench,triton]'
	@touch $@

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

study: setup
	$(PY) -m studies.batch_size $(if $(QUICK),again,run)

docs: setup
	$(PY) -m sphinx -W --keep-going -q -E -b html docs build/docs
	$(PY) tools/check_site.py build/docs

# -I: neither the working directory nor the user's packages are imported.
release-check: setup
	rm -rf dist build/release
	$(PY) -m build --quiet --outdir dist
	$(PY) -m twine check --strict dist/*
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet -c $(CONSTRAINTS) dist/*.whl
	build/release/bin/python -I tools/smoke.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
