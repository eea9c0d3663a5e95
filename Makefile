# `make help` lists the verbs. Every verb makes the environment first (.venv, once; see scripts/setup_env.py).
#   PYTHON=python3.12   the interpreter for the environment (3.10 to 3.13)
#   TORCH=cpu           refuse any torch but the CPU build
#   PYTEST_ARGS="..."   more arguments for pytest: files, -k, -x
#   PROCESSES=2         how many processes share the tests, a file each at a time; 0: none beside pytest itself
#   SCHEDULES=100000    how many random schedules of engine and connector; SEED=1: from which seed on (random, and printed, if not given)
#   DEMO_ARGS=--no-keep arguments for the demo: this one ends it after the tables, as without a terminal; --observability: with Prometheus
#   MINUTES=30 SEED=7   for soak
#   ROUNDS=5 HOGS=4     for stress; STRESS_ARGS="-- tests/graphs -k kills" picks other tests
#   BENCH_ARGS="..."    arguments for bench: --quick, --sections scenarios, --trace FILE
#   PACKAGES_ARGS=--torch  install the extras that bring torch as well
#   OBSERVE_ARGS="..."  arguments for observe: --model tiny, --routers 2

PYTHON ?= python3
PYTEST_ARGS ?=
PROCESSES ?= 2
DEMO_ARGS ?=
SCHEDULES ?= 20000
MINUTES ?= 30
ROUNDS ?= 5
HOGS ?= 4
STRESS_ARGS ?=
BENCH_ARGS ?=
SEED ?=
OBSERVE_ARGS ?=
PACKAGES_ARGS ?=
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test schedules bench soak stress demo observe docs packages audit lint format typecheck clean

help: ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## make the environment, or do nothing if it is current
	@$(PYTHON) scripts/setup_env.py

test: lint typecheck ## lint, formatting, types, import rules and all tests
	$(VENV_PYTHON) -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

schedules: setup ## a long run of random schedules of engine and connector; a failing one is shortened and printed
	$(VENV_PYTHON) -m tests.worker_connector.schedules run --number $(SCHEDULES) $(if $(SEED),--seed $(SEED))

demo: setup ## the whole graph on this machine, a workload, two tables
	$(VENV_PYTHON) -m graphs.local demo $(DEMO_ARGS)

observe: setup ## the graph with Prometheus (apt install prometheus) and, where it is installed, Grafana, until Ctrl-C
	$(VENV_PYTHON) -m graphs.local up --observability $(OBSERVE_ARGS)

bench: setup ## the report: every goal, side by side with Dynamo's own routers, into docs/benchmarks.md (35 minutes on a quiet machine)
	$(VENV_PYTHON) -m dynamo_semkv bench report $(BENCH_ARGS)

soak: setup ## a graph under random kills for MINUTES (default 30); SEED=n repeats a run
	$(VENV_PYTHON) -m tests.graphs.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

stress: setup ## the graph and router tests ROUNDS times (default 5) beside HOGS busy processes (default 4); prints each failure
	$(VENV_PYTHON) -m tests.stress --rounds $(ROUNDS) --hogs $(HOGS) --processes $(PROCESSES) $(STRESS_ARGS)

docs: setup ## write the generated pages and files anew: docs/reference, docs/metrics.md, the JSON schema, the PrometheusRule
	$(VENV_PYTHON) scripts/reference.py
	$(VENV_PYTHON) -m dynamo_semkv.observe.reference > docs/metrics.md
	$(VENV_PYTHON) -m dynamo_semkv check-config --schema > configs/semkv.schema.json
	$(VENV_PYTHON) scripts/prometheus_rule.py > graphs/kubernetes/monitoring/prometheusrule.yaml

packages: setup ## wheel and sdist into clean environments, one for each extra; needs a package index
	$(VENV_PYTHON) scripts/check_packages.py $(PACKAGES_ARGS)

audit: setup ## known vulnerabilities of the locked versions (pip-audit), and the licences of what a deployment installs
	$(VENV_PYTHON) scripts/licences.py
	scripts/audit.sh

lint: setup ## ruff: rules and formatting
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check

format: setup ## ruff: rewrite to the format, fix what can be fixed safely
	$(VENV_PYTHON) -m ruff format
	$(VENV_PYTHON) -m ruff check --fix

typecheck: setup ## mypy, strict
	$(VENV_PYTHON) -m mypy

clean: ## remove what builds, tests and runs leave (the environment too)
	rm -rf .venv .venv.lock build dist .run .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
