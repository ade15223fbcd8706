#!/usr/bin/env bash
# network.sh RANKS RATE COMMAND...: run COMMAND once per rank behind a network link of a known rate.
#
# Each rank gets a network namespace of its own, joined by a bridge; token buckets limit both
# directions to RATE (such as 100mbit or 10gbit). RATE "loopback" uses 127.0.0.1 and no namespaces.
# RANKS may be HOSTSxRANKS, such as 2x2: the ranks of a host share its namespace and its link; what
# they send each other does not leave the host and is not limited.
# COMMAND sees RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
# GLOO_SOCKET_IFNAME and LINK_RATE; what a host (or rank) sent is in
# /sys/class/net/$GLOO_SOCKET_IFNAME/statistics/tx_bytes.
# Needs root and iproute2 (not for loopback). Exits with the worst exit code of the ranks.
set -euo pipefail

if (($# < 3)); then
  sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
rate=$2 hosts=${1%x*} per_host=1
if [[ $1 == *x* ]]; then
  per_host=${1#*x}
elif [[ $rate == loopback ]]; then
  hosts=1 per_host=$1
fi
shift 2

export WORLD_SIZE=$((hosts * per_host)) LOCAL_WORLD_SIZE=$per_host LINK_RATE=$rate
export MASTER_PORT=$((20000 + RANDOM % 20000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
prefix=ng$$
processes=()

tear_down() {
  local process host
  for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
  if [[ $rate != loopback ]]; then
    for ((host = 0; host < hosts; host++)); do
      ip netns delete "$prefix-$host" 2>/dev/null || true
      ip link delete "$prefix.$host" 2>/dev/null || true # outlives it while TCP still tries
    done
    ip link delete "$prefix" 2>/dev/null || true
  fi
}
trap tear_down EXIT
trap 'exit 130' INT TERM

limit() { # limit LINK [NAMESPACE]: a token bucket; its depth follows the rate so that TCP can fill it
  local burst=4mb queue=16mb
  case $rate in
    *kbit | ?mbit | ??mbit | ???mbit) burst=32kb queue=1mb ;;
    1gbit) burst=256kb queue=2mb ;;
  esac
  tc ${2:+-n "$2"} qdisc add dev "$1" root tbf rate "$rate" burst $burst limit $queue
}

if [[ $rate == loopback ]]; then
  export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
  launch() { "$@"; }
else
  if [[ $EUID -ne 0 ]] || ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "network.sh: a limited link needs root and iproute2 (the commands ip and tc)" >&2
    exit 3
  fi
  export MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME=eth0
  ip link add "$prefix" type bridge
  ip link set "$prefix" up
  for ((host = 0; host < hosts; host++)); do
    ip netns add "$prefix-$host"
    ip link add "$prefix.$host" type veth peer name eth0 netns "$prefix-$host"
    ip link set "$prefix.$host" master "$prefix" up
    ip -n "$prefix-$host" address add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$prefix-$host" link set lo up
    ip -n "$prefix-$host" link set eth0 up
    limit eth0 "$prefix-$host"
    limit "$prefix.$host"
  done
  launch() { ip netns exec "$prefix-$((RANK / per_host))" "$@"; }
fi

for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$((rank % per_host)) launch "$@" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit "$status"
