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

certify() {
    "$CLIS_PYTHON_COMMAND" -m certify.cli "$@"
}

recording="$output/recording.safetensors"
echo "== 1 of 6: certified attention, float32, recorded"
generate clis-float32 clis float32 --record "$recording" --keep-tensors 1
echo "== 2 of 6: diffusers' own attention, float32"
generate native-float32 native float32
echo "== 3 of 6: certified attention, bfloat16"
generate clis-bfloat16 clis bfloat16
echo "== 4 of 6: diffusers' own attention, bfloat16"
generate native-bfloat16 native bfloat16
echo "== 5 of 6: the yardstick: diffusers' own attention, accumulated in bfloat16 too"
generate native-narrow-bfloat16 native-bfloat16 bfloat16
echo "== 6 of 6: the recording, judged again from its numbers"
certify audit "$recording"
certify report "$recording" -o "$output/report.html"

echo
"$CLIS_PYTHON_COMMAND" "$scripts/compare_latents.py" "$output"
cat <<MESSAGE
The video: $output/clis-float32.mp4 (contact sheet: clis-float32.png, timings and certificates: clis-float32.json)
The recording: $recording (certify audit, explain, report)
The report: $output/report.html
MESSAGE
