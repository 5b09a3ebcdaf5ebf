#!/usr/bin/env bash
# Two nodes: the same command on each, but for its rank. Here both run on this machine, so that you
# can try it without a cluster; on real nodes run `launch/host.py` once on each, without the `&`,
# with the name of the first as --head and a run.dir that both share.
#
#     bash examples/two_nodes.sh
set -eu
out=${OUT:-runs/two-nodes}

for rank in 0 1; do
    python launch/host.py --nnodes 2 --node-rank "$rank" --head 127.0.0.1 --port "${PORT:-29500}" \
        --local-addr 127.0.0.1 --nproc-per-node 1 \
        train.py --config configs/quickstart.toml run.dir="$out" "$@" &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
wait -n # set -e: if a node fails, the other one is stopped
wait -n
