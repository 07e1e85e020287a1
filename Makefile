PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# What the demo is run with, e.g. make demo DEMO_ARGS="--size tiny"
DEMO_ARGS ?=
SOAK_MINUTES ?= 30

.PHONY: help demo test test-all lint bench soak docs goldens notebooks clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a GPT on 8 virtual devices, under 5 minutes (DEMO_ARGS=\"--size tiny\": about 1)"
	@echo "make test    lint, types, tests"
	@echo "make test-all    those, and the combinations of models, configs and topologies that it leaves out"
	@echo "make lint    ruff and pyrefly"
	@echo "make goldens     compile the recorded models for TPUs again, write their ledgers anew"
	@echo "make notebooks   run the notebooks, write their outputs anew"
	@echo "make docs    the documentation's site, in out/site"
	@echo "make bench   measure spmdzero beside its peers, write docs/benchmarks.md: an hour, 2 quiet cores"
	@echo "make soak    30 minutes of saving, kills and resuming on other device counts (SOAK_MINUTES=5)"
	@echo "make clean   remove the virtual environment and everything generated"

demo: .venv/installed
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

# A worker for each core of the smallest machine; a file's tests share what it compiles.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

test: lint
	$(PYTEST) -m "not exhaustive"

test-all: lint
	$(PYTEST)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

bench: .venv/installed
	$(BIN)/python tests/benchmarks/run.py

goldens: .venv/installed
	$(BIN)/python -m tests.explain.golden

soak: .venv/installed
	$(BIN)/python -m tests.checkpoint.soak --minutes $(SOAK_MINUTES)

notebooks: .venv/installed
	$(BIN)/python -m tests.notebooks.execute

docs: .venv/installed
	$(BIN)/sphinx-build -q -W --keep-going -c docs . out/site
	@echo "wrote out/site/index.html"

clean:
	rm -rf .venv build out .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing spmdzero and its tools into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
