#!/usr/bin/env bash
# What `make example` runs: a small vision-language model trained on packed rows by a real
# Megatron-Core wheel, as released and patched, in a venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
MEGATRON="${MEGATRON:-0.14.0}" # a release that reads wrong rows at C = 1: 0.12 to 0.14
venv="${EXAMPLE:-.venv-example}-$MEGATRON"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ ! -e "$venv/.ready" ]; then
    echo "== setting up $venv: torch, transformers, megatron-core $MEGATRON (minutes, the first time)"
    "$PYTHON" -m venv "$venv"
    pip() { "$venv/bin/python" -m pip install --quiet --constraint requirements-dev.txt "$@"; }
    pip torch numpy packaging transformers triton matplotlib setuptools
    pip --no-deps "megatron-core==$MEGATRON"
    touch "$venv/.ready"
fi
rm -rf build # setuptools would install what lies there, also modules that are gone
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
example="$PWD/examples/packed_vlm"
out="${OUT:-$venv/packed_vlm.png}"
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac
cd "$venv" # so that Python imports what is installed, not this checkout
patch() { bin/python -W ignore -m megatron.packed_rope "$@"; }

patch revert > revert.log
rm -f unpatched.json patched.json patched_cp2.json
echo "== 1. Megatron-Core $MEGATRON as released"
bin/python "$example/run.py" --out unpatched.json && {
    echo "packed is unpacked already: this release shows no difference at C = 1" >&2
    exit 1
}
[ -e unpatched.json ] || exit 1
echo; echo "== 2. python -m megatron.packed_rope apply"
patch apply > apply.log
bin/python "$example/run.py" --out patched.json
echo; echo "== 3. The same on two context-parallel ranks"
bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$example/run.py" --out patched_cp2.json
echo; echo "== 4. Curves"
bin/python "$example/curves.py" unpatched.json patched.json patched_cp2.json -o "$out" \
    --title "Megatron-Core $MEGATRON: training on packed samples, in another order every step"
