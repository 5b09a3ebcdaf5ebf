#!/usr/bin/env bash
# torchrun whose ranks are stopped by SIGUSR1, SIGTERM or SIGINT, and which then exits 0.
#
# torchrun itself ends its ranks 30 seconds after SIGTERM, dies of SIGUSR1, and reports both as a
# failure. Here the signal goes to the ranks: they save, exit 0, and so does torchrun, which ignores a
# SIGUSR1 that it gets itself, as from scancel. Where there are no ranks yet, torchrun ends. A failure
# is one line under the ranks' own errors, and the exit code is theirs (torchrun.py).
#
#     launch/torchrun.sh --standalone --nproc-per-node 8 train.py --config my.toml
set -u
# By default torchrun lends one store to the ranks of all attempts: a host that was lost and comes
# back never learns its address then. With this variable each attempt has a new store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
python=$(dirname "$(command -v torchrun)")/python # the environment's
[ -x "$python" ] || python=python3
agent=
stopping=
stop() {
    [ -n "$agent" ] || return
    if pkill -USR1 -P "$agent"; then stopping=yes; elif [ -z "$stopping" ]; then kill -TERM "$agent" 2>/dev/null; fi
}
trap stop USR1 TERM INT
(trap '' USR1; exec setsid "$python" "$(dirname "$0")/torchrun.py" "$@") &
agent=$!
while true; do
    wait "$agent"
    code=$?
    kill -0 "$agent" 2>/dev/null || exit "$code" # a trap ends `wait` before torchrun has ended
done
