# Millrace: every way to start, test and clean it. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?=
ARGS ?=
LOG ?=
NODES ?=
META ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATA := $(or $(MILLRACE_DATA),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/millrace)
export PYTHONPATH := $(CURDIR)/include
# Where the environment forbids bytecode, each of the hundreds of processes that tests and systems start compiles anew what it imports:
# half of its start (2 s for Airflow's SDK). Empty means allowed; __pycache__ is written as it comes.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: help
help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- install ---------------------------------------------------------------------------------------------------

.PHONY: venv
venv: $(STAMP) ## Make the virtual environment from the lock (does nothing where it stands)

$(STAMP): requirements.txt tools/uv.txt tools/make_venv.sh
	@tools/make_venv.sh "$(VENV)" "$(PYTHON)"
	@touch $@

.PHONY: java
java: $(STAMP) ## Find Java 17 or 21, or install it where this user may
	@$(BIN)/python -m millrace.runtime.java >/dev/null

.PHONY: jars
jars: java ## Fetch Delta's jars into the cache, once
	@$(BIN)/python -m millrace.runtime.spark.jars >/dev/null

.PHONY: broker-jars
broker-jars: java ## Fetch the jars of the brokers that tests start into the cache, once
	@$(BIN)/python -m millrace.brokers.jars kafka pulsar opensearch

.PHONY: servers
servers: $(STAMP) ## Find etcd and MariaDB, which tests and demos start, or install them where this user may
	@$(BIN)/python -m millrace.brokers.programs etcd mariadb

# --- use -------------------------------------------------------------------------------------------------------

.PHONY: up down status demo run
up: jars ## Start the whole system: Airflow, the log, the streaming jobs (ARGS="--detach", "--port N"); Ctrl-C stops it
	@$(BIN)/python -m millrace system up $(ARGS)

down: $(STAMP) ## Stop all of it
	@$(BIN)/python -m millrace system down $(ARGS)

status: $(STAMP) ## Show how it is: components, rows/s, lag, memory
	@$(BIN)/python -m millrace system status $(ARGS)

demo: jars ## Put a year of flights through the running system (started if it is not), and say where to look
	@$(BIN)/python -m millrace.demo.running $(ARGS)

run: jars ## The demo without Airflow: a year of flights through the whole flow (LOG=kafka|pulsar; NODES=3 META=etcd|mariadb; PIPELINE=1; STREAMS=1; ARGS="--fresh", "--help")
	@$(BIN)/python -m millrace.demo $(if $(LOG),--log $(LOG)) $(if $(NODES),--nodes $(NODES)) $(if $(META),--meta $(META)) $(if $(PIPELINE),--pipeline) $(if $(STREAMS),--streams) $(ARGS)

# --- check -----------------------------------------------------------------------------------------------------

.PHONY: lint format test test-all test-slow test-system nightly soak mutants bench
lint: $(STAMP) ## Lint, check the format, which room imports which, and the types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "Not formatted as ruff would: run 'make format'." >&2; exit 1; }
	@said=$$($(BIN)/lint-imports --no-cache) || { sed -n '/^Broken contracts/,$$p' <<<"$$said" >&2; exit 1; }
	@$(BIN)/mypy

format: $(STAMP) ## Format, and fix what the linter can
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format

test: lint jars broker-jars servers ## The test suite: lint, types, tests that are not slow (ARGS="-k name" chooses; WORKERS=0: one process)
	@TEST_PROFILE=quick $(PYTEST) -m "not slow and not soak" $(ARGS)

test-all: test-slow test-system ## The slow tests too

test-slow: lint jars broker-jars servers ## All tests but those that start the whole system
	@$(PYTEST) -m "not soak and not system" $(ARGS)

test-system: lint jars broker-jars servers ## The tests that start the whole system, alone: each needs the machine for itself
	@$(BIN)/python -m pytest -q -m system $(ARGS)

nightly: test-all mutants ## All tests and mutants, but no soak

soak: jars broker-jars servers ## Minutes of load, kills and random cases
	@TEST_PROFILE=soak $(BIN)/python -m pytest -q -m "soak or slow" $(ARGS)

mutants: $(STAMP) ## Put single faults into a copy of the code, each of which its test has to find (ARGS="-k name")
	@$(BIN)/python -m pytest -q tests/mutants -m soak $(ARGS)

bench: jars broker-jars servers ## Measure against baselines of the same run (docs/performance.md)
	@$(BIN)/python -m bench $(ARGS)

# --- keep ------------------------------------------------------------------------------------------------------

.PHONY: lock docs wheel sbom chart clean clean-data
lock: $(STAMP) ## Make requirements.txt anew from requirements.in
	@tools/lock.sh "$(BIN)"

docs: $(STAMP) ## Make the pages into a site in build/site, where no link leads nowhere
	@$(BIN)/python -m tests.docs.api >/dev/null
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

wheel: $(STAMP) ## Build dist/millrace-*.whl, with its extras (docs/clients.md)
	@rm -rf build/lib build/bdist.* && $(BIN)/uv build -q --wheel --out-dir dist

chart: ## Lint the pipelines' Helm chart, render it, check it against Kubernetes' schemas (helm is built from Go; ARGS=--check changes nothing)
	tools/pipelines/chart.sh $(ARGS)

sbom: $(STAMP) ## Write dist/sbom.cdx.json (CycloneDX) and dist/licences.md: what is installed, from the locks
	@$(BIN)/python tools/sbom.py dist

clean: ## Remove the virtual environment and every cache in the checkout (not the data)
	@rm -rf "$(VENV)" .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist include/*.egg-info
	@find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

clean-data: ## Remove the data folder: log, tables, Airflow's state (asks; YES=1 does not); stops the system first
	@if [ ! -e "$(DATA)" ]; then echo "Nothing at $(DATA)."; \
	elif ! "$$(command -v $(BIN)/python || command -v python3)" -m millrace.base.data_folder "$(DATA)"; then exit 1; \
	else if [ "$${YES:-}" != 1 ]; then read -r -p "Remove $(DATA)? [y/N] " answer; [ "$$answer" = y ] || exit 1; fi; \
	if [ -d "$(DATA)/airflow" ] && [ -x "$(BIN)/python" ]; then $(BIN)/python -m millrace system down; fi; rm -rf "$(DATA)"; fi
