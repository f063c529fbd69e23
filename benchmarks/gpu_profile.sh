#!/usr/bin/env bash
# One GPU measured, and a whole model on it: predicted against measured step and peak memory.
#
#     benchmarks/gpu_profile.sh [FOLDER]               below six minutes on an H200
#     DEVICE=cpu benchmarks/gpu_profile.sh [FOLDER]    the same commands at sizes for a CPU
#
# FOLDER (default: gpu-profile) gets the device file, the profile of the layers of Llama-3-8B as rank
# 0 of tp 1, 2, 4 and 8 at micro-batches of 1 and 2, and a small Llama's profile, layout and report.
# Goal: step and peak memory within 5 %.
set -euo pipefail

python=${PYTHON:-python}
folder=${1:-gpu-profile}
device=${DEVICE:-cuda}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder"

small() {  # layers hidden heads ffn vocabulary
    cat <<JSON
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": $1,
 "hidden_size": $2, "num_attention_heads": $3, "num_key_value_heads": $3, "intermediate_size": $4,
 "vocab_size": $5, "max_position_embeddings": 8192}
JSON
}

if [ "$device" = cuda ]; then
    layer_model=llama3-8b layer_length=8192 layer_batches=1,2 degrees=1,2,4,8 dtype=bfloat16
    precision=bf16-mixed length=2048 micro_batch=4 batch=8 seconds=2 steps=12
    small 16 2048 16 5632 32000 > "$folder/small.json"
else
    layer_model="$folder/layer.json" layer_length=64 layer_batches=1,2 degrees=1,2 dtype=float32
    precision=fp32 length=64 micro_batch=2 batch=2 seconds=0.3 steps=5
    small 2 256 4 688 2048 > "$folder/layer.json"
    small 3 256 4 688 2048 > "$folder/small.json"
fi

begin=$(date +%s)
"$python" -m profiler device --device "$device" --most-seconds "$seconds" -o "$folder/device.json"
"$python" -m profiler model "$layer_model" --device "$device" --seq-len "$layer_length" \
    --micro-batch "$layer_batches" --tensor-parallel "$degrees" --dtype "$dtype" \
    --most-seconds "$seconds" -o "$folder/layers.profile.json"
"$python" -m profiler model "$folder/small.json" --device "$device" --seq-len "$length" \
    --micro-batch "$micro_batch" --dtype "$dtype" --most-seconds "$seconds" \
    -o "$folder/small.profile.json"
"$python" -m planner "$folder/small.profile.json" --topology local:1 --global-batch "$batch" \
    --seq-len "$length" --precision "$precision" --micro-batch "$micro_batch" --recompute none \
    -o "$folder/layout.json" > "$folder/plan.txt"
"$python" -m torch.distributed.run --nproc-per-node 1 -m executor train "$folder/layout.json" \
    --device "$device" --steps "$steps" | tee "$folder/train.txt"
echo "$(($(date +%s) - begin)) s; results in $folder"
