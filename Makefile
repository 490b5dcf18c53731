# make demo    a real Megatron-Core wheel, wrong, patched, right (MEGATRON=0.16.1 for another)
# make test    everything the tests need, then the tests
# make example a small vision-language model trained on packed rows: parity table, loss curves
# make matrix  every pinned release through check, apply, revert; the README's table of releases
# make fuzz    2,000 random packs against the oracle, 1,000 per model family for position ids
# make bench   CPU figures into benchmarks/results; gpu-check and gpu-bench on a machine with a GPU
PYTHON ?= python3
MEGATRON ?= 0.14.0
VENV := .venv
BIN := $(VENV)/bin
DEMO := .venv-demo
EXAMPLE := .venv-example
JOBS ?= 2
TESTS := tests/unit_tests

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test demo example lint fuzz bench matrix fingerprints wheels gpu-check gpu-bench clean

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
	rm -rf .cache/matrix && mkdir -p .cache/matrix
	PACKED_ROPE_RELEASES=all PACKED_ROPE_MATRIX=$(CURDIR)/.cache/matrix \
		$(BIN)/python -m pytest -n $(JOBS) $(TESTS)/packed_rope/test_releases.py
	$(BIN)/python tools/support_table.py .cache/matrix README.md

fingerprints: wheels
	$(BIN)/python tools/fingerprints.py

bench: wheels
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python benchmarks/bench_cpu.py --out benchmarks/results/$$(date +%F)-cpu.md
	$(BIN)/python benchmarks/bench_positions.py --out benchmarks/results/$$(date +%F)-positions.md
	$(BIN)/python benchmarks/bench_import.py --out benchmarks/results/$$(date +%F)-import.md

gpu-check:
	@PYTHON="$(PYTHON)" bash tools/gpu_check.sh

gpu-bench:
	PYTHONPATH=. $(PYTHON) benchmarks/bench_gpu.py --out benchmarks/results/$$(date +%F)-gpu.md

demo:
	@PYTHON="$(PYTHON)" MEGATRON="$(MEGATRON)" DEMO="$(DEMO)" bash examples/demo.sh

example:
	@PYTHON="$(PYTHON)" MEGATRON="$(MEGATRON)" EXAMPLE="$(EXAMPLE)" bash examples/packed_vlm.sh

clean:
	rm -rf $(VENV) $(DEMO)-* $(EXAMPLE)-* .cache build dist *.egg-info
