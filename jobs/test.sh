#!/usr/bin/env bash
# Runs the tests: the standard tier, with --full the wide sweeps too, with --exhaustive
# everything. Further arguments go to pytest, such as -k grid. Two files run at a time, as
# ranks wait for each other a good part of it; -n 0 runs one after the other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tier=(-m "not full and not exhaustive")
words=()
for word in "$@"; do
    case "$word" in
        --full) tier=(-m "not exhaustive") ;;
        --exhaustive) tier=() ;;
        *) words+=("$word") ;;
    esac
done

install mpich,test
cd "$root"
two=(-n 2 --dist loadfile --no-loadscope-reorder)
exec "$venv/bin/python" -m pytest "${two[@]}" ${tier[@]+"${tier[@]}"} ${words[@]+"${words[@]}"}
