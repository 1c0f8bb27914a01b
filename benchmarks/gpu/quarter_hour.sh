# What first.sh and second.sh share: which machine, which model, and where files go.
# REHEARSAL=1: on a CPU with a tiny model, in the Python that is there.
set -u
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=${PYTHONPATH:-}
GPU=benchmarks/gpu
PYTHON=${PYTHON:-python3}
: "${OUT:?give a folder for what comes back}"

if [ "${REHEARSAL:-0}" = 1 ]; then
  W=$OUT/work
  DEVICE=cpu LIST=$GPU/rehearsal.json
  SEARCH=300 SEARCH_LIMIT=240s PROBES=150 QUICK=200 TRAINING=200 STEPS=2
  WORKLOAD="--model $GPU/tiny-decoder --device cpu --mem 1 --seq-len 32 --effective-batch 4 --space $GPU/../searches/spaces/smoke.yaml --trials 1"
  SMALL="$WORKLOAD" TEXTS=1
else
  W=$HOME/card
  DEVICE=cuda LIST=$GPU/first.json
  SEARCH=240 SEARCH_LIMIT=180s PROBES=550 QUICK=80 TRAINING=60 STEPS=10
  WORKLOAD="--model llama-3.1-8b --gpu-mem 24 --seq-len 2048 --effective-batch 16 --set optimizer=adamw,adamw-foreach,adamw-8bit --set compile=none,default"
  SMALL="--model qwen2.5-1.5b --gpu-mem 24 --seq-len 2048 --effective-batch 16 --set lora_rank=16 --set quantization=nf4 --set kernels=liger --set parameter_offload=none --set activation_offload=none"
  TEXTS=12
  export PYTHONPATH=$HOME/site:$PYTHONPATH
fi
export PYTHONPATH=$PYTHONPATH:$PWD
mkdir -p "$W"

stamp() { echo "== $SECONDS s: $*"; }

# Runs a command for at most so many seconds, with the time before each line of what it says, which is kept in a file.
kept() {
  local seconds=$1 file=$2
  shift 2
  timeout "$seconds" "$@" 2>&1 | "$PYTHON" -c 'import sys, time
start = time.time()
for line in sys.stdin: print(f"{time.time() - start:6.1f} {line}", end="", flush=True)' | tee "$file"
}
