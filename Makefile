# make demo    a real Megatron-Core wheel, wrong, patched, right (MEGATRON=0.16.1 for another)
# make test    everything the tests need, then the tests
PYTHON ?= python3
MEGATRON ?= 0.14.0
VENV := .venv
BIN := $(VENV)/bin
DEMO := .venv-demo
JOBS ?= 2
TESTS := tests/unit_tests

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test demo lint fuzz bench matrix fingerprints wheels gpu-check clean

$(VENV)/.ready: requirements-dev.txt pyproject.toml setup.py
	@echo "== setting up $(VENV) (torch, pytest and friends; a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

wheels: $(VENV)/.ready
	@echo "== fetching upstream wheels by pinned hash"
	@$(BIN)/python tools/wheels.py > /dev/null

test: wheels
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fuzz: $(VENV)/.ready
	PACKED_ROPE_FUZZ=2000 PACKED_ROPE_PACKS=1000 $(BIN)/python -m pytest $(TESTS) -k "random or fuzz"

matrix: wheels
	PACKED_ROPE_RELEASES=all $(BIN)/python -m pytest -n $(JOBS) $(TESTS)/packed_rope/test_releases.py

fingerprints: wheels
	$(BIN)/python tools/fingerprints.py

bench: wheels
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python benchmarks/bench_cpu.py --out benchmarks/results/$$(date +%F)-cpu.md

demo:
	@PYTHON="$(PYTHON)" MEGATRON="$(MEGATRON)" DEMO="$(DEMO)" bash examples/demo.sh

clean:
	rm -rf $(VENV) $(DEMO) .cache build dist *.egg-info
