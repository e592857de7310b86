# What .ci/run and .ci/full share: steps with times, tests that run once more, components.
export CI=true
# Hundreds of processes would compile the library and the tests anew.
unset PYTHONDONTWRITEBYTECODE

fail() { printf '%s\n' "$*" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$scratch"' EXIT
times=()

# step NAME COMMAND...: run a command, and remember how long it took.
step() {
    local name=$1 began=$SECONDS
    shift
    printf '\n+ %s: %s\n' "$name" "$*"
    "$@" || fail "failed: $name, after $((SECONDS - began)) s"
    times+=("$(printf '%5d s  %s' $((SECONDS - began)) "$name")")
}

# wait_for PID FILE: wait for a command in the background, and show its output where it failed.
wait_for() { wait "$1" || { cat "$2"; return 1; }; }

finish() {
    printf '\n'
    printf '%s\n' "${times[@]}"
    printf '%5d s  in all\n' "$SECONDS"
    # Each of these has a cause: a race in the product, or a test that depends on time.
    [ ! -s "$scratch/flaky" ] || sed 's/^/FLAKY /' "$scratch/flaky"
    cat "$scratch/closing"
}

# tests COMMAND...: run pytest. What failed runs once more, alone, and on the same PATH. What passes
# then is flaky, else it is red.
tests() {
    local status=0 cache=.pytest_cache/v/cache/lastfailed where=() marker=()
    [ "$1" != on_a_bare_path ] || where=(on_a_bare_path)
    [[ " $* " != *" -m touch "* ]] || marker=(-m touch)
    rm -f "$cache"
    "$@" 2>&1 | tee "$scratch/log" || status=$?
    grep -E '(passed|failed|error).* in [0-9]' "$scratch/log" | tail -n 1 >>"$scratch/closing" || true
    # The tests of a process that died did not run, whatever the others came to.
    ! grep -q 'node down: ' "$scratch/log" || return 1
    [ "$status" -ne 0 ] || return 0
    # 1: tests failed. Anything else leaves tests that did not run.
    [ "$status" -eq 1 ] && [ -s "$cache" ] || return "$status"
    python3 -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache" \
        >"$scratch/failed"
    [ "$(wc -l <"$scratch/failed")" -le 10 ] || return 1
    while [ -n "${beside:-}" ] && kill -0 "$beside" 2>/dev/null; do sleep 1; done
    printf '\n+ once more, alone: %s\n' "$(paste -sd' ' "$scratch/failed")"
    while read -r test; do
        # Without the loop's input, which the tests after it are read from.
        "${where[@]}" timeout --kill-after=30 20m .venv/bin/pytest -q -n 0 "${marker[@]}" "$test" </dev/null ||
            return 1
        printf '%s\n' "$test" >>"$scratch/flaky"
    done <"$scratch/failed"
}

# on_a_bare_path COMMAND...: run a command with Python and the tools of a shell on its PATH, but with
# no Java, Go, compiler, database, browser or proxy. The tools are those that a shell, pip and the
# programs of wheels call.
on_a_bare_path() {
    local bare=$scratch/bare program found
    mkdir -p "$bare"
    for program in awk basename bash cat chmod cp cut date dirname env expr find getconf git grep \
        head hostname id kill ln ls mkdir mktemp mv nproc ps readlink rm sed sh sleep sort \
        stat tail tee test timeout touch tr true uname wc xargs; do
        found=$(type -P "$program") && ln -sf "$found" "$bare/$program"
    done
    # Not a link: a virtual environment would remember the link's folder.
    printf '#!/bin/sh\nexec %q "$@"\n' "$(python3 -c 'import sys; print(sys.executable)')" \
        >"$bare/python3"
    chmod +x "$bare/python3"
    timeout --kill-after=30 20m env -u JAVA_HOME -u GOROOT PATH="$bare" "$@"
}

# What no wheel brings along: MariaDB, a reverse proxy, a browser, a checker of alerts.
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
installed() { PATH="$PATH:/usr/sbin:/usr/local/sbin" command -v "$1" >/dev/null; }
need() {
    installed "$1" && return
    shift
    as_root apt-get update -qq
    for package in "$@"; do
        as_root apt-get install -y -qq --no-install-recommends "$package" >/dev/null && return
    done
    return 1
}

need_components() {
    need mariadbd mariadb-server mariadb-server-core || return 1
    need nginx nginx-light nginx || return 1
    need chromium chromium || return 1
    need promtool prometheus
}

# What is no test.
static_checks() {
    local bin=.venv/bin pyright
    step "format" $bin/ruff format --check .
    step "lint" $bin/ruff check .
    $bin/pyright --pythonpath $bin/python >"$scratch/pyright" 2>&1 &
    pyright=$!
    step "mypy" $bin/mypy
    step "pyright, beside mypy" wait_for "$pyright" "$scratch/pyright"
}

# What all tests do, too. The variable silences an announcement of the theme's makers.
documentation() {
    local bin=.venv/bin
    NO_MKDOCS_2_WARNING=1 $bin/mkdocs build --strict --quiet --config-file docs/mkdocs.yml
}

# Sets where the broker is that an example starts, after building it where it is missing.
find_broker() { FEEDAPI_LIFTBRIDGE=$(.venv/bin/python -m tests.liftbridge.build) && export FEEDAPI_LIFTBRIDGE; }
run_example() { timeout 300 .venv/bin/python -W error::ResourceWarning "$1" >/dev/null; }
examples() {
    local example
    find_broker || return 1
    for example in examples/*.py; do
        printf '%s\n' "$example"
        run_example "$example" || printf '%s\n' "$example" >>"$scratch/failed_examples"
    done
}

# What failed beside the tests runs once more, alone, as a test does: Spark gives a Python worker ten
# seconds to start, and no setting changes that.
failed_examples() {
    local example
    [ -s "$scratch/failed_examples" ] || return 0
    find_broker || return 1
    while read -r example; do
        run_example "$example" </dev/null || return 1
        printf '%s\n' "$example" >>"$scratch/flaky"
    done <"$scratch/failed_examples"
}
