#!/usr/bin/env bash
# Everything that wants a CUDA device, in one table (make gpu-check). Under five minutes.
#
#     PYTHON=python3 bash tools/gpu_check.sh
#
# Needs torch with CUDA and pytest. Uses what is there of triton (our kernel), transformer_engine
# (the fused path) and megatron.core; where that is not installed, a patched copy of the release
# unpacked under .cache/trees (make wheels; MEGATRON=0.16.1 for another) stands in for it. Without a
# CUDA device the same commands run in their dry form, Triton interpreted, and the table says so.
set -u
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
MEGATRON=${MEGATRON:-0.16.1}
CACHE=${PACKED_ROPE_CACHE:-.cache}
TESTS=tests/unit_tests/packed_rope
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$PYTHON" -c 'import torch, pytest' || {
    echo "gpu-check needs torch and pytest in $PYTHON; name another Python by PYTHON=..." >&2
    exit 2
}
SCRATCH=$(mktemp -d) || exit 2
COPY=
trap 'rm -rf "$SCRATCH" ${COPY:+"$COPY"}' EXIT

has() { "$PYTHON" -c 'import sys, importlib.util as u
try:
    found = u.find_spec(sys.argv[1])
except ModuleNotFoundError:
    found = None
sys.exit(found is None)' "$1"; }

# What is installed.
GPU=$("$PYTHON" -c 'import torch
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
TORCH=$("$PYTHON" -c 'import torch; print(torch.__version__)')
TRITON=; has triton && TRITON=yes
TE=; has transformer_engine && TE=yes
CORE=; has megatron.core && CORE=installed
TREE=$CACHE/trees/megatron-core/$MEGATRON
if [ -z "$CORE" ] && [ -d "$TREE" ]; then
    # Hard links: the patch never writes into a file in place.
    COPY=$(mktemp -d "$CACHE/gpu-check.XXXXXX") && cp -al "$TREE/." "$COPY/" &&
        COPY=$(cd "$COPY" && pwd) && export PYTHONPATH=$COPY:$PYTHONPATH &&
        "$PYTHON" -W ignore -m megatron.packed_rope apply > "$SCRATCH/apply" 2>&1 &&
        CORE="$MEGATRON from $TREE, patched"
    [ -n "$CORE" ] || cat "$SCRATCH/apply" >&2
fi

echo "CUDA device           ${GPU:-none: this is a dry run on the CPU}"
echo "torch                 $TORCH"
echo "triton                ${TRITON:-not installed: no kernel of our own}"
echo "transformer_engine    ${TE:-not installed: no fused path of Megatron-Core}"
echo "megatron.core         ${CORE:-not installed, nor unpacked (make wheels)}"
echo

ROWS=()
FAILED=0
row() { ROWS+=("$(printf '  %-44s %-8s %s' "$1" "$2" "$3")"); }

# step NAME SECONDS COMMAND...: run it; its last line is the detail.
step() {
    local name=$1 seconds=$2 log=$SCRATCH/log began=$SECONDS code last
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" > "$log" 2>&1
    code=$?
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | sed 's/^[[:space:]=]*//; s/[[:space:]=]*$//')
    if [ $code -eq 0 ]; then
        row "$name" passed "${DETAIL:-$last} ($((SECONDS - began)) s)"
        return
    fi
    FAILED=1
    [ $code -eq 124 ] && last="over its $seconds seconds"
    row "$name" FAILED "exit $code: $last"
    tail -n 60 "$log"
}

pytest() {
    local name=$1 seconds=$2
    shift 2
    DETAIL='' step "$name" "$seconds" "$PYTHON" -m pytest -q -p no:cacheprovider "$@"
}

if [ -n "$GPU" ]; then
    pytest "tests marked gpu" 60 -m gpu "$TESTS"
else
    pytest "tests marked gpu (collected, skipped)" 60 -m gpu "$TESTS/test_gpu.py"
fi

if [ -n "$TRITON" ]; then
    how=natively
    [ -n "$GPU" ] || how=interpreted
    pytest "Triton rotation, $how" 110 -k kernel "$TESTS/test_rotary_triton.py"
else
    row "Triton rotation" "not run" "triton is not installed"
fi

if [ -z "$CORE" ]; then
    row "check of the installed Megatron-Core" "not run" "megatron.core is not installed"
elif ! "$PYTHON" -W ignore -m megatron.packed_rope status --json | grep -q '"state": "patched"'; then
    row "check of the installed Megatron-Core" "not run" \
        "the patch is not in it (python -m megatron.packed_rope apply)"
else
    step "check of the installed Megatron-Core" 40 "$PYTHON" -W ignore -m megatron.packed_rope check
    grep 'not run' "$SCRATCH/log" | head -n 3
fi

if [ -n "$TRITON" ]; then
    # Short: an empty cache leaves upstream's releases out; benchmarks/bench_gpu.py has them all.
    dry=()
    [ -n "$GPU" ] || dry=(--dry-run)
    DETAIL='ran through' step "benchmark, our kernels${dry:+ (dry run)}" 80 \
        env PACKED_ROPE_CACHE="$SCRATCH" "$PYTHON" benchmarks/bench_gpu.py ${dry[@]+"${dry[@]}"}
    [ -n "$GPU" ] && cat "$SCRATCH/log"
else
    row "benchmark, our kernels" "not run" "triton is not installed"
fi

echo
printf '%s\n' "${ROWS[@]}"
echo
if [ $FAILED -ne 0 ]; then
    echo "Something failed; its output is above."
elif [ -z "$GPU" ]; then
    echo "Dry run on the CPU passed: no CUDA device, so nothing here speaks for a GPU."
else
    echo "All that ran passed on $GPU, in $SECONDS s."
fi
exit $FAILED
