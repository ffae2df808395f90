# One command per need. A fresh machine needs python3 >= 3.11, pip and make; which torch build pip picks (CPU or CUDA)
# is pip's own configuration, never this file's.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINNED := $(PIP) install -qq -c constraints.txt

# Spinning OpenMP threads take a shared machine's cores from each other; sleeping ones do not.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0

DEMO_OUT ?= runs/demo
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv assets test check demo bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.ready ## set up .venv with the pinned dependencies and this package, editable

# torch comes first and alone: one pinned build, which everything after it finds in place.
# The build backend is pinned like the rest, so the package builds without an isolated (unpinned) environment.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "paceline needs python3 >= 3.11, and '$(PYTHON)' is not; point to one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PINNED) torch
	@$(PINNED) scikit-build-core
	@$(PINNED) --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(PINNED) --no-build-isolation -e '.[dev,docs]'
	@touch $@

assets: venv ## fetch the demo's model and data into the user's cache (nothing to do when they are there)
	@$(BIN)/paceline assets

test: assets ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: venv ## lint, formatting, types, floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: assets ## train SmolLM2-135M on function calls with speculative rollouts; ends with a report
	$(BIN)/paceline train examples/function_call.yaml --out $(DEMO_OUT) --overwrite

bench: assets ## run every benchmark
	@for file in $(sort $(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(VENV)/.docs-ready ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what was built; keeps runs/ and the user's cache
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
