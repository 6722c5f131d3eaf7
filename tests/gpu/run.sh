#!/usr/bin/env bash
# Checks and times mpipar on this machine's GPU; ends with a table, and results.json.
#
#   tests/gpu/run.sh [--dry-run] [--wheels DIR] [--minutes 8] [--only check,parity,bench]
#                    [--out DIR]
#
# --dry-run   tiny sizes on a CPU, through an emulated CuPy: tests the run itself
# --wheels    packages to install come from DIR, where there is no network
# --minutes   for everything; parts are run by worth, what has no time left is named
# --out       where results.json and log.txt go; without it $OUT, or a folder of runs/gpu
#
# PYTHON names the Python to use. Where it lacks something, .venv-gpu is made, which sees
# what that Python has (such as torch) and gets the rest. Nothing is asked. The exit
# status is 0 where all checks passed, 1 where one failed, 2 where nothing could be run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../jobs/environment.sh"

wheels= dry= words=()
while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) dry=$1; words+=("$1") ;;
        --wheels) [ -d "${2-}" ] || fail "--wheels = ${2-} is no folder"
                  wheels=$(cd "$2" && pwd); shift ;;
        --minutes | --only | --out) [ $# -gt 1 ] || fail "$1 needs a value"
                  words+=("$1" "$2"); shift ;;
        *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    esac
    shift
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

given=$(command -v "${PYTHON:-$(find_python)}") || fail "PYTHON = $PYTHON is not there"
python=$given own=$root/.venv-gpu
needs=("$root/tests/gpu/run/needs.py" $dry)

installed() {
    (cd / && "$python" -c "import mpipar, sys; sys.exit(not mpipar.__file__.startswith('$root/'))") 2>/dev/null
}

# A venv of our own, which also sees what the given Python has, itself a venv or not.
make_own() {
    "$own/bin/python" -c '' 2>/dev/null || "$given" -m venv --without-pip --clear "$own" ||
        fail "$given cannot make $own"
    local site
    site=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$given" -c 'import os, site
for path in (*site.getsitepackages(), site.getusersitepackages()):
    if os.path.isdir(path): print(f"import site; site.addsitedir({path!r})")' >"$site/parent.pth"
    python=$own/bin/python
    # An MPI in the environment of the given Python is looked for in ours, unless named.
    local above lib
    above=$("$given" -c 'import sys; print(sys.exec_prefix)')
    for lib in "$above"/lib/libmpi.so.12 "$above"/lib/libmpi.so.40; do
        [ ! -e "$lib" ] || [ ! -e "$above/bin/mpiexec" ] || [ -e "$own/bin/mpiexec" ] ||
            export MPI4PY_LIBMPI=$lib PATH=$above/bin:$PATH
    done
}

# pip into that venv, by the given Python's pip; from the folder where one is given.
pip() {
    local from=(--retries 1 --timeout 20)
    [ -z "$wheels" ] || from=(--no-index --find-links "$wheels")
    timeout 240 "$given" -m pip --python "$python" install --quiet "${from[@]}" "$@"
}

began=$SECONDS
if ! installed || [ -n "$("$python" "${needs[@]}")" ]; then
    echo "preparing $own"
    make_own
    installed || pip --no-deps --no-build-isolation --editable "$root" ||
        pip --no-deps --editable "$root" || fail "pip could not install mpipar"
    # Twice, since whether MPI works is known only with mpi4py.
    for round in 1 2; do
        # PyTorch is compared with where it is; it is too large to be fetched here.
        mapfile -t names < <("$python" "${needs[@]}" | sed 's/^?//' | grep -vx -e torch -e '')
        [ ${#names[@]} -eq 0 ] || pip "${names[@]}" ||
            for name in "${names[@]}"; do pip "$name" || echo "no $name: pip failed"; done
    done
    missing=$("$python" "${needs[@]}")
    [ -z "$missing" ] || echo "missing (? = the run goes on without it): ${missing//$'\n'/, }"
    ! grep -qv '^?' <<<"${missing:-?}" || fail "install them, or name a folder by --wheels"
fi

cd "$root"
export PATH="$(dirname "$python"):$PATH" PYTHONPATH=$root/tests
exec "$python" -m gpu.run ${words[@]+"${words[@]}"} --used "$((SECONDS - began))"
