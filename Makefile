# Every target is safe to repeat. Variables: PYTHON, VENV, ARGS, WORKERS, and on Linux
# TORCH_INDEX=https://download.pytorch.org/whl/cpu spares the CUDA libraries that PyPI's torch
# brings along.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos
PROTOS := $(wildcard protos/ds4grpc/v1/*.proto)
PYTEST := $(BIN)/python -m pytest
# Several processes, whole files to each; tests marked `alone` wait for the others. One more than
# there are CPUs, as tests also wait; four at most, as each may run two servers.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup serve check lint types check-protos spell fmt test test-fast test-long test-gpu \
	fuzz mutants protos migration bench bench-store dist clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --index-url $(TORCH_INDEX) "$$(grep -o 'torch==[0-9.]*' pyproject.toml)")
	$(PIP) install -e '.[dev]'
	touch $@

serve: setup
	$(BIN)/ds4grpc serve $(ARGS)

check: lint types check-protos spell

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check-protos: setup
	$(BIN)/buf lint protos
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && $(PROTOC) --python_out=$$tmp --pyi_out=$$tmp \
		--grpc_python_out=$$tmp $(PROTOS) && diff -r -x __pycache__ $$tmp/ds4grpc/v1 ds4grpc/v1

spell: setup
	$(BIN)/codespell

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

test: setup
	$(PYTEST) $(PARALLEL) $(ARGS)

test-fast: setup
	$(PYTEST) $(PARALLEL) -m 'not system and not slow and not gpu' $(ARGS)

test-long: setup
	DS4GRPC_LONG=1 $(PYTEST) $(PARALLEL) --timeout 3600 $(ARGS)

test-gpu: setup
	$(PYTEST) -m gpu $(ARGS)

fuzz: setup
	$(BIN)/python tests/fuzz_reader.py $(ARGS)

mutants: setup
	$(BIN)/python tests/mutants.py $(ARGS)

protos: setup
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

migration: setup
	$(BIN)/alembic revision -m '$(or $(name),$(error usage: make migration name="add a column"))'

bench: setup
	$(BIN)/python benchmarks/turns.py $(ARGS)

bench-store: setup
	$(BIN)/python benchmarks/$(or $(NAME),$(error usage: make bench-store NAME=scale)).py $(ARGS)

dist: setup
	$(BIN)/python -m build

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
