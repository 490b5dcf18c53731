#!/usr/bin/env bash
# What `make demo` runs: a real Megatron-Core wheel in a venv of its own, wrong, patched, right.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="$DEMO-$MEGATRON"

if [ ! -e "$venv/.ready" ]; then
    echo "== setting up $venv: torch, transformers, megatron-core $MEGATRON (minutes, the first time)"
    "$PYTHON" -m venv "$venv"
    pip() { "$venv/bin/python" -m pip install --quiet --constraint requirements-dev.txt "$@"; }
    pip torch numpy packaging transformers triton
    pip --no-deps "megatron-core==$MEGATRON" || {
        echo "megatron-core $MEGATRON does not install under $("$venv/bin/python" --version)." \
            "Releases from 0.17 ask for Python 3.12: PYTHON=python3.12 make demo" >&2
        exit 2
    }
    touch "$venv/.ready"
fi
rm -rf build # setuptools would install what lies there, also modules that are gone
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall .
cd "$venv" # so that Python imports what is installed, not this checkout
patch() { bin/python -W ignore -m megatron.packed_rope "$@"; }
tower() { bin/python ../examples/vision_tower.py "$@"; }
summary() { # check.json tower.json
    bin/python - "$1" "$2" <<'PY'
import json, sys
counts = json.load(open(sys.argv[1]))["counts"]
pairs = json.load(open(sys.argv[2])).values()
print(f"{counts['right']} right, {counts['wrong']} wrong, {counts['raises']} raise;",
      f"second image off by {max(second for _, second in pairs):.1e}")
PY
}

patch revert > revert.log
echo; echo "== 1. Megatron-Core $MEGATRON as released: python -m megatron.packed_rope check"
patch check || true
patch check --json > before.json || true
echo; echo "== 2. A Qwen2-VL vision tower with two images in one packed row, rotated by it"
tower || true
tower --json > tower_before.json || true
echo; echo "== 3. python -m megatron.packed_rope apply"
patch apply
echo; echo "== 4. The same check"
patch check
patch check --json > after.json
echo; echo "== 5. The same vision tower"
tower
tower --json > tower_after.json
echo
echo "Megatron-Core $MEGATRON before: $(summary before.json tower_before.json)"
echo "Megatron-Core $MEGATRON after:  $(summary after.json tower_after.json)"
echo "Take it out again: cd $venv && bin/python -m megatron.packed_rope revert"
