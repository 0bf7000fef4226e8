# shellcheck shell=bash
# What queue pairs take of a node's memory: measured here with few, computed for many. Sourced by scripts/lab.d/rdma-rv.

# kernel_memory: bytes of this kernel: what its RDMA modules have mapped for themselves (queues are of that), and what its
# other objects take.
kernel_memory() {
    awk 'FILENAME ~ /vmallocinfo/ { if (/\[(rdma_rxe|rv|ib_core|ib_uverbs|ib_cm|rdma_cm)\]/) mapped += $2; next }
        $1 == "SUnreclaim:" { objects = $2 * 1024 }
        END { printf "%.0f %.0f\n", mapped, objects }' /proc/vmallocinfo /proc/meminfo
}
# own_memory PID...: bytes of those processes that are nobody else's, and no device's.
own_memory() {
    local pid
    for pid; do cat "/proc/$pid/smaps_rollup"; done 2>/dev/null | awk '$1 == "Anonymous:" { sum += $2 * 1024 } END { printf "%.0f\n", sum }'
}

# settled COMMAND...: its answer once the kernel has freed what ended.
settled() { sleep 3; "$@"; }

# with_mesh PROCESSES RC-LIMIT: bytes that so many processes take which have all talked to each other: mapped, objects,
# their own; and their RC queue pairs.
with_mesh() {
    local count=$1 limit=$2 run=$work/mesh-$1-$2 begun=$SECONDS before after pids mesh
    before=$(settled kernel_memory)
    rm -f "/tmp/mesh.$$"
    mkfifo "/tmp/mesh.$$"
    env FI_UDRV_RV=off FI_UDRV_SHM=0 FI_UDRV_RC_CONNECTIONS="$limit" \
        "$TARGET/tests-c/mesh" "$count" 262144 eth0 <"/tmp/mesh.$$" >"$run.out" 2>"$run.err" &
    mesh=$!
    exec 9>"/tmp/mesh.$$"
    while kill -0 $mesh 2>/dev/null && ! grep -q '^talked' "$run.out"; do
        [ $((SECONDS - begun)) -lt 300 ] || kill -KILL $mesh
        sleep 0.2
    done
    read -ra pids < <(sed -n 's/^talked//p' "$run.out")
    after=$(settled kernel_memory)
    say "$before $after $(own_memory "${pids[@]}") $(rdma resource show qp | awk '/type RC/ { n++ } END { print n + 0 }')" |
        awk '{ printf "%.0f %.0f %.0f %d\n", $3 - $1, $4 - $2, $5, $6 }'
    exec 9>&-
    ends $mesh 60 || kill -KILL $mesh 2>/dev/null || true
}

# with_ring RANKS-A-GUEST rv|off: bytes that a job takes in guest 1 which has talked by the module, or by datagrams.
with_ring() {
    local name=memory-$1-$2 before after how=require
    [ "$2" = rv ] || how=off
    before=$(settled kernel_memory)
    cat >"$work/exchange.py" <<'PYTHON'
from mpi4py import MPI
comm = MPI.COMM_WORLD
out, into = bytearray(500000), bytearray(500000)
other = (comm.rank + comm.size // 2) % comm.size
for _ in range(4):
    comm.Sendrecv(out, other, 0, into, other, 0)
comm.Barrier()
PYTHON
    if FI_UDRV_RV=$how FI_UDRV_RC_CONNECTIONS=0 stay "$name" "$1" "$work/exchange.py"; then after=$(settled kernel_memory); else after=$before; fi
    say "$before $after $(rdma resource show qp | awk '/type RC/ { n++ } END { print n + 0 }')" |
        awk '{ printf "%.0f %.0f 0 %d\n", $3 - $1, $4 - $2, $5 }'
    leave
}

memory() {
    local each count mode points=$work/memory
    : >"$points"
    for count in ${RV_MESH:-2 5 9}; do
        # The larger one, where few talk, tells what room for a connection takes; both fill a completion queue of soft-RoCE.
        for mode in 0 128 $([ "$count" -gt 2 ] || say 639); do say "rc $count $mode $(with_mesh "$count" $mode)" >>"$points"; done
    done
    for each in ${RV_RANKS:-1 2 4}; do
        for mode in off rv; do say "rv $each $mode $(with_ring "$each" $mode)" >>"$points"; done
    done
    ok=no
    if python3 -I "$parts/rv-memory.py" "$points"; then ok=yes; fi
    counted memory
}
