#!/usr/bin/env bash
# Trains a small GPT on 4 ranks (tensor 2 x data 2) on Python's own source files, then
# lets it write. Further arguments change the recipe, such as train.steps=100.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install mpich
export PATH="$venv/bin:$PATH"
run=$root/runs/quickstart

# mpiexec hides the terminal from the ranks.
progress=()
[ -t 1 ] && progress=(log.progress=bar)

rm -rf "$run"
mpiexec -n 4 mpipar train "$root/jobs/quickstart.toml" --out "$run" \
    ${progress[@]+"${progress[@]}"} "$@"
echo
mpipar generate "$run" --prompt "def " --tokens 250
