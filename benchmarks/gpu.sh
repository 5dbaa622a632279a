#!/usr/bin/env bash
# What is to be checked and measured on a CUDA machine, in one prepared script:
#
#     benchmarks/gpu.sh [PART]...     (default: all = tests, decode, operators, counters, tiny, llama, batching)
#
#     tests     the tests marked gpu: the CPU's fp32 tokens and logits, no waiting, steps that are captured and compiled
#     decode    in the shape of Llama-3-8B: launched steps in bf16, int8 and int4 beside their targets; every stage, batches and
#               contexts, beside their predictions
#     operators products and attention by PyTorch's kernels and by Triton's; tile sizes
#     counters  DRAM bytes of a decode step by the GPU's counters, where ncu can read them, beside the counted bytes
#     tiny      the tour of every stage on a tiny model with random weights
#     llama     the tour of every stage in the shape of Llama-3-8B with random weights, for a short and a long prompt; the ceilings
#     batching  in the shape of Llama-3-8B: a trace of 32 requests, batches of 1 to 64, and contexts of 512 to 8,000 tokens
#     smollm    the tour of every stage on SmolLM2-135M; its weights are random unless its file is in the cache
#     peers     beside Hugging Face transformers, on the same
#
# It needs Python 3.11 or newer with the packages of pyproject.toml; minillm need not be installed. Without a network, put wheels
# of what is missing into .whl/ in the repository's root. A part that fails does not stop the next one; the exit status tells.
#
# Environment: OUT (folder of the results, benchmarks/results/gpu-DATE), DEVICE (cuda), PYTHON (python3), LIMIT (seconds that one
# command may take, 180; decode, operators and counters begin nothing new in the last 30), BIG (random:llama-3-8b; a smaller
# model of 1,100 positions or more proves these parts on a CPU), BATCHES and CONTEXTS of the parts decode, operators and batching,
# ONLY (a regular expression: what of these parts is measured, by the names that they print).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu-$(date +%Y-%m-%d)}
LIMIT=${LIMIT:-180}
BIG=${BIG:-random:llama-3-8b}
ALL=(tests decode operators counters tiny llama batching)
PARTS=("${ALL[@]}" smollm peers)
export PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

fail() { # one sentence, and the end
  echo "gpu.sh: $1" >&2
  exit "${2:-1}"
}

choose_parts() {
  chosen=()
  local part
  for part in "${@:-all}"; do
    if [[ $part == all ]]; then
      chosen+=("${ALL[@]}")
    elif [[ " ${PARTS[*]} " == *" $part "* ]]; then
      chosen+=("$part")
    else
      fail "Unknown part '$part': choose from ${PARTS[*]} or all." 2
    fi
  done
}

install_carried_wheels() {
  compgen -G '.whl/*.whl' >/dev/null || return 0
  site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl ||
    fail "The wheels in .whl could not be installed: see the message above."
  export PYTHONPATH=$site:$PYTHONPATH
}

check_packages() {
  local wanted="gguf huggingface_hub jinja2 matplotlib numpy rich safetensors tokenizers torch" missing
  [[ " ${chosen[*]} " == *" tests "* ]] && wanted+=" hypothesis pytest transformers"
  [[ " ${chosen[*]} " == *" peers "* ]] && wanted+=" transformers"
  # shellcheck disable=SC2086 # words are meant
  missing=$("$PYTHON" -c '
import importlib.util, sys
print(*dict.fromkeys(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' $wanted) ||
    fail "$PYTHON does not run: name a Python 3.11 or newer in PYTHON."
  [[ -z $missing ]] || fail "Missing Python packages: $missing; install them, or put their wheels into .whl/ in the repository's root."
  "$PYTHON" - "$DEVICE" <<'PYTHON_CHECK' || exit 1
import sys
from minillm.device import pick_device
from minillm.errors import MinillmError
try:
    pick_device(sys.argv[1])
except MinillmError as error:
    sys.exit(f"gpu.sh: {error}")
PYTHON_CHECK
}

has_checkpoint() { # the real model, in the cache already: nothing is fetched here
  "$PYTHON" -c 'import sys; from minillm.download import MODEL_FILE, cache_folder
sys.exit(not (cache_folder() / MODEL_FILE).is_file())'
}

limited() { timeout --kill-after=10 "$LIMIT" "$PYTHON" "$@"; }

minillm() { limited -m minillm.cli "$@"; }

# --- the parts --------------------------------------------------------------------------------------------------------

part_tests() {
  local without=()
  if ! has_checkpoint; then
    echo "The file of smollm2-135m is not in the cache: the tests that need it are left out."
    without=(-k "not smollm2")
  fi
  local processes=()
  "$PYTHON" -c 'import xdist' 2>/dev/null && processes=(-n 4) # kernels are compiled at the same time
  # By name, what matters most first: others would be imported for nothing.
  limited -m pytest -m gpu "${processes[@]}" "${without[@]}" -p no:cacheprovider -q --durations=5 \
    tests/test_cuda.py tests/test_triton_kernels.py tests/test_quantization.py tests/test_ceilings.py
}

# A measured part draws its picture last. Its JSON grows with every measurement: one that was ended has a picture too.
measured() {
  local part=$1 status=0 dtype=bf16 seconds=$((LIMIT > 60 ? LIMIT - 30 : LIMIT / 2))
  if [[ $DEVICE == cpu ]]; then # a proof of the script: Triton's interpreter multiplies no bf16
    dtype=fp32
    export TRITON_INTERPRET=1
  fi
  limited "benchmarks/gpu_$part.py" --model "$BIG" --device "$DEVICE" --dtype $dtype --out "$OUT" --seconds $seconds \
    --batches "${BATCHES:-1,8,64}" --contexts "${CONTEXTS:-512,4096,32768}" --only "${ONLY:-}" || status=1
  if [[ -f $OUT/$part.json && ! $OUT/$part.png -nt $OUT/$part.json ]]; then
    limited benchmarks/gpu_plot.py "$OUT/$part.json" || status=1
  fi
  return $status
}

part_decode() { measured decode; }

part_operators() { measured operators; }

part_counters() { measured counters; }

part_tiny() {
  minillm tour --model tiny --device "$DEVICE" --dtype fp32 --json "$OUT/tiny.json" --plot "$OUT/tiny.png"
}

# The byte tokenizer of random weights makes a token of each byte, so a long prompt is a long text. 1,000 tokens put prefill past
# the ridge of any GPU (some hundred FLOP/byte); naive then costs 16 TFLOP a token, so it makes few.
part_llama() {
  local status=0 long
  long=$("$PYTHON" -c 'print(("A GPU reads each weight once for all tokens of a prompt. " * 18)[:1000])')
  minillm tour --model "$BIG" --device "$DEVICE" --dtype bf16 --max-new-tokens 48 \
    --json "$OUT/llama.json" --plot "$OUT/llama.png" || status=1
  minillm tour --model "$BIG" --device "$DEVICE" --dtype bf16 --max-new-tokens 16 --prompt "$long" \
    --json "$OUT/llama-long.json" || status=1
  minillm roofline --device "$DEVICE" --dtype bf16 --json "$OUT/roofline.json" || status=1
  return $status
}

part_batching() {
  limited benchmarks/batching.py --model "$BIG" --device "$DEVICE" --dtypes bf16 --requests 32 --rounds 2 --steps 16 \
    --batches "${BATCHES:-1,2,4,8,16,32,64}" --contexts "${CONTEXTS:-512,2048,8000}" --json "$OUT/batching.json"
}

part_smollm() {
  local model=smollm2-135m
  has_checkpoint || model=random:smollm2-135m
  minillm tour --model $model --device "$DEVICE" --json "$OUT/smollm.json" --plot "$OUT/smollm.png"
}

part_peers() {
  local model=smollm2-135m
  has_checkpoint || model=random:smollm2-135m
  limited benchmarks/peers.py --model $model --device "$DEVICE" --engines minillm,transformers --json "$OUT/peers.json"
}

# --- the run ----------------------------------------------------------------------------------------------------------

choose_parts "$@"
install_carried_wheels
check_packages
mkdir -p "$OUT" || fail "The folder $OUT cannot be made: name another in OUT."
"$PYTHON" benchmarks/machine.py "$OUT/machine.json" "$DEVICE" || fail "The machine could not be described: see above."
: >"$OUT/gpu.log"

failed=()
outcomes=()
for part in "${chosen[@]}"; do
  echo "=== $part"
  SECONDS=0
  if "part_$part" 2>&1 | tee -a "$OUT/gpu.log"; then outcome=passed; else outcome=failed failed+=("$part"); fi
  outcomes+=("$part=$outcome=$SECONDS")
  echo "=== $part $outcome in $SECONDS s"
done
"$PYTHON" benchmarks/gpu_summary.py "$OUT" "${outcomes[@]}"
((${#failed[@]} == 0)) || fail "Failed: ${failed[*]}; what they printed is in $OUT/gpu.log."
