# Everloop: `make help` says what can be done here.
# Nothing has to be installed first: `python3 -m bootstrap` brings what a target needs into EVERLOOP_CACHE.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
export EVERLOOP_CACHE ?= /var/cache/everloop
export PYTHONDONTWRITEBYTECODE := 1

BUILDER ?= docker
REGISTRY ?= registry.example.com
TAG ?= 0.1.0

bootstrap := $(PYTHON) -m bootstrap
in_tests := $(bootstrap) exec tests
in_devcluster := $(bootstrap) exec devcluster

.PHONY: help
help: ## show this list
	@echo "Everloop runs LLM post-training on Kubernetes so that the training loop survives the machines under it."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  KEEP=1         leave the demo's cluster running and print what to try next"
	@echo "  TESTS=...      what 'make test' runs: a path or pytest's options (default: everything)"
	@echo "  EVERLOOP_CACHE where environments, binaries, images and weights are kept ($(EVERLOOP_CACHE))"
	@echo
	@echo "Needs Linux, Python >= 3.11, make; demo and test also root, Go >= 1.26 and a C compiler."

.PHONY: demo
demo: ## train on a local cluster while engine and node are killed; compare with an unbroken run
	@$(bootstrap) ensure demo
	@$(in_devcluster) python -m demo $(if $(KEEP),--keep)

.PHONY: demo-down
demo-down: ## take down the cluster that `make demo KEEP=1` left (ROOT=...)
	@test -n "$(ROOT)" || { echo "make demo-down ROOT=...: the directory that the demo printed" >&2; exit 2; }
	@test -f "$(ROOT)/cluster.json" || { echo "$(ROOT): there is no local cluster" >&2; exit 2; }
	@$(in_devcluster) python -m devcluster down --root "$(ROOT)"
	@rm -rf -- "$(ROOT)"

.PHONY: test
test: ## linters, types and all tests
	@$(bootstrap) ensure test
	@$(MAKE) lint
	@$(in_tests) pytest -v -p no:cacheprovider -n 3 --dist loadscope --no-loadscope-reorder --durations=15 $(TESTS)

.PHONY: soak
soak: ## kill at random N times (default 20) under one loop, then take all nodes for 12 minutes; SEED=..., RESUME=DIR
	@$(bootstrap) ensure test
	@$(in_tests) python -m tests.soak $(if $(RESUME),--resume "$(RESUME)",--kills $(or $(N),20) $(if $(SEED),--seed $(SEED)))
	@$(in_tests) python -m tests.soak.outage $(if $(SEED),--seed $(SEED))

.PHONY: bench
bench: ## measure cost and recovery; a table, build/bench.json, build/bench.png; ONLY=loop: that one
	@$(bootstrap) ensure test
	@$(in_tests) python -m tests.bench $(if $(ONLY),--only $(ONLY))

.PHONY: acceptance
acceptance: ## kill every victim in every moment, and outlast 12 minutes without a node; SEED=..., VICTIMS=..., MOMENTS=...
	@$(bootstrap) ensure test
	@$(in_tests) python -m tests.acceptance $(if $(SEED),--seed $(SEED)) $(if $(VICTIMS),--victims $(VICTIMS)) $(if $(MOMENTS),--moments $(MOMENTS))

.PHONY: conformance
conformance: ## call everything that two versions of the SDK offer, and write docs/conformance.md
	@$(bootstrap) ensure test
	@$(in_tests) python -m tests.conformance

.PHONY: lint
lint: ## formatting, linting, types, import rules
	@$(in_tests) ruff format --check
	@$(in_tests) ruff check
	@$(in_tests) mypy
	@$(in_tests) lint-imports

.PHONY: format
format: ## let ruff format and fix what it can
	@$(in_tests) ruff format
	@$(in_tests) ruff check --fix

.PHONY: crds
crds: ## regenerate the CRD files and the chart's copy from the pydantic models
	@$(in_tests) python -m everloop_operator.api.crd
	@install -D -m 0644 -t helm/everloop/crds-src crds/*.yaml

.PHONY: dashboards
dashboards: ## regenerate the chart's dashboard and alerts from monitoring/
	@$(in_tests) python -m monitoring

.PHONY: verify
verify: crds dashboards ## regenerate, and fail if that changed a file
	@git diff --exit-code -- crds helm

.PHONY: images
images: ## build both container images; REGISTRY=..., TAG=..., BUILDER=docker|buildah
	@$(BUILDER) build -t "$(REGISTRY)/everloop-operator:$(TAG)" -f Dockerfile .
	@$(BUILDER) build -t "$(REGISTRY)/everloop-trainer:$(TAG)" -f trainer_image/Dockerfile .

.PHONY: status
status: ## show what EVERLOOP_CACHE holds, and how large it is
	@$(bootstrap) status

.PHONY: prune
prune: ## remove from EVERLOOP_CACHE what these sources no longer use, and nobody runs
	@$(bootstrap) prune

.PHONY: clean
clean: ## remove what tools left in the checkout
	@rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-cache
clean-cache: ## remove EVERLOOP_CACHE: the next demo or test starts as on a new machine
	@$(bootstrap) clean
