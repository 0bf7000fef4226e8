# shellcheck shell=bash
# What the scripts beside this file share that send a stream from guest 1 to the other side and do it harm, in a table.
# Sourced after scripts/lib.sh, with `work`, a folder for logs.

hosts=1
[ -z "${UDRV_LAB_HOSTS:-}" ] || hosts=2
export FI_PROVIDER_PATH=$PROVIDER_DIR FI_LOG_LEVEL=info FI_LOG_PROV=udrv
[ "$hosts" -eq 2 ] || export FI_UDRV_SHM=0
# Its sends pend all the time, so that the receiver owes something. Port 9292 is 0x244C.
stream=("$TARGET/tests-c/stream" 9292)
passed=0 failed=0

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }
# On the other side: the other guest, or here.
other() { if [ "$hosts" -eq 2 ]; then "$ROOT/scripts/lab.d/rdma-on" 2 "$@"; else "$@"; fi; }

# result NAME EXPECTED HAPPENED SECONDS OK
result() {
    say "| $1 | $2 | $3 | $4 |"
    if [ "$5" = yes ]; then passed=$((passed + 1)); else failed=$((failed + 1)); say "FAILED: $1 (logs: ${work#"$ROOT"/})" >&2; fi
}

# pair NAME MESSAGES [VARIABLE=VALUE...]: a stream from here to the other side that has begun and goes by the device.
pair() {
    local name=$1 run to=eth1
    run=("${stream[@]}" "$bytes" "$2")
    shift 2
    [ "$hosts" -eq 1 ] || to=eth0
    log=$work/$name
    # shellcheck disable=SC2016
    other sh -c 'echo $$ >"$0" && exec "$@"' "$log.pid" env "$@" FI_UDRV_IFACE=$to "${run[@]}" >"$log.server" 2>&1 </dev/null &
    server=$!
    for _ in {1..100}; do
        ! other grep -q :244C /proc/net/udp || break
        sleep 0.1
    done
    env "$@" FI_UDRV_IFACE=eth0 "${run[@]}" 10.78.0.2 >"$log.client" 2>&1 </dev/null &
    client=$!
    for _ in {1..100}; do
        ! grep -q 'is reached through the device' "$log.client" || break
        sleep 0.1
    done
    sleep 1
    kill -0 "$client" 2>/dev/null || note "$name: the stream ended at once: $(tail -n 3 "$log.client")"
    grep -q 'is reached through the device' "$log.client" || note "$name: the device does not carry it"
}

# A killed process ends when the kernel has taken back what it has of the device, which may take its time.
finish() {
    local pid
    if [ "$hosts" -eq 1 ] && kill -0 "$server" 2>/dev/null; then kill -KILL "$(cat "$log.pid")" || true; fi
    kill -KILL "$server" "$client" 2>/dev/null || true
    for pid in "$server" "$client"; do
        ends "$pid" 60 2>/dev/null || note "${log##*/}: process $pid was killed, and has not ended after 60 s"
    done
}
reason() { grep -aoE 'No route to host|Connection timed out|Connection reset|Connection refused|common.c.*|stream.c.*' "$log.client" | head -n 1; }

# fails NAME SECONDS START: the client is to end in error within SECONDS.
fails() {
    ok=no
    if ! ends "$client" "$2"; then happened=hang
    elif [ "$status" -eq 0 ]; then happened="ended well"
    else happened="ended, status $status: $(reason)" ok=yes; fi
    result "$1" "ends in error" "$happened" "$(since "$3")" $ok
    finish
}
# came_through SECONDS: both sides are to come to their end. Sets `ok` and `happened`.
came_through() {
    ok=no
    if ! ends "$client" "$1"; then happened=hang
    elif [ "$status" -ne 0 ]; then happened="ended, status $status: $(reason)"
    elif ! ends "$server" 20 || [ "$status" -ne 0 ]; then happened="the other side ended otherwise"
    else happened="went on, done" ok=yes; fi
}
# goes_on NAME SECONDS START: the same, as a line of the table.
goes_on() {
    came_through "$2"
    result "$1" "goes on" "$happened" "$(since "$3")" $ok
    finish
}
# link up|down [DEVICE]: eth0, the client's, or of one guest eth1, the server's.
link() {
    local device=${2:-eth0} far=2
    [ "$device" = eth0 ] || far=1
    ip link set "$device" "$1" &
    ends $! 60 && [ "$status" -eq 0 ] || note "$device did not go $1 within 60 s"
    # Of one guest with both ends it forgets what nobody will tell (scripts/lab.d/rdma-guest).
    if [ "$1" = up ] && [ "$hosts" -eq 1 ]; then ip neigh replace 10.78.0.$far lladdr 02:00:0a:4e:00:0$far dev "$device" nud permanent; fi
}
