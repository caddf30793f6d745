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
CLUSTER ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATA := $(or $(MILLRACE_DATA),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/millrace)
export PYTHONPATH := $(CURDIR)/include
# Allow bytecode (empty means allowed). Without it, each of the hundreds of processes that tests and systems start would
# compile its imports again, which is half of its start: 2 s for Airflow's SDK.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- install ---------------------------------------------------------------------------------------------------

.PHONY: venv
venv: $(STAMP) ## Create the virtual environment from the lock, unless it is up to date

$(STAMP): requirements.txt tools/uv.txt tools/make_venv.sh
	@tools/make_venv.sh "$(VENV)" "$(PYTHON)"
	@touch $@

.PHONY: java
java: $(STAMP) ## Find Java 17 or 21, or install it if this user may
	@$(BIN)/python -m millrace.runtime.java >/dev/null

.PHONY: jars
jars: java ## Fetch Delta's jars into the cache, once
	@$(BIN)/python -m millrace.runtime.spark.jars >/dev/null

.PHONY: broker-jars
broker-jars: java ## Fetch the jars of the brokers that tests start, and of the capture engine, into the cache, once
	@$(BIN)/python -m millrace.brokers.jars kafka pulsar opensearch
	@$(BIN)/python -m millrace.flows.sources.capture.engine >/dev/null

.PHONY: servers
servers: $(STAMP) ## Find etcd, MariaDB and PostgreSQL, which tests and demos start, or install them if this user may
	@$(BIN)/python -m millrace.brokers.programs etcd mariadb postgres

# --- use -------------------------------------------------------------------------------------------------------

.PHONY: up down status demo run
up: jars ## Start the whole system: Airflow, the log, the streaming jobs (ARGS="--detach", "--port N"); Ctrl-C stops it
	@$(BIN)/python -m millrace system up $(ARGS)

down: $(STAMP) ## Stop the whole system
	@$(BIN)/python -m millrace system down $(ARGS)

status: $(STAMP) ## Show the state of the system: components, rows/s, lag, memory
	@$(BIN)/python -m millrace system status $(ARGS)

demo: jars ## Send a year of flights through the system (started if necessary), and print where to look
	@$(BIN)/python -m millrace.demo.running $(ARGS)

run: jars ## Run the demo without Airflow: a year of flights through the whole flow (LOG=kafka|pulsar; NODES=3 META=etcd|mariadb; STORE=s3; CLUSTER=2; PIPELINE=1; STREAMS=1; CDC=1; ARGS="--fresh", "--help")
	@$(BIN)/python -m millrace.demo $(if $(LOG),--log $(LOG)) $(if $(NODES),--nodes $(NODES)) $(if $(META),--meta $(META)) $(if $(STORE),--store $(STORE)) $(if $(CLUSTER),--cluster $(CLUSTER)) $(if $(PIPELINE),--pipeline) $(if $(STREAMS),--streams) $(if $(CDC),--capture) $(ARGS)

# --- check -----------------------------------------------------------------------------------------------------

.PHONY: lint format test coverage test-all test-slow test-system nightly soak mutants bench
lint: $(STAMP) ## Lint; check the format, the imports between rooms, and the types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "Not formatted as ruff would: run 'make format'." >&2; exit 1; }
	@said=$$($(BIN)/lint-imports --no-cache) || { sed -n '/^Broken contracts/,$$p' <<<"$$said" >&2; exit 1; }
	@$(BIN)/mypy

format: $(STAMP) ## Format, and fix what the linter can
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format

test: lint jars broker-jars servers ## Run lint, types and all tests that are not slow (ARGS="-k name" selects; WORKERS=0: one process)
	@TEST_PROFILE=quick $(PYTEST) -m "not slow and not soak" $(ARGS)

coverage: jars broker-jars servers ## Run the tests of `make test`, and report which lines they run (build/coverage.xml; COVERED=folder)
	@mkdir -p build && rm -f build/coverage.xml && TEST_PROFILE=quick $(PYTEST) -m "not slow and not soak" --cov$(if $(COVERED),=$(COVERED)) --cov-report=term --cov-report=xml:build/coverage.xml $(ARGS)

test-all: test-slow test-system ## Run the slow tests too

test-slow: lint jars broker-jars servers ## Run all tests except those that start the whole system
	@$(PYTEST) -m "not soak and not system" $(ARGS)

test-system: lint jars broker-jars servers ## Run the tests that start the whole system; each needs the machine to itself
	@$(BIN)/python -m pytest -q -m system $(ARGS)

nightly: test-all mutants ## Run all tests and mutants, without the soak

soak: jars broker-jars servers ## Run minutes of load, kills and random cases
	@TEST_PROFILE=soak $(BIN)/python -m pytest -q -m "soak or slow" $(ARGS)

mutants: $(STAMP) ## Put single faults into a copy of the code, each of which a test must find (ARGS="-k name")
	@$(BIN)/python -m pytest -q tests/mutants -m soak $(ARGS)

bench: jars broker-jars servers ## Measure against baselines of the same run (docs/performance.md)
	@$(BIN)/python -m bench $(ARGS)

# --- keep ------------------------------------------------------------------------------------------------------

.PHONY: lock docs wheel environment sbom chart clean clean-data
lock: $(STAMP) ## Resolve requirements.in into requirements.txt
	@tools/lock.sh "$(BIN)"

docs: $(STAMP) ## Build the site in build/site; fails on a broken link
	@$(BIN)/python -m tests.docs.api >/dev/null
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

wheel: $(STAMP) ## Build dist/millrace-*.whl, with its extras (docs/clients.md)
	@rm -rf build/lib build/bdist.* && $(BIN)/uv build -q --wheel --out-dir dist

chart: ## Lint, render and validate the pipelines' Helm chart (builds helm from Go; ARGS=--check changes nothing)
	tools/shipping/chart.sh $(ARGS)

environment: $(STAMP) ## Pack Python, libraries and this code for Spark's executors: dist/environment.tar.gz (docs/spark-cluster.md)
	@tools/pack_environment.sh "$(BIN)" dist/environment.tar.gz

sbom: $(STAMP) ## Write dist/sbom.cdx.json (CycloneDX) and dist/licences.md from the locks
	@$(BIN)/python tools/sbom.py dist

clean: ## Remove the virtual environment and every cache in the checkout (not the data)
	@rm -rf "$(VENV)" .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist include/*.egg-info
	@find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

clean-data: ## Remove the data folder: log, tables, Airflow's state (asks, unless YES=1); stops the system first
	@if [ ! -e "$(DATA)" ]; then echo "Nothing at $(DATA)."; \
	elif ! "$$(command -v $(BIN)/python || command -v python3)" -m millrace.base.data_folder "$(DATA)"; then exit 1; \
	else if [ "$${YES:-}" != 1 ]; then read -r -p "Remove $(DATA)? [y/N] " answer; [ "$$answer" = y ] || exit 1; fi; \
	if [ -d "$(DATA)/airflow" ] && [ -x "$(BIN)/python" ]; then $(BIN)/python -m millrace system down; fi; rm -rf "$(DATA)"; fi
