#!/bin/sh
# Installs the ssh server that `make test-ssh` needs, from Debian's packages. The tests start it themselves, on loopback.
set -eu
if command -v sshd >/dev/null || [ -x /usr/sbin/sshd ]; then
    exit 0
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends openssh-server openssh-client
