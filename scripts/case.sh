# shellcheck shell=bash
# What the cases of scripts/strangers and scripts/refused begin with (`source "$PLACE/cases"`); scripts/strangers -h
# says what is here.

set -euo pipefail
# Programs that any user may run.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

as() { # as UID COMMAND...
    local user=$1
    shift
    if [ "$(id -u)" -eq "$user" ]; then "$@"; else setpriv --reuid "$user" --regid "$user" --clear-groups "$@"; fi
}
owner() { as "$OWNER" "$@"; }
stranger() { as "$STRANGER" "$@"; }

fail() {
    printf 'failed: %s\n' "$*" >&2
    for log in *.log; do [ ! -s "$log" ] || tail -n 15 "$log" | cut -c1-300 | sed "s/^/  $log: /" >&2; done
    exit 1
}

# cannot WORDS...: this machine has no way to run the case.
cannot() {
    printf '%s\n' "$*"
    exit 77
}

await() { # await FILE PATTERN
    for _ in $(seq 200); do
        if grep -qE -- "$2" "$1" 2>/dev/null; then return 0; fi
        sleep 0.1
    done
    fail "no line of $1 says: $2"
}

# free_port: a UDP port that nobody has now.
free_port() {
    python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# value FILE NAME: what `target` has printed behind NAME in its last line.
value() { awk -v name="$2" 'END { for (i = 1; i < NF; i++) if ($i == name) print $(i + 1) }' "$1"; }
