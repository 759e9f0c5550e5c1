#!/bin/sh
# Installs the Slurm daemons that `make test-slurm` needs, from Debian's packages. The tests start them themselves, as
# three nodes of this machine, and never use a cluster that this machine belongs to.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null && command -v munged >/dev/null
then
    exit 0
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
# Debian starts services that it installs; these are for tests alone
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge iproute2
