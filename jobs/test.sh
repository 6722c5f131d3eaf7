#!/usr/bin/env bash
# Runs the tests: the standard tier, or everything with --full. Further arguments go to
# pytest, such as -k grid.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tier=(-m "not full")
words=()
for word in "$@"; do
    if [ "$word" = --full ]; then tier=(); else words+=("$word"); fi
done

install mpich,test
cd "$root"
exec "$venv/bin/python" -m pytest ${tier[@]+"${tier[@]}"} ${words[@]+"${words[@]}"}
