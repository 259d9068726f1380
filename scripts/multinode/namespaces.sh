#!/usr/bin/env bash
# Several hosts on one Linux machine, for programs that run on a cluster: each has its own network and host name.
#   namespaces.sh up N             create node0 to node(N-1), 10.77.0.1 and so on, joined by a switch; replaces old ones
#   namespaces.sh run HOST CMD…    run a command there; it keeps this process id, so a signal reaches it
#   namespaces.sh cut HOST         pull its cable: packets are lost without notice
#   namespaces.sh heal HOST        put it back
#   namespaces.sh slow HOST RATE   send and receive at most RATE, such as 100mbit
#   namespaces.sh fast HOST        send and receive at full speed again
#   namespaces.sh kill HOST        SIGKILL all its processes and cut its network, as a power failure does
#   namespaces.sh down             kill all processes on the hosts and remove them
# The hosts share this machine's files, as over a network file system. Needs root, ip and tc (iproute2). Another
# PREFIX creates other hosts next to these. They are isolated: not even this machine is on their network.
set -Eeuo pipefail
prefix=${PREFIX:-titanlite}
network=10.77.0

fail() {
    echo "namespaces.sh: $1" >&2
    exit 2
}

[ "$(uname -s)" = Linux ] || fail "network namespaces are Linux's"
[ "$(id -u)" = 0 ] || fail "only root may make network namespaces; run it with sudo"
for tool in ip tc unshare; do
    command -v "$tool" >/dev/null || fail "$tool is missing; install iproute2 and util-linux"
done
unshare --net true 2>/dev/null || fail "root lacks CAP_SYS_ADMIN here, which network namespaces need (docker run --privileged)"
[[ $prefix =~ ^[a-z0-9-]+$ ]] || fail "PREFIX=$prefix must be made of a-z, 0-9 and -"

switch() {
    ip netns exec "$prefix-switch" "$@"
}

up() {
    [[ ${1:-} =~ ^[1-9][0-9]?$ ]] || fail "up N: N is the number of hosts, from 1 to 99"
    down
    trap down ERR
    # The switch has its own namespace, so that its ports cannot clash with this machine's interfaces or addresses.
    ip netns add "$prefix-switch"
    switch ip link add bridge type bridge
    switch ip link set bridge up
    local i name
    for ((i = 0; i < $1; i++)); do
        name=$prefix-node$i
        # Without its own names each connection waits for a missing name server, 15 s in a trial.
        mkdir -p "/etc/netns/$name"
        echo "options timeout:1 attempts:1" >"/etc/netns/$name/resolv.conf"
        { echo "127.0.0.1 localhost" && seq -f "$network.%g" 1 "$1" | awk '{ print $1, "node" NR - 1 }'; } >"/etc/netns/$name/hosts"
        ip netns add "$name"
        switch ip link add "node$i" type veth peer name eth0 netns "$name"
        switch ip link set "node$i" master bridge up
        ip -n "$name" address add "$network.$((i + 1))/24" dev eth0
        ip -n "$name" link set lo up
        ip -n "$name" link set eth0 up
    done
}

down() {
    local name
    for name in $(ip netns list | awk '{ print $1 }'); do
        [[ $name =~ ^"$prefix"-(node[0-9]+|switch)$ ]] || continue
        ip netns pids "$name" | xargs --no-run-if-empty kill -KILL 2>/dev/null || true # some end by themselves meanwhile
        ip netns delete "$name"
        rm -rf "/etc/netns/$name"
    done
}

limit() { # both directions: the host's end sends, the switch's end is what the host receives
    tc -n "$prefix-$1" qdisc replace dev eth0 root tbf rate "$2" burst 64kb latency 200ms
    tc -n "$prefix-switch" qdisc replace dev "$1" root tbf rate "$2" burst 64kb latency 200ms
}

verb=${1:-}
case $verb in
up)
    up "${2:-}"
    exit
    ;;
down)
    down
    exit
    ;;
run | cut | heal | slow | fast | kill) ;;
*)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

host=${2:-}
[[ $host =~ ^node[0-9]+$ && -e /run/netns/$prefix-$host ]] || fail "no host '$host'; namespaces.sh up N makes node0 to node(N-1)"
shift 2
# shellcheck disable=SC2016  # $0 and $@ are those of the inner shell; each command has a namespace for its host's name
case $verb in
run) exec ip netns exec "$prefix-$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@" ;;
cut) switch ip link set "$host" down ;;
heal) switch ip link set "$host" up ;;
slow) limit "$host" "${1:?RATE, such as 100mbit}" ;;
fast) # there may be no limit to remove
    tc -n "$prefix-$host" qdisc delete dev eth0 root 2>/dev/null || true
    tc -n "$prefix-switch" qdisc delete dev "$host" root 2>/dev/null || true
    ;;
kill) # no packet may tell the others, as after a power failure
    switch ip link set "$host" down
    ip netns pids "$prefix-$host" | xargs --no-run-if-empty kill -KILL 2>/dev/null || true
    ;;
esac
