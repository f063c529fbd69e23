#!/usr/bin/env bash
# One GPU, below 4 minutes: a Llama-3 of 1B parameters in bf16, planned for this machine's first GPU
# with each kind of recompute and trained for some steps. The loss must fall; predicted and measured
# step time and peak memory are printed, and kept in benchmarks/results/gpu_smoke.json.
#
#     benchmarks/gpu_smoke.sh          PYTHON=.venv/bin/python by default
#     SMOKE=cpu benchmarks/gpu_smoke.sh [RESULTS]     the same with a tiny GPT on the processor
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${1:-benchmarks/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if [ "${SMOKE:-gpu}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    MODEL=examples/small-gpt/config.json DEVICE=cpu STEPS=5
    REQUEST="--global-batch 4 --seq-len 32 --precision fp32"
else
    MODEL=llama3.2-1b DEVICE=cuda STEPS=12
    REQUEST="--global-batch 8 --seq-len 4096 --precision bf16-mixed"
fi

FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
for recompute in none selective full; do
    # shellcheck disable=SC2086  (REQUEST is several words)
    "$PYTHON" -m planner "$MODEL" --topology local:1 $REQUEST --recompute "$recompute" --quiet \
        --time-limit 20 -o "$FOLDER/$recompute.json" > /dev/null
    echo "recompute $recompute"
    timeout 75 "$PYTHON" -m executor train "$FOLDER/$recompute.json" --device "$DEVICE" \
        --steps "$STEPS" --lr 1e-3 --warmup 2 --metrics "$FOLDER/$recompute.metrics.jsonl" \
        --report "$FOLDER/$recompute.report.json"
    echo
done
"$PYTHON" -m benchmarks.gpu_smoke "$FOLDER" "$RESULTS"
