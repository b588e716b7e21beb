# Everything happens in .venv, which the first target that needs it makes. Another interpreter: make PYTHON=python3.12 …
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# Test processes.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A second one, with the Gymnasium that CleanRL pins.
OLD_VENV := .venv-gym029
OLD_BIN := $(OLD_VENV)/bin
OLD_READY := $(OLD_VENV)/.ready
OLD_PIP := $(OLD_BIN)/python -m pip --disable-pip-version-check

# What RLinf requires conflicts with everything else here: it has a virtual environment of its own.
RLINF_VENV := .venv-rlinf
RLINF_READY := $(RLINF_VENV)/.ready
RLINF_PIP := $(RLINF_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(READY) ## Train on environments in another process, and see that nothing changed
	@$(BIN)/python -m plugrl_bridges.demo $(ARGS)

.PHONY: test test-gym029 test-rlinf
# One thread per process: the tests bring their own processes, and the arithmetic stays the same on every machine.
test test-gym029: export OMP_NUM_THREADS := 1
test test-gym029: export MKL_NUM_THREADS := 1
test test-gym029: export OPENBLAS_NUM_THREADS := 1
test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-gym029: export EXPECTED_GYMNASIUM := 0.29.1
test-gym029: $(OLD_READY) ## Run the tests of tests/gym029 with Gymnasium 0.29.1 and numpy 1.26
	@$(OLD_BIN)/python -m pytest tests/gym029 $(ARGS)

test-rlinf: $(RLINF_READY) ## Run the tests that need RLinf, in a virtual environment of their own
	@$(RLINF_VENV)/bin/python -m pytest tests/rlinf $(ARGS)

.PHONY: lint
lint: $(READY) ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(wildcard examples/cpp/*.[ch]pp tests/cpp/*.[ch]pp)

.PHONY: types
# Twice: strictly, and then for names that the oldest Python lacks (where numpy's arrays are no buffers to mypy).
OLDEST := --python-version 3.10 --no-warn-unused-ignores $(addprefix --disable-error-code=,\
	arg-type assignment call-overload list-item no-any-return return-value)
types: $(READY) ## Check types
	@$(BIN)/mypy
	@$(BIN)/mypy $(OLDEST) src

.PHONY: docs
docs: $(READY) ## Build the documentation as a site, into build/site
	@$(BIN)/mkdocs build --quiet

.PHONY: bench
bench: $(READY) ## Measure what the boundary between the processes costs
	@$(BIN)/python -m benchmarks.boundary $(ARGS)

.PHONY: clean
clean: ## Remove the virtual environments, caches and build products
	rm -rf $(VENV) $(OLD_VENV) $(RLINF_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that no other requirement gets to choose its release. A .venv that is there and runs is
# kept, one whose interpreter has gone is made anew.
$(READY): pyproject.toml constraints.txt
	@echo "==> installing into $(VENV): torch, Stable-Baselines3, MuJoCo, Atari and the tools (first time: a few minutes)"
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "    1/3 pip"
	@$(PIP) install -qq --upgrade 'pip>=25.1'
	@echo "    2/3 torch"
	@$(PIP) install -qq -c constraints.txt torch
	@echo "    3/3 everything else"
	@$(PIP) install -qq -c constraints.txt -e '.[demo,mujoco,atari,cleanrl]' --group dev --group docs
	@touch $@
	@echo "==> installed"

# numpy 1.26 and the MuJoCo of that time have no wheels for newer Pythons.
$(OLD_READY): pyproject.toml constraints-gym029.txt
	@echo "==> installing into $(OLD_VENV): Gymnasium 0.29.1, torch, MuJoCo and pytest (first time: a minute)"
	@$(OLD_BIN)/python -c '' 2>/dev/null || { \
		for python in $(PYTHON) python3.11 python3.10; do \
			$$python -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 10), (3, 11)})' 2>/dev/null \
				&& exec $$python -m venv --clear $(OLD_VENV); \
		done; \
		echo "Gymnasium 0.29.1 needs Python 3.10 or 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	}
	@$(OLD_PIP) install -qq --upgrade 'pip>=25.1'
	@$(OLD_PIP) install -qq -c constraints-gym029.txt torch
	@$(OLD_PIP) install -qq -c constraints-gym029.txt -e '.[cleanrl,mujoco]' pytest pytest-timeout
	@touch $@
	@echo "==> installed"

# As docs/rlinf.md tells it, and the tools.
$(RLINF_READY): pyproject.toml constraints-rlinf.txt
	@echo "==> installing into $(RLINF_VENV): torch, RLinf and what it brings, 3 GB (first time: some minutes)"
	@$(RLINF_VENV)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(RLINF_VENV)
	@echo "    1/3 pip"
	@$(RLINF_PIP) install -qq --upgrade 'pip>=25.1'
	@echo "    2/3 torch"
	@$(RLINF_PIP) install -qq -c constraints-rlinf.txt torch
	@echo "    3/3 everything else"
	@$(RLINF_PIP) install -qq -c constraints-rlinf.txt -e '.[rlinf]' pytest pytest-timeout psutil
	@touch $@
	@echo "==> installed"
