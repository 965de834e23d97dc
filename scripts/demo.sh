#!/usr/bin/env bash
# Set-up, then the main job on a tiny random Wan checkpoint: the same clip with certified and with native attention,
# compared. Usage:  bash scripts/demo.sh [OUTPUT_DIRECTORY]      (default: clis-demo in the repository)
set -euo pipefail

output="$(realpath -m -- "${1:-$(dirname -- "${BASH_SOURCE[0]}")/../clis-demo}")"
source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
scripts="$CLIS_ROOT/scripts"
model="$output/tiny-wan"

mkdir -p -- "$output" || { echo "error: cannot make $output; name another directory" >&2; exit 2; }

if [[ ! -f "$model/model_index.json" ]]; then
    "$CLIS_PYTHON_COMMAND" "$scripts/make_tiny_checkpoint.py" "$model"
fi

# 256x256 and 17 frames are 1,280 tokens: more than one block of keys.
generate() {
    local name="$1" attention="$2" dtype="$3"
    shift 3
    "$CLIS_PYTHON_COMMAND" "$scripts/generate_wan.py" --model "$model" --prompt "a cat walks over the snow" \
        --height 256 --width 256 --num-frames 17 --steps 4 --seed 0 \
        --attention "$attention" --dtype "$dtype" \
        --output "$output/$name.mp4" --latents "$output/$name.safetensors" "$@"
}

echo "== 1 of 5: certified attention, float32"
generate clis-float32 clis float32 --report "$output/report.html"
echo "== 2 of 5: diffusers' own attention, float32"
generate native-float32 native float32
echo "== 3 of 5: certified attention, bfloat16"
generate clis-bfloat16 clis bfloat16
echo "== 4 of 5: diffusers' own attention, bfloat16"
generate native-bfloat16 native bfloat16
echo "== 5 of 5: the yardstick: diffusers' own attention, accumulated in bfloat16 too"
generate native-narrow-bfloat16 native-bfloat16 bfloat16

echo
"$CLIS_PYTHON_COMMAND" "$scripts/compare_latents.py" "$output"
cat <<MESSAGE
The video: $output/clis-float32.mp4 (contact sheet: clis-float32.png, timings and certificates: clis-float32.json)
The report: $output/report.html
MESSAGE
