# shellcheck shell=bash
# What the scripts beside this file share. Sourced, never run.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TARGET=$ROOT/target
LOGS=$TARGET/logs
PROVIDER_DIR=${UDRV_TEST_FOLDER:-$TARGET/provider}
# The provider under test. Another name is for checking these scripts against a provider of libfabric itself.
PROVIDER=${UDRV_TEST_PROVIDER:-udrv}

# mpi4py's own tests are run with the mpi4py of the same release.
# shellcheck disable=SC2034
MPI4PY_VERSION=4.1.2

# What programs say is read here, in no other language and order.
export LC_ALL=C.UTF-8
unset LANGUAGE
# Everything stays on this machine.
export FI_TCP_IFACE=${FI_TCP_IFACE:-lo}
# Debian's libfabric brings psm, which leaves a file where a program that was killed by a signal ran.
export IPATH_NO_BACKTRACE=1

mkdir -p "$LOGS"

say()  { printf '%s\n' "$*"; }
note() { printf '%s\n' "$*" >&2; }
die()  { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# The comment at the head of a script is its help.
usage() {
    awk 'NR == 1 { next } /^#/ { sub(/^# ?/, ""); print; next } { exit }' "$0"
    exit "${1:-0}"
}

# deps SET...: see `scripts/deps -h`. A guest of scripts/lab rdma has what this machine has, and nobody to ask for more.
deps() { [ -n "${UDRV_LAB_GUEST:-}" ] || "$ROOT/scripts/deps" "$@"; }

# A job is marked by a variable in its environment, which everything it starts inherits: ranks of an MPI job make
# sessions of their own, so neither a process group nor a session holds them all.

# new_job: a fresh mark.
new_job() { say "UDRV_JOB_$$_$RANDOM$RANDOM"; }

# end_job MARK: end what is left of a job.
end_job() {
    local pids
    [ -n "${1:-}" ] || return 0
    for _ in 1 2 3; do
        # grep's status speaks of processes that ended meanwhile too.
        pids=$(grep -lzs "^$1=" /proc/[0-9]*/environ | cut -d/ -f3 || true)
        [ -n "$pids" ] || return 0
        # shellcheck disable=SC2086  # one word per process id is the point
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
}

BOUNDED_JOB=
trap 'end_job "$BOUNDED_JOB"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Time limits are written for a quiet machine, and multiplied by its slowness: how much longer than there (0.1 s) a fixed
# amount of work takes now, on the clock, or how many processes wait for each processor, whichever is more: a whole number
# from 1 to 8. UDRV_TEST_SLOWNESS is the least it may be. Programs that set limits of their own find it there.
SLOWNESS='' SLOWNESS_TOLD=${UDRV_TEST_SLOWNESS:-1} SLOWNESS_AGE=0

# measure_slowness: brings SLOWNESS and UDRV_TEST_SLOWNESS up to date, at most every 20 s. A guest of scripts/lab rdma is
# emulated, and has limits that allow for that.
measure_slowness() {
    local begun load i
    if [ -n "$SLOWNESS" ] && [ $((SECONDS - SLOWNESS_AGE)) -lt 20 ]; then return 0; fi
    SLOWNESS=$SLOWNESS_TOLD SLOWNESS_AGE=$SECONDS
    if [ -z "${UDRV_LAB_GUEST:-}" ]; then
        begun=${EPOCHREALTIME/[.,]/}
        for ((i = 0; i < 100000; i++)); do :; done
        i=$(((${EPOCHREALTIME/[.,]/} - begun + 50000) / 100000))
        read -r load _ </proc/loadavg
        load=$((${load%.*} / $(nproc)))
        if [ "$i" -gt "$SLOWNESS" ]; then SLOWNESS=$i; fi
        if [ "$load" -gt "$SLOWNESS" ]; then SLOWNESS=$load; fi
    fi
    if [ "$SLOWNESS" -gt 8 ]; then SLOWNESS=8; fi
    export UDRV_TEST_SLOWNESS=$SLOWNESS
}

# limited SECONDS COMMAND...: as timeout(1) does, with a limit for this machine.
limited() {
    local seconds=$1
    shift
    measure_slowness
    timeout -k 5 $((seconds * SLOWNESS)) "$@"
}

# await_port PORT PID: until somebody listens at that TCP port (fabtests, -E=PORT), the process has ended, or 20 s of a
# quiet machine have passed.
await_port() {
    local end=$((SECONDS + 20 * ${UDRV_TEST_SLOWNESS:-1})) hex
    printf -v hex %04X "$1"
    while [ $SECONDS -lt $end ] && kill -0 "$2" 2>/dev/null; do
        ! grep -qsE ":$hex [0-9A-F]+:0000 0A " /proc/net/tcp /proc/net/tcp6 || return 0
        sleep 0.05
    done
}

# ends PID SECONDS: waits for a child for so many seconds of a quiet machine; true if it ended in time. Sets `status`.
ends() {
    measure_slowness
    local deadline=$((SECONDS + $2 * SLOWNESS))
    while kill -0 "$1" 2>/dev/null; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.1
    done
    status=0
    wait "$1" || status=$?
}

# both_end PID PID: waits for two processes that talk to each other. Where one fails, the other has 5 s to end too: it may
# wait for messages that never come. Returns the last status that is not 0.
both_end() {
    local one=$1 other=$2 status=0
    while kill -0 "$1" 2>/dev/null && kill -0 "$2" 2>/dev/null; do sleep 0.1; done
    if kill -0 "$1" 2>/dev/null; then one=$2 other=$1; fi
    wait "$one" || status=$?
    if [ "$status" -ne 0 ]; then
        for _ in {1..50}; do kill -0 "$other" 2>/dev/null || break; sleep 0.1; done
        kill "$other" 2>/dev/null || true
    fi
    wait "$other" || status=$?
    return "$status"
}

# bounded SECONDS LOG COMMAND...
# Run COMMAND in a session of its own with its output in LOG. Returns its status; 124 or 137 when it ran
# past SECONDS, of a quiet machine. Whatever it started has ended when this returns.
bounded() {
    local seconds=$1 log=$2 status=0
    shift 2
    measure_slowness
    BOUNDED_JOB=$(new_job)
    setsid env "$BOUNDED_JOB=1" timeout -k 5 $((seconds * SLOWNESS)) "$@" >"$log" 2>&1 </dev/null &
    { wait $! || status=$?; } 2>/dev/null
    end_job "$BOUNDED_JOB"
    BOUNDED_JOB=
    return "$status"
}

ran_over() { [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; }

# reproducible_rust: from now on cargo's compilers write no folder of this machine into what they make.
reproducible_rust() {
    local flags words home=~
    read -ra words <<<"${RUSTFLAGS:-}"
    words+=("--remap-path-prefix=$ROOT=." "--remap-path-prefix=${CARGO_HOME:-$home/.cargo}=/cargo")
    printf -v flags '%s\x1f' "${words[@]}"
    export CARGO_ENCODED_RUSTFLAGS=${flags%$'\x1f'}
}

# clippy_is_none: sets `why` where there is no Clippy that the code is kept clean for. An older one has lints that later
# ones have withdrawn.
clippy_is_none() {
    local wanted=1.95 version
    version=$(cargo clippy --version 2>/dev/null | sed -E 's/^clippy 0\.([0-9]+\.[0-9]+).*/\1/') || true
    if [ -z "$version" ]; then
        why="this Rust comes without clippy"
    elif ! at_least "$version" $wanted; then
        why="clippy $version is older than $wanted, and has lints that were withdrawn since"
    else
        return 1
    fi
}

# need_provider: the shared object is there (or another provider is under test).
need_provider() {
    [ "$PROVIDER" != udrv ] || [ -f "$PROVIDER_DIR/libudrv-fi.so" ] || "$ROOT/scripts/build"
}

# provider_path [FOLDER]: what FI_PROVIDER_PATH has to be for the provider under test; FOLDER holds the
# providers that come with the libfabric in use, where those are separate files.
provider_path() {
    if [ "$PROVIDER" = udrv ]; then say "$PROVIDER_DIR"; else say "${1:-}"; fi
}

# libfabric_dir WHICH: the library folder of a libfabric: `debian`, `2.1`, or the prefix of another one.
libfabric_dir() {
    case $1 in
        debian) dirname "$(PATH=$PATH:/sbin ldconfig -p | awk '/libfabric\.so\.1 / { print $NF; exit }')" ;;
        2.1)    say "$TARGET/libfabric-2.1/lib" ;;
        *)      if [ -e "$1/lib/libfabric.so.1" ]; then say "$1/lib"
                elif [ -e "$1/libfabric.so.1" ]; then say "$1"
                else die "no libfabric.so.1 in $1/lib"; fi ;;
    esac
}

# libfabric_version LIBDIR: as MAJOR.MINOR.
libfabric_version() {
    LD_LIBRARY_PATH=$1 python3 -c '
import ctypes
v = ctypes.CDLL("libfabric.so.1").fi_version()
print(f"{v >> 16}.{v & 0xffff}")'
}

# at_least A B: version A >= version B.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]; }
