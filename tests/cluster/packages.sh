#!/usr/bin/env bash
# Installs what the tests of this folder need, on Debian and as root: Slurm for one
# machine, and iproute2. Where that cannot be done they are skipped: never a failure.
set -u
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0

missing=()
for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2; do
    state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>&1)
    [ "$state" = installed ] || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit 0

echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -qq --yes --no-install-recommends -o DPkg::Lock::Timeout=60)
# The network is given little time; what is here then is installed in peace.
{
    timeout 60 "${install[@]}" --download-only "${missing[@]}" ||
        { timeout 60 apt-get update -qq &&
            timeout 60 "${install[@]}" --download-only "${missing[@]}"; }
} >/dev/null 2>&1 &&
    timeout 300 "${install[@]}" --no-download "${missing[@]}" </dev/null >/dev/null 2>&1 ||
    echo "they cannot be installed: tests of clusters are skipped"
exit 0
