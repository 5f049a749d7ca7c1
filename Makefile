# makespan: two commands are enough, `make reproduce` and `make test`; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Each of these can be given on the command line, for example `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CORES ?= all
TARGETS ?=
SNAKEMAKE_FLAGS ?=
# `make --quiet` asks Snakemake for less, too.
QUIET := $(if $(findstring s,$(firstword -$(MAKEFLAGS))),--quiet all)
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

##@ Run

.PHONY: reproduce
reproduce: setup ## Set up the environment, build every table and figure, and write the report
	$(BIN)/snakemake $(QUIET) $(SNAKEMAKE_FLAGS) --cores $(CORES) $(TARGETS)
	@if [ -z "$(TARGETS)" ] && [ -f results/report.html ]; then echo "report: $(CURDIR)/results/report.html"; fi

# With TARGETS, for example a paper, the page shows what there is and says what is missing.
.PHONY: report
report: setup ## Build TARGETS and write results/report.html over all results that are there
	$(BIN)/snakemake $(QUIET) $(SNAKEMAKE_FLAGS) --cores $(CORES) $(TARGETS)
	$(BIN)/makespan report $(if $(QUIET),--quiet)

.PHONY: bench
bench: setup-dev ## Time the hot paths (no assertion on absolute time)
	$(BIN)/python -m pytest benchmarks --benchmark-only $(PYTEST_FLAGS)

##@ Check

.PHONY: test
test: lint ## Run the linters and the whole test suite with its coverage threshold
	$(BIN)/python -m slipcover --json --out .coverage.json -m pytest -n auto --dist loadgroup $(PYTEST_FLAGS)
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json --fail-under 92

.PHONY: lint
lint: setup-dev ## Check style, types, import directions, spelling and the workflow files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/snakefmt --check --compact-diff Snakefile rules
	$(BIN)/snakemake --lint

.PHONY: validate-public
validate-public: setup ## Judge predictions on published rows, beside the errors recorded for this release
	$(BIN)/makespan validate-public --against-record -o results/judged.csv --predictions results/predicted.csv

# Root installs the Debian packages that are missing; others are told which. The tests start daemons of their own on
# loopback and stop them again; three clusters at a time, since jobs spend most of their time in the queue.
.PHONY: slurm-test
slurm-test: setup-dev ## Run rules with GPUs on a local Slurm cluster without GPUs
	@missing=$$($(BIN)/python tests/support/local_slurm.py); \
	if [ -n "$$missing" ] && [ "$$(id -u)" -eq 0 ]; then \
	  echo "installing $$missing"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	elif [ -n "$$missing" ]; then \
	  echo "missing: $$missing; install with: apt-get install --no-install-recommends $$missing" >&2; exit 1; \
	fi
	$(BIN)/python -m pytest -n 3 --dist loadfile -m slurm tests/slurm $(PYTEST_FLAGS)

# What is built sees the run set alone: packages of the developer set are hidden.
.PHONY: report-test
report-test: setup-dev ## Build the small configuration in a copy, with the run set alone, and test its results and report, and targets
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "small_run or targets" tests/workflow $(PYTEST_FLAGS)

# On a machine with GPUs, the first thing to run. Without one, the same tests run on the CPU.
.PHONY: gpu-test
gpu-test: setup-dev ## Try every path of CUDA and NCCL on the GPUs that are here, and list them in results/gpu-test.csv
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_FLAGS)

.PHONY: bench-test
bench-test: setup-dev ## Run what is benchmarked once each, untimed
	$(BIN)/python -m pytest benchmarks -n auto -o addopts=--import-mode=importlib --benchmark-disable $(PYTEST_FLAGS)

.PHONY: hf-test
hf-test: $(STAMPS)/hf ## Schedule models of the transformers package, which is installed for it
	$(BIN)/python -m pytest -n auto --dist loadfile -m hf tests/differential $(PYTEST_FLAGS)

.PHONY: format
format: setup-dev ## Bring every file into the house layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules

.PHONY: targets
targets: setup ## Print the goals of this project beside what the results reach
	$(BIN)/python scripts/targets.py

.PHONY: generated
generated: setup ## Rewrite the files made from the code: schemas and reference pages
	$(BIN)/python scripts/generate.py

.PHONY: pages
pages: setup ## Fill the tables of the papers' pages from results/
	$(BIN)/python scripts/generate.py results

.PHONY: docs
docs: setup-docs ## Build the documentation into site/, and test its pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -m site tests/unit/test_documentation.py $(PYTEST_FLAGS)

##@ Environment

.PHONY: setup
setup: $(STAMPS)/package ## Create .venv with the pinned run set and the package

.PHONY: setup-dev setup-docs
setup-dev setup-docs: $(STAMPS)/dev

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v < (3, 14) and f"Python {v[0]}.{v[1]} found; 3.11 to 3.13 are supported; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# torch is a step of its own: on a machine without a GPU the CPU build may be installed beforehand or by
# `make setup TORCH="torch==2.13.0 --index-url <index of CPU builds>"`.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install $(TORCH)
	@touch $@

$(STAMPS)/run: requirements.txt $(STAMPS)/torch
	$(PIP) install -r requirements.txt
	@touch $@

# pip compiles what it installs, but not what stays here: where Python may not write bytecode when it imports, as in
# many containers, each of the two hundred processes of a run would compile the package anew.
$(STAMPS)/package: pyproject.toml $(STAMPS)/run
	$(PIP) install -e .
	$(BIN)/python -m compileall -q src
	@touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/package
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(STAMPS)/hf: pyproject.toml $(STAMPS)/dev
	$(PIP) install -e '.[hf]'
	@touch $@

.PHONY: clean
clean: ## Remove products, logs and caches; keep the environment
	rm -rf results/*/ results/report.* logs benchmarks/results .snakemake site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks .coverage.json
	find src tests workflow benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## Remove the environment too
	rm -rf $(VENV)

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nVariables: PYTHON=%s VENV=%s CORES=%s TARGETS="%s" TORCH="%s"\n' \
	  "$(PYTHON)" "$(VENV)" "$(CORES)" "$(TARGETS)" "$(TORCH)"
