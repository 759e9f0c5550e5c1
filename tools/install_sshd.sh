#!/bin/sh
# Installs what `make test-ssh` needs from Debian's packages: an ssh server, which the tests start themselves on
# loopback, sshfs, which mounts from it, libfaketime, with which one host has another clock, and mpirun, a launcher.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
if command -v sshd >/dev/null && command -v sshfs >/dev/null && command -v mpirun >/dev/null &&
    ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1
then
    exit 0
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
# Debian starts services that it installs; this one is for tests alone
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends \
    openssh-server openssh-client sshfs libfaketime openmpi-bin iproute2
