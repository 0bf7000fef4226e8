# shellcheck shell=bash
# What scripts/strangers and scripts/refused share: they run small programs, one a case, each with a time limit, where
# any user finds the provider and the programs of tests/c. Sourced by both, which have sourced lib.sh.

# The users of the cases: neither of them owns anything here.
OWNER=64101 STRANGER=64102
export OWNER STRANGER

# cases FOLDER [NAME...]: runs all cases of the folder, or those named. Ends in "N passed, N failed, N skipped".
cases() {
    local folder=$1 path name seconds what log status passed=0 failed=0 skipped=0
    shift
    "$ROOT/tests/c/build"
    need_provider
    PLACE=$(mktemp -d)
    trap 'end_job "$BOUNDED_JOB"; rm -rf -- "$PLACE"' EXIT
    cp "$PROVIDER_DIR/libudrv-fi.so" "$TARGET"/tests-c/* "$PLACE/"
    cp "$ROOT/scripts/case.sh" "$PLACE/cases"
    chmod -R a+rX "$PLACE"
    export PLACE FI_PROVIDER=udrv FI_PROVIDER_PATH=$PLACE PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1
    for path in "$folder"/*; do
        name=${path##*/}
        [ -x "$path" ] || continue
        [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
        seconds=$(sed -n 's/^# seconds: //p' "$path")
        what=$(sed -n '2s/^# //p' "$path")
        log=$LOGS/${folder##*/}-$name.log status=0
        mkdir "$PLACE/$name" && chmod 777 "$PLACE/$name"
        (cd "$PLACE/$name" && bounded "${seconds:-60}" "$log" "$path") || status=$?
        case $status in
            0) passed=$((passed + 1)); say "ok   $name: $what" ;;
            77) skipped=$((skipped + 1)); say "skip $name: $(tail -n 1 "$log")" ;;
            *)
                failed=$((failed + 1))
                say "FAIL $name (status $status): $what"
                tail -n 30 "$log" | sed 's/^/    /'
                ;;
        esac
    done
    say "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
}
