#!/usr/bin/env bash
# Measures configs/llama3_8b.toml on the GPUs of one host: benchmarks/gpu_session.sh OUT NGPU
# Each run is 20 steps on the embedded corpus; the last rows of metrics.jsonl are the steady state.
set -u
out=$1 n=$2
cd "$(dirname "$0")/.."

run() {  # NAME overrides...
    local name=$1; shift
    timeout "${RUN_SECONDS:-240}" torchrun --standalone --nproc-per-node "$n" train.py \
        --config configs/llama3_8b.toml run.dir="/tmp/runs/$name" data.cache_dir=/tmp/dtron-cache \
        train.steps=20 train.eval_sequences=0 metrics.log_interval=5 metrics.tensorboard=false \
        checkpoint.last=false "$@" >"$out/$name.log" 2>&1
    echo "== $name rc $?"
    grep -E "Error|error:" "$out/$name.log" | tail -3 | cut -c1-300
    python3 - "/tmp/runs/$name/metrics.jsonl" <<'PY'
import json, sys
try:
    rows = [json.loads(r) for r in open(sys.argv[1])]
except OSError:
    sys.exit()
for r in rows:
    print(f"step {r['step']:3d} loss {r['loss']:.4f} norm {r['grad_norm']:.3f} "
          f"tok/s/gpu {r['tokens_per_second_per_device']:,.0f} mfu {r['mfu']:.4f} "
          f"causal {r['mfu_causal']:.4f} GiB {r['memory_gib']:.1f} s {r['seconds']:.4f}")
PY
}
