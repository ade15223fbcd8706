#!/usr/bin/env bash
# network.sh RANKS RATE COMMAND...: run COMMAND once per rank behind a network link of a known rate.
#
# Each rank gets a network namespace of its own, joined by a bridge; token buckets limit both
# directions to RATE (such as 100mbit or 1gbit). RATE "loopback" uses 127.0.0.1 and no namespaces.
# COMMAND sees RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
# LINK_RATE; a rank's sent bytes are in /sys/class/net/$GLOO_SOCKET_IFNAME/statistics/tx_bytes.
# Needs root and iproute2 (not for loopback). Exits with the worst exit code of the ranks.
set -euo pipefail

if (($# < 3)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ranks=$1 rate=$2
shift 2

export WORLD_SIZE=$ranks LINK_RATE=$rate MASTER_PORT=$((20000 + RANDOM % 20000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
prefix=ng$$
processes=()

tear_down() {
  local process rank
  for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
  if [[ $rate != loopback ]]; then
    for ((rank = 0; rank < ranks; rank++)); do ip netns delete "$prefix-$rank" 2>/dev/null || true; done
    ip link delete "$prefix" 2>/dev/null || true
  fi
}
trap tear_down EXIT
trap 'exit 130' INT TERM

limit() { # limit LINK [NAMESPACE]: a token bucket; its depth follows the rate so that TCP can fill it
  local burst=1mb queue=8mb
  case $rate in
    *kbit | ?mbit | ??mbit | ???mbit) burst=32kb queue=1mb ;;
    1gbit) burst=256kb queue=2mb ;;
  esac
  tc ${2:+-n "$2"} qdisc add dev "$1" root tbf rate "$rate" burst $burst limit $queue
}

if [[ $rate == loopback ]]; then
  export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
  launch() { RANK=$1 LOCAL_RANK=$1 "${@:2}"; }
else
  if [[ $EUID -ne 0 ]] || ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "network.sh: a limited link needs root and iproute2 (the commands ip and tc)" >&2
    exit 3
  fi
  export MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME=eth0
  ip link add "$prefix" type bridge
  ip link set "$prefix" up
  for ((rank = 0; rank < ranks; rank++)); do
    ip netns add "$prefix-$rank"
    ip link add "$prefix.$rank" type veth peer name eth0 netns "$prefix-$rank"
    ip link set "$prefix.$rank" master "$prefix" up
    ip -n "$prefix-$rank" address add "10.77.0.$((rank + 1))/24" dev eth0
    ip -n "$prefix-$rank" link set lo up
    ip -n "$prefix-$rank" link set eth0 up
    limit eth0 "$prefix-$rank"
    limit "$prefix.$rank"
  done
  launch() { RANK=$1 LOCAL_RANK=0 ip netns exec "$prefix-$1" "${@:2}"; }
fi

for ((rank = 0; rank < ranks; rank++)); do
  launch "$rank" "$@" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit "$status"
