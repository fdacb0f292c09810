# Clearhead: `make demo` and `make test` set everything up; each creates .venv if it is missing.
#
#   make demo           install the runtime dependencies, train and run a translator
#   make test           linters and tests, as CI runs them
#   make lint           ruff, mypy, import-linter
#   make format         ruff format and autofixes
#   make docs           regenerate docs/reference.md and the guide, build the site in build/site (offline, links checked)
#   make bench          attention benchmark; others: python -m bench.NAME
#   make torture        fault injection in training, a busy engine and the server; takes over an hour
#   make fuzz           coverage-guided fuzzing of the file readers (atheris); SECONDS=1200
#   make test-gpu       fast paths equal the reference, on a CUDA device
#
# On a machine without a GPU, a CPU build of torch saves gigabytes:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
SECONDS ?= 1200
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One thread a process: two pytest workers on two cores, and sums in the same order on every machine.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

STEP_FUZZ := -std=gnu11 -g -O1 -fno-math-errno -Wno-psabi -pthread $(wildcard src/clearhead/ops/native/step/*.c) \
	tests/fuzz/native_step_fuzz.c

.PHONY: help demo test lint format docs bench torture fuzz test-gpu clean

help:
	@sed -n '1,/^$$/p' Makefile | sed 's/^# \{0,1\}//'

demo: $(VENV)/.runtime
	@$(BIN)/clearhead demo

test: $(if $(ARGS),,lint) $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	@$(BIN)/python -c "import material" 2> /dev/null || $(PIP) --editable '.[dev,docs]'
	$(BIN)/python -m tools.api_reference
	$(BIN)/python -m tools.guide
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

bench: $(VENV)/.dev
	$(BIN)/python -m bench.attention

torture: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.train.torture 1000 100
	$(TEST_ENV) $(BIN)/python -m tests.train.received_run 10000
	$(TEST_ENV) $(BIN)/python -m tests.train.output_faults 200
	$(TEST_ENV) $(BIN)/python -m tests.train.elastic 50
	$(TEST_ENV) CLEARHEAD_INTERRUPTIONS=20 CLEARHEAD_KILLS=200 CLEARHEAD_COMPILE=1 $(BIN)/python -m pytest \
		tests/train/test_resume.py tests/checkpoint/test_crash.py tests/train/test_golden.py $(ARGS)
	$(TEST_ENV) $(BIN)/python -m tests.fuzz.amplification 20000
	$(TEST_ENV) CLEARHEAD_TERMINAL_CASES=0 CLEARHEAD_CTRL_C=700 $(BIN)/python -m pytest -s \
		tests/cli/test_terminal.py tests/cli/test_interruptions.py $(ARGS)
	@mkdir -p build/fuzz
	gcc $(STEP_FUZZ) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/fuzz/native_step_address -lm
	build/fuzz/native_step_address 1000000 1 1
	gcc $(STEP_FUZZ) -fsanitize=thread -o build/fuzz/native_step_thread -lm
	build/fuzz/native_step_thread 20000 1 2
	$(TEST_ENV) CLEARHEAD_REQUESTS=10000 $(BIN)/python -m pytest tests/inference/test_engine.py $(ARGS)
	$(TEST_ENV) $(BIN)/python -m tests.serve.torture --disconnects 2000 --overload 50 --minutes 30
	$(TEST_ENV) CLEARHEAD_API_EXAMPLES=500 $(BIN)/python -m pytest -s tests/serve/test_schemathesis.py $(ARGS)
	$(TEST_ENV) CLEARHEAD_LOADS=10000 CLEARHEAD_KILLS=1000 CLEARHEAD_MUTATIONS=10000 $(BIN)/python -m pytest -s \
		tests/predict/test_readers.py tests/checkpoint/test_killed_writers.py tests/predict/test_changed_models.py \
		tests/data/test_changed_stores.py tests/text/test_changed_vectors.py $(ARGS)
	$(TEST_ENV) CLEARHEAD_BROWSER=full $(BIN)/python -m pytest -rP tests/explore/test_browser.py $(ARGS)
	$(TEST_ENV) CLEARHEAD_TOKENIZERS=50000 CLEARHEAD_DIALOGUES=10000 $(BIN)/python -m pytest -rP \
		tests/text/test_hostile_tokenizers.py tests/predict/test_injection.py $(ARGS)

# New inputs go to build/fuzz; those that are kept are in tests/fuzz/*.zip.
fuzz: $(VENV)/.dev
	@mkdir -p build/fuzz/readers build/fuzz/lib
	$(PIP) --target build/fuzz/lib --upgrade atheris
	$(TEST_ENV) $(BIN)/python -m tests.fuzz.readers --seeds build/fuzz/readers
	$(TEST_ENV) PYTHONPATH=build/fuzz/lib $(BIN)/python -m tests.fuzz.readers build/fuzz/readers \
		-max_total_time=$(SECONDS) -max_len=20000 -artifact_prefix=build/fuzz/

test-gpu: $(VENV)/.dev
	TORCHDYNAMO_DISABLE=0 $(BIN)/python -m pytest -n 0 -m gpu -rs tests/gpu $(ARGS)

clean:
	rm -rf build src/*.egg-info src/clearhead/ops/native/_step.* $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Clearhead needs Python 3.11 or newer; try: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt $(wildcard src/clearhead/ops/native/step/*) | $(VENV)/bin/python
	@echo "Installing runtime dependencies into $(VENV) (torch is the large one) …"
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing development tools into $(VENV) …"
	$(PIP) --editable '.[dev]'
	@touch $@
