#!/usr/bin/env bash
# Two "hosts" on one machine: network namespaces with a cable (veth) between them. The cable is
# pulled while they train, and put back; the run resumes from its newest checkpoint. Needs root.
#
#     launch/two-hosts.sh --config configs/quickstart.toml run.dir=/tmp/two-hosts
#
# Both hosts have to see the loss of the other: parallel.timeout_seconds is when the ranks do, and
# the agents restart them when the cable is back.
set -eu
id=$$
a=dtron-a-$id b=dtron-b-$id
run=""
for word in "$@"; do case $word in run.dir=*) run=${word#run.dir=} ;; esac; done
[ -n "$run" ] || { echo "give run.dir=DIR" >&2; exit 2; }

ip netns add "$a"
ip netns add "$b"
clean() {
    kill -- ${hosts:-} 2>/dev/null || true
    ip netns del "$a"
    ip netns del "$b"
}
trap clean EXIT
ip link add "va$id" netns "$a" type veth peer name "vb$id" netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev "va$id"
ip -n "$b" addr add 10.77.0.2/24 dev "vb$id"
for space in "$a" "$b"; do ip -n "$space" link set lo up; done
ip -n "$a" link set "va$id" up
ip -n "$b" link set "vb$id" up

host() { # namespace, address, device, node rank
    local space=$1 address=$2 device=$3 node=$4
    shift 4
    GLOO_SOCKET_IFNAME=$device exec ip netns exec "$space" python3 launch/host.py \
        --nnodes 2 --node-rank "$node" --head 10.77.0.1 --local-addr "$address" --nproc-per-node 1 \
        train.py "$@" parallel.timeout_seconds=15
}
host "$a" 10.77.0.1 "va$id" 0 "$@" &
first=$!
host "$b" 10.77.0.2 "vb$id" 1 "$@" &
hosts="$first $!"

until [ -e "$run/checkpoints/latest" ]; do
    kill -0 "$first"
    sleep 0.2
done
echo "two-hosts: the cable is pulled"
ip -n "$b" link set "vb$id" down
sleep "${CUT_SECONDS:-20}"
echo "two-hosts: the cable is back"
ip -n "$b" link set "vb$id" up
wait $first
echo "two-hosts: the run has ended"
