PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The oldest and the newest Python that torch_xla 2.9.0 has wheels for; python3.10 has to be on the path.
PYTHONS ?= 3.10 3.13
BIN := .venv/bin
# What the demo is run with, e.g. make demo DEMO_ARGS="--size tiny"
DEMO_ARGS ?=
SOAK_MINUTES ?= 30

# The newest of these that runs, on the path or one of pyenv's, whose names on the path may not run.
NEWEST_PYTHONS := python3.14 python3.13 python3.12 python3.11
NEWEST ?= $(shell for python in $(NEWEST_PYTHONS); do \
	for there in $$python $$HOME/.pyenv/versions/*/bin/$$python; do \
	$$there -c '' 2>/dev/null && echo $$there && exit; done; done)
NEWEST_BIN := .venv-newest/bin

.PHONY: help install demo test test-all test-local-rank test-stacks test-suites test-processors test-pythons test-first-hour first-hour-jax first-hour-xla first-hour-notebooks newest-python test-newest lint bench calibration soak soak-hosts docs goldens notebooks clean bench-gpu
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a GPT on 8 virtual devices, under 5 minutes (DEMO_ARGS=\"--size tiny\": about 1)"
	@echo "make install    make .venv with all that the tests need, and run nothing"
	@echo "make test    lint, types, tests"
	@echo "make test-all    those, and what takes long: all models, configs and topologies, some hours"
	@echo "make test-local-rank    the tests of clients as under a launcher that sets LOCAL_RANK"
	@echo "make test-stacks    fine-tuning programs of others (TRL, ...), each in an environment of its own, beside plain torch"
	@echo "make test-suites    own tests of accelerate, Lightning, Fabric, transformers, TRL and DeepSpeed with spmdzero in DeepSpeed's place (SUITES=fabric)"
	@echo "make test-processors    the tests of make test as on processors with other instructions, twice as long"
	@echo "make test-first-hour    fresh environments (JAX, torch_xla, notebooks): what README and the first pages have a reader run"
	@echo "make test-pythons    the same of the README with torch_xla on 3.10 and 3.13"
	@echo "make test-newest    tests of JAX's backend with the newest Python, torch and JAX that are to be had"
	@echo "make lint    ruff and pyrefly"
	@echo "make goldens     compile the recorded models for TPUs again, write their ledgers anew"
	@echo "make calibration    fit what corrects estimated times to steps that others measured"
	@echo "make notebooks   run the notebooks, write their outputs anew"
	@echo "make docs    the documentation's site, in out/site"
	@echo "make bench   measure spmdzero beside its peers, write docs/benchmarks.md: an hour, 2 quiet cores, and once a night for TPUs"
	@echo "make bench-gpu    on one GPU: tests, operations beside torch's, a step beside real DeepSpeed's"
	@echo "make soak    30 minutes of saving, kills and resuming on other device counts (SOAK_MINUTES=5)"
	@echo "make soak-hosts    the same on changing numbers of hosts, one of which is killed or freezes"
	@echo "make clean   remove the virtual environment and everything generated"

install: .venv/installed

demo: .venv-demo/installed
	.venv-demo/bin/python examples/train_gpt.py $(DEMO_ARGS)

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What the README says, and a part of what each layer does.
FRESH_TESTS := tests/docs/test_commands.py tests/docs/test_docs.py tests/unit/test_config.py \
	tests/unit/test_show.py tests/unit/test_region_gradients.py \
	tests/engine/test_engine.py tests/checkpoint/test_resume.py

# One worker more than the smallest machine has cores: many tests wait for processes of their own. A
# file's tests share what it compiles. Files are taken in their order, which ends with the short
# ones of tests/unit: by the number of tests, as they would be, files of few long tests come last.
# Where a worker dies, the run ends and names its test: with another worker in its place, xdist 3.8
# waits without end for the rest of its file.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Runs on both backends, whichever fails: $(call BOTH,options). Each file says which run it, at its top.
BOTH = failed=0; set -x; SPMDZERO_BACKEND=torch_xla $(PYTEST) $(1) || failed=1; \
	SPMDZERO_BACKEND=jax $(PYTEST) $(1) || failed=1; exit $$failed

test: lint
	@$(call BOTH,--suite=test -m "not slow")

test-all: lint test-local-rank
	@$(call BOTH,--suite=test-all)

# What a launcher tells clients, by which they call their device cpu:0.
test-local-rank: .venv/installed
	TEST_LOCAL_RANK=0 SPMDZERO_BACKEND=torch_xla $(PYTEST) tests/integrations -m "not slow"
	TEST_LOCAL_RANK=0 SPMDZERO_BACKEND=jax $(PYTEST) tests/integrations \
	tests/jax_backend/test_clients.py -m "not slow"

# Programs of others, with the packages that tests/stacks/NAME.txt pins, by JAX. Scripts that no
# package brings are fetched into .suites, as those of test-suites.
STACKS := trl swift llamafactory axolotl sentence_transformers open_clip timm diffusers peft examples deepspeed_examples vision_language lightning
STACK_BIN = .venv-stack-$*/bin

test-stacks: $(STACKS:%=test-stack-%)

test-stack-%: .venv-stack-%/installed
	SPMDZERO_STACK=$* $(STACK_BIN)/pytest tests/stacks/test_$*.py

# axolotl 0.20 and later are for Python 3.12 and later. A name on the path may be one of pyenv's, and
# not run.
.venv-stack-axolotl/installed: PYTHON = $(shell for there in python3.12 \
	$$HOME/.pyenv/versions/*/bin/python3.12; do $$there -c '' 2>/dev/null && echo $$there && exit; done; echo python3.12)

.PRECIOUS: .venv-stack-%/installed
.venv-stack-%/installed: tests/stacks/%.txt pyproject.toml
	@test -x $(STACK_BIN)/python || $(PYTHON) -m venv .venv-stack-$*
	@echo "Installing spmdzero, JAX and $* into .venv-stack-$*: 3 GB, some minutes, once"
	@$(PIP_INSTALL:$(BIN)%=$(STACK_BIN)%) $$(grep '^torch' $< || echo torch) $(TORCH_CPU) 2>/dev/null || \
		echo "torch's own index isn't reached: its wheel comes from PyPI"
	@$(PIP_INSTALL:$(BIN)%=$(STACK_BIN)%) -e '.[jax]' pytest -r $<
	@touch $@

# Clients' own tests of DeepSpeed, and a selection of DeepSpeed's, fetched into .suites from GitHub, or from clones by
# SUITES_FROM='/folder/{repository}'. It fails where a verdict of tests/suites/verdicts has changed.
SUITES ?=

test-suites: .venv/installed
	$(BIN)/python -m tests.suites $(SUITES)

# What else a processor may have: the instructions of JAX's XLA, then of torch's kernels, oneDNN's and
# MKL's. torch_xla's has those of tests/support/backends.py on each. Without F16C, which comes with
# AVX, XLA compiles no fp16.
PROCESSORS := AVX2-default-SSE41-COMPATIBLE AVX512-avx2-AVX2-AVX2

test-processors: $(PROCESSORS:%=test-processor-%)

test-processor-%: .venv/installed
	@set -- $(subst -, ,$*); export TEST_XLA_ISA=$$1 ATEN_CPU_CAPABILITY=$$2 \
	ONEDNN_MAX_CPU_ISA=$$3 MKL_CBWR=$$4; $(call BOTH,--suite=test -m "not slow")

# $(call FRESH,name,python,torch): an environment .venv-name with torch and $(WITH), made anew as
# README says. torch's own index has it without gigabytes of CUDA, where that is reached.
TORCH_CPU := --index-url https://download.pytorch.org/whl/cpu
PIP_OF = $(PIP_INSTALL:$(BIN)%=.venv-$(1)/bin%)
FRESH = rm -rf .venv-$(1) build && $(2) -m venv .venv-$(1) && \
	echo "$(1): $$(.venv-$(1)/bin/python --version), pip install $(3)" $(WITH) && \
	{ $(PIP_OF) '$(3)' $(TORCH_CPU) 2>/dev/null || echo "torch's own index isn't reached: its wheel comes from PyPI"; } && \
	$(PIP_OF) '$(3)' $(WITH) && .venv-$(1)/bin/spmdzero --version
# What is tested is the installed copy.
INSTALLED_PYTEST = .venv-$(1)/bin/pytest --import-mode=append

# Not part of `make test`: torch is a download of minutes for each environment.
test-first-hour: first-hour-jax first-hour-xla first-hour-notebooks

# Each command and each example of these pages in their order; several hosts on a CPU need JAX.
FIRST_HOUR := tests/docs/test_commands.py tests/docs/test_docs.py \
	-k "README or quickstart or huggingface

first-hour-jax: WITH = '.[jax,examples]' 'jax[tpu]' pytest
first-hour-jax: newest-python
	@$(call FRESH,$@,$(NEWEST),torch)
	$(call INSTALLED_PYTEST,$@) $(FIRST_HOUR) or hosts"

first-hour-xla: WITH = '.[xla,examples]' pytest
first-hour-xla:
	@$(call FRESH,$@,python3.11,torch==2.9.0)
	SPMDZERO_BACKEND=torch_xla $(call INSTALLED_PYTEST,$@) $(FIRST_HOUR)"

# What newer compilers print in them may differ.
first-hour-notebooks: WITH = '.[jax,notebooks]'
first-hour-notebooks: newest-python
	@$(call FRESH,$@,$(NEWEST),torch)
	@mkdir -p out/$@
	for notebook in 01_zero_is_a_table 05_the_same_in_jax; do .venv-$@/bin/python \
		-m tests.notebooks.execute notebooks/$$notebook.ipynb out/$@/$$notebook.ipynb || exit 1; done

# The other Pythons that torch_xla has: README's commands, and a part of what each layer does.
test-pythons: $(PYTHONS:%=test-python-%)

test-python-%: WITH = '.[xla]' pytest
test-python-%:
	@$(call FRESH,$*,python$*,torch==2.9.0)
	$(call INSTALLED_PYTEST,$*) -k "README or not docs" $(FRESH_TESTS)

newest-python:
	@test -n "$(NEWEST)" || \
		{ echo "no $(NEWEST_PYTHONS) here: name one, make NEWEST=/path/of/python ..."; exit 1; }

NEWEST_PYTEST := $(NEWEST_BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"
# They have their own newest torch, and notebooks what newer compilers print otherwise.
OF_CLIENTS := /integrations /notebooks /test_region_outputs.py /test_region_transformers.py

# Installs anew each time: what is newest changes, pyproject.toml doesn't.
test-newest: newest-python
	@test -x $(NEWEST_BIN)/python || $(NEWEST) -m venv .venv-newest
	@echo "Installing spmdzero with the newest torch and JAX into .venv-newest: 6 GB, 10 minutes, the first time"
	@$(PIP_INSTALL:$(BIN)%=$(NEWEST_BIN)%) --upgrade -e '.[jax]' torch 'jax[tpu]' transformers accelerate pytest pytest-xdist hypothesis expecttest
	@$(NEWEST_BIN)/python -c 'import sys, torch, jax; print("Python", sys.version.split()[0], "torch", torch.__version__, "jax", jax.__version__)'
	failed=0; SPMDZERO_BACKEND=jax $(NEWEST_PYTEST) --suite=test $(OF_CLIENTS:%=--ignore-glob='*%') || failed=1; \
	SPMDZERO_BACKEND=jax $(NEWEST_PYTEST) tests/audit tests/checkpoint tests/hosts || failed=1; exit $$failed

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

bench: .venv/installed
	$(BIN)/python tests/benchmarks/run.py

# One GPU of NVIDIA's. What of the suite needs one device alone runs on it, then the benchmark.
bench-gpu:
	@test -x .venv-gpu/bin/python || $(PYTHON) -m venv .venv-gpu
	@$(PIP_INSTALL:$(BIN)%=.venv-gpu/bin%) -e '.[jax,bench]' 'jax[cuda13]' ninja psutil pytest expecttest
	JAX_PLATFORMS=cuda,cpu SPMDZERO_BACKEND=jax .venv-gpu/bin/pytest tests/jax_backend/test_on_gpu.py
	SPMDZERO_BACKEND=jax .venv-gpu/bin/pytest tests/jax_backend/test_ops.py -m "not slow"
	.venv-gpu/bin/python tests/benchmarks/gpu.py

goldens: .venv/installed
	SPMDZERO_BACKEND=torch_xla $(BIN)/python -m tests.explain.golden

# Fits what corrects estimated times to the steps of tests/data/measured_steps.json.
calibration: .venv/installed
	$(BIN)/python -m tests.explain.calibrating

soak: .venv/installed
	$(BIN)/python -m tests.checkpoint.test_soak --minutes $(SOAK_MINUTES)

soak-hosts: .venv/installed
	$(BIN)/python -m tests.hosts.test_soak --minutes $(SOAK_MINUTES)

notebooks: .venv/installed
	SPMDZERO_BACKEND=jax $(BIN)/python -m tests.notebooks.execute
	$(BIN)/python -m tests.notebooks.picture

docs: .venv/installed
	$(BIN)/sphinx-build -q -W --keep-going -c docs . out/site
	@echo "wrote out/site/index.html"

clean:
	rm -rf .venv .venv-* build out .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With today's torch, JAX and Python. torch's own index has it without gigabytes of CUDA, where that
# is reached.
.venv-demo/installed: pyproject.toml
	@test -n "$(NEWEST)" || { echo "no $(NEWEST_PYTHONS) here: make demo NEWEST=/path/of/python"; exit 1; }
	@test -x .venv-demo/bin/python || $(NEWEST) -m venv .venv-demo
	@echo "Installing spmdzero, torch, JAX and what the demo draws with into .venv-demo: 2 to 10 minutes, once"
	@$(PIP_INSTALL:$(BIN)%=.venv-demo/bin%) torch $(TORCH_CPU) 2>/dev/null || \
		echo "torch's own index isn't reached: its wheel comes from PyPI, with CUDA, 7 GB on disk"
	@$(PIP_INSTALL:$(BIN)%=.venv-demo/bin%) -e '.[jax,examples]'
	@touch $@

.venv/installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing spmdzero, both backends and the tools of tests, docs and notebooks into .venv"
	@echo "torch is most of it: 3 to 10 minutes by the connection, 7 GB on disk, once"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@
