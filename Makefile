# All targets need only Python 3.10 or newer. `make demo` and `make test` set up the environment first.
PYTHON ?= python3
BIN := .venv/bin
# The environment is made again for another version of Python.
INSTALLED = .venv/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# On a CPU, keep freed memory in the process. Otherwise, mapping new memory for large tensors takes 4 to 12% of a step.
export MALLOC_MMAP_MAX_ := 0
export MALLOC_TRIM_THRESHOLD_ := 1000000000000
# Keep the compiled bytecode of packages. Otherwise, each new Python process compiles torch for 4 to 7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test gpu lint env lock clean

# Train on the embedded digits in one process. Training takes a few minutes on 2 CPU cores.
demo: env
	@echo "training on the embedded digits: accelerate launch train.py model=tread"
	@$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no train.py model=tread
	@echo "done. Look at runs/digits_tread/samples/ (grids of samples, newest last), runs/digits_tread/metrics.jsonl and .../evaluations/results.jsonl"

# The CPU tests see no GPU. If the machine has a GPU, tests/gpu runs afterwards and alone, because it measures time and memory.
test: env
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile --ignore tests/gpu tests
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python -m pytest -q tests/gpu; \
	else $(BIN)/python -c 'from runtime.launch_checks import check_gpus; check_gpus()' && echo "no GPU: tests/gpu did not run"; fi

# Run the benchmarks and tests/gpu (at most 40 minutes), and append the results to a file in extras/benchmarks/results/.
# PYTHON=python uses that interpreter and skips the environment setup. `make gpu PARTS="machine graph_bits"` runs these two parts.
ifeq ($(origin PYTHON),file)
gpu: env
	PYTHON=$(BIN)/python PARTS="$(PARTS)" sh extras/benchmarks/gpu.sh
else
gpu:
	PYTHON="$(PYTHON)" PARTS="$(PARTS)" sh extras/benchmarks/gpu.sh
endif

lint: env
	$(BIN)/ruff check .
	$(BIN)/ty check

env: $(INSTALLED)

# Install the versions in requirements.lock, which were tested together. An environment that `make` made before is cleared first.
$(INSTALLED): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(if $(wildcard .venv/.installed*),--clear) .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	@touch $@

# Run this target after you change requirements.txt or the `dev` group in pyproject.toml.
lock: env
	$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.10 --no-annotate --no-header requirements.txt --group dev -o requirements.lock

clean:
	rm -rf .venv .pytest_cache .ruff_cache
