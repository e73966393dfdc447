# `make demo` and `make test` set everything up by themselves; a second call starts at once.
# Variables: PYTHON (which interpreter makes .venv), TORCH_INDEX (an index with CPU builds of torch), LOCKED (1: files by their
# hashes), AUDIT (--required: fail where `make audit` cannot ask), RANKS, CONFIG.

BIN := .venv/bin
STAMP := .venv/.installed
# what the demos need: no tools of development
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),.venv/.installed_demo)
RANKS ?= 4
PROCESSES ?= 3
CONFIG ?= configs/grpo_arithmetic.yaml
REPORT ?= runs/faults.jsonl
# three processes on two cores, for a world often waits; a file's tests share the worlds that it launches
# ... on the CPU, also where the machine has a GPU; compiled modules are kept, for some hundred processes import them
PYTEST = CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
SHELL_SCRIPTS := .ci/run $(wildcard tools/*.sh slurm/*.sbatch slurm/*.sh slurm/*.conf)

.PHONY: help install install-chromium install-slurm demo demo-hf test test-slow test-all test-triton test-slurm test-vllm soak lint types format docs docs-site bench gpu-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## make or update .venv

$(STAMP): pyproject.toml constraints.txt .ci/requirements.txt tools/install.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" LOCKED="$(LOCKED)" tools/install.sh
	@touch $@

.venv/.installed_demo: pyproject.toml constraints.txt tools/install.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" LOCKED="$(LOCKED)" EXTRAS=megatron,hf,report tools/install.sh
	@touch $@

demo: $(DEMO)  ## GRPO learns arithmetic on RANKS=4 CPU ranks (TP 2 x CP 2, sequence parallel, packed)
	@echo "$(RANKS) processes import torch and Megatron; the first line comes after about 30 seconds"
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m parallel_rl.cli train $(CONFIG) --run.resume never

demo-hf: $(DEMO)  ## SFT and GRPO on word problems from a tiny random Qwen3 folder, and a folder back, on two CPU ranks (TP 2)
	$(BIN)/python examples/word_problems/make.py runs/word_problems
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m parallel_rl.cli train examples/word_problems/grpo.yaml --run.resume never
	rm -rf runs/word_problems/trained
	CUDA_VISIBLE_DEVICES= $(BIN)/parallel-rl export $$(ls -d runs/word_problems/grpo/checkpoints/step_* | tail -1) runs/word_problems/trained

# where nothing is compiled: Megatron's import prepares the compiler, two seconds of each process
test: export TORCHDYNAMO_DISABLE = 1
# gloo groups connect at their first collective, and most of Megatron's groups have none
test: export TORCH_GLOO_LAZY_INIT = 1
test: $(STAMP)  ## every module in some minutes: each loss and feature on one layout that stands for the others
	$(PYTEST) -m "not slow and not gpu and not slurm and not vllm"

test-slow: $(STAMP) install-chromium test-triton  ## the other layouts, dtypes and backends, and a page in a browser
	$(PYTEST) -m "slow and not gpu and not slurm and not vllm" --ignore-glob "*/test_triton_build*" \
	  --ignore tests/docs # test-triton has built them, docs-site has opened its pages

test-all: $(STAMP)  ## both
	$(PYTEST) -m "not gpu and not slurm and not vllm"

test-triton: $(STAMP)  ## the kernels as the Triton of .ci/triton.txt builds them; skipped where it cannot be had, but not if LOCKED
	@if [ .triton/.installed -nt .ci/triton.txt ] || { rm -rf .triton && $(BIN)/python -m pip install --quiet --no-deps \
	  --only-binary :all: --require-hashes --target .triton -r .ci/triton.txt && touch .triton/.installed; }; then \
	  PYTHONPATH=$(CURDIR)/.triton $(PYTEST) tests/vocab/test_triton_build*.py; \
	else echo "no Triton of .ci/triton.txt: its builds are skipped" >&2; [ "$(LOCKED)" != 1 ]; fi

test-slurm: PROCESSES = 2# beside the slow ones, and they look at clocks
test-slurm: $(STAMP) install-slurm  ## the tests on a private Slurm cluster; skipped where its packages cannot be had
	$(PYTEST) -m slurm tests/slurm

install-chromium:
	tools/install_chromium.sh || echo "no Chromium: the test of the page in a browser will be skipped" >&2

install-slurm:
	tools/install_slurm.sh || echo "no Slurm packages: its tests will be skipped" >&2

test-vllm: $(STAMP)  ## GRPO with a real vLLM on the CPU, in a virtual environment of its own; skipped where it cannot be had
	PYTHON="$(PYTHON)" tools/install_vllm.sh || echo "no vLLM: its tests will be skipped" >&2
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m vllm tests/training/rollouts/test_vllm.py

soak: $(STAMP)  ## each fault of docs/reliability.md three times, and its table anew (half an hour)
	tools/install_slurm.sh
	CUDA_VISIBLE_DEVICES= FAULT_ROUNDS=3 FAULT_REPORT=$(REPORT) $(BIN)/python -m pytest -s tests/slurm/test_faults.py
	$(BIN)/python -m tools.reliability_table $(REPORT)

lint: $(STAMP)  ## ruff, bandit, shellcheck, bash -n, the #SBATCH lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet -c pyproject.toml -r parallel_rl tools examples benchmarks
	$(BIN)/shellcheck -x $(SHELL_SCRIPTS)
	for script in $(SHELL_SCRIPTS); do bash -n $$script || exit 1; done
	$(BIN)/python -m tools.lint_sbatch $(wildcard slurm/*.sbatch)

audit: $(STAMP)  ## known vulnerabilities of what is installed; says so where no advisories can be had
	$(BIN)/python -m tools.audit $(AUDIT)

lock:  ## .ci/requirements.txt anew (needs uv)
	tools/lock.sh

types: $(STAMP)  ## mypy
	$(BIN)/mypy

format: $(STAMP)  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the generated pages of the reference, and the drawings
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tools.reference
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tools.figures

docs-site: .docs/.installed install-chromium  ## the site in build/site, offline; a warning or a dead link is an error; then its pages in a browser
	@if [ -e .docs/sphinx ]; then rm -rf build/site && CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.docs:$(CURDIR) \
	  $(BIN)/python -m sphinx -W -n -q -j 16 -c docs -b html . build/site && echo "the site is in build/site/index.html"; fi
	@[ ! -e .docs/sphinx ] || CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q tests/docs

.docs/.installed: $(STAMP) .ci/docs.txt
	rm -rf .docs && mkdir .docs
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "installing Sphinx into .docs; about a minute" && $(BIN)/python -m pip install --quiet --no-compile --no-deps \
	  --only-binary :all: --require-hashes --target .docs -r .ci/docs.txt; else echo "the site needs Python 3.11 or newer: skipped" >&2; fi
	@touch $@

bench: $(STAMP)  ## the benchmarks, with their figures checked
	$(BIN)/python -m benchmarks.token_stats --check
	$(BIN)/python -m benchmarks.linear --check
	$(BIN)/python -m benchmarks.distillation --check
	$(BIN)/python -m benchmarks.losses --check
	$(BIN)/python -m benchmarks.scaling --check
	$(BIN)/python -m benchmarks.truncation --check
	$(BIN)/python -m benchmarks.packing --check
	$(BIN)/python -m benchmarks.trees --check
	$(BIN)/python -m benchmarks.data --check

gpu-check: $(STAMP)  ## ten minutes on a machine with a GPU: is it right, where does the time go, does the trainer run
	$(BIN)/python -m tools.gpu_check --json gpu_check.json --page gpu_check.md

clean:  ## caches and builds; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
