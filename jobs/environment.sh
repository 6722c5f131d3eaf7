# Sourced by the scripts beside it: makes the virtual environment .venv of the project.
# Needs bash, coreutils and Python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# Print the first Python that is new enough.
find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and not found; install it and run this again"
}

# Make .venv, or keep the one that works.
make_venv() {
    local python
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python) || exit
    "$python" -c 'import venv' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian: apt install python3-venv)"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "$python cannot give a venv its pip; install it (Debian: apt install python3-venv)"
    "$python" -m venv --clear "$venv" >/dev/null || fail "cannot make $venv"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || fail "no pip in $venv"
}

# install EXTRAS: put the project and its extras into .venv, unless that is done already.
install() {
    local stamp=$venv/installed-${1//,/-} state log
    make_venv
    state="$root $(cat "$root/setup.cfg" "$root/pyproject.toml" | cksum)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$state" ] && return
    echo "installing mpipar[$1] into $venv"
    if ! log=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --retries 2 --timeout 30 --editable "$root[$1]" 2>&1); then
        [[ $log =~ NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|"Connection refused"|"Network is unreachable"|"name resolution"|"connection broken" ]] &&
            fail "no network: pip cannot reach its package index"
        echo "$log" >&2
        fail "pip could not install mpipar[$1]; its words are above"
    fi
    echo "$state" >"$stamp"
}
