# `make quickstart` trains a small GPT from scratch; `make test` runs the tests. Each target first installs into .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# With the tools that tests, checks and benchmarks need.
DEVELOPMENT := $(VENV)/development
CORPUS := runs/quickstart-data

.PHONY: help install quickstart test check soak bench gpu gpu-offload clean

help:
	@echo "make install     install into $(VENV)"
	@echo "make quickstart  train a small GPT on the source of Python's standard library, and generate text"
	@echo "make test        run the tests"
	@echo "make check       ruff, format, mypy"
	@echo "make soak        run the long tests (needs root)"
	@echo "make bench       benchmark against peers and write docs/benchmarks.md (needs root)"
	@echo "make gpu         run doctor, the tests and the benchmarks of a GPU (needs one; installs nothing)"
	@echo "make gpu-offload measure training on a GPU with optimizer states on the host"

install: $(INSTALLED)

# PIP_CONSTRAINT also applies to pip's build environments, which would otherwise download a newer torch of some gigabytes.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || \
	  { echo "llmtrain needs Python 3.11 or newer, and there is no $(PYTHON): make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "llmtrain needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3" >&2; exit 2; }
	@command -v $${CXX:-c++} > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null || \
	  { echo "llmtrain needs a C++ compiler: install g++ or clang++, or set CXX" >&2; exit 2; }
	@echo "creating a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "downloading and installing PyTorch and other packages into $(VENV), which takes some minutes, one or two of them in silence"
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --disable-pip-version-check \
	  -c constraints.txt -e .
	touch $@
	@echo "llmtrain is installed; \`. $(BIN)/activate\` adds it to the PATH of this shell"

$(DEVELOPMENT): $(INSTALLED)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --disable-pip-version-check \
	  -c constraints.txt -e '.[dev]'
	touch $@

$(CORPUS)/tokenizer/tokenizer.json: | $(INSTALLED)
	$(BIN)/llmtrain data tokenizer stdlib --vocab-size 2048 --output $(CORPUS)/tokenizer

$(CORPUS)/stdlib.idx: | $(CORPUS)/tokenizer/tokenizer.json
	$(BIN)/llmtrain data prepare stdlib --tokenizer $(CORPUS)/tokenizer --output $(CORPUS)/stdlib

quickstart: $(INSTALLED) $(CORPUS)/stdlib.idx
	$(BIN)/llmtrain run quickstart
	$(BIN)/llmtrain generate runs/quickstart --prompt 'def '
	@echo
	@echo "The model is in runs/quickstart. Next steps:"
	@echo "  . $(BIN)/activate                      add llmtrain to the PATH of this shell"
	@echo "  llmtrain report runs/quickstart         plot its curves on an HTML page"
	@echo "  llmtrain eval runs/quickstart           compute its validation loss"
	@echo "  README.md, \"A first run of your own\"   train a model on your own texts"

# The first tests start several ranks, which share the cores; those of one process run side by side.
test: $(DEVELOPMENT)
	$(BIN)/pytest --ignore tests/unit --ignore tests/gpu
	$(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist loadfile tests/unit tests/gpu

check: $(DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(DEVELOPMENT)
	$(BIN)/pytest -m soak

bench: $(DEVELOPMENT)
	$(BIN)/python tools/bench/step.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/data.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/reading.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/checkpoint.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/quantize.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/adamw.py --write docs/benchmarks.md
	$(BIN)/python tools/bench/rounding.py --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.memory --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.recipes_memory --write docs/memory.md
	$(BIN)/python -m tools.bench.papers_memory --write docs/memory.md
	$(BIN)/python -m tools.bench.pipeline --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.offload --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.offload_rate --second 0.4 --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.modelled --write docs/benchmarks.md
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tools.bench.wire --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.resident --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.sharding --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.clusters --write docs/benchmarks.md
	$(BIN)/python -m tools.bench.uneven --write docs/benchmarks.md

# Without .venv it uses the Python that is there, so that it needs no network.
gpu:
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tools/gpu.py

gpu-offload:
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tools/gpu.py offload

clean:
	rm -rf $(VENV) build dist
