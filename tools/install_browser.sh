#!/bin/sh
# What the tests in a real browser need: Debian's Chromium (as root, unless it is there), Playwright, schemathesis, and
# axe-core, which looks for barriers (by npm; without npm that test is skipped).
set -e
command -v chromium >/dev/null || apt-get -o DPkg::Lock::Timeout=600 install -y --no-install-recommends chromium
"$1" -m pip install --quiet --disable-pip-version-check -c constraints.txt 'playwright>=1.50' 'schemathesis>=4'
axe="$(dirname "$1")/../axe.min.js"
if [ ! -f "$axe" ] && command -v npm >/dev/null; then
    scratch=$(mktemp -d)
    (cd "$scratch" && npm pack --silent axe-core@4.10.3 >/dev/null && tar xzf axe-core-4.10.3.tgz package/axe.min.js)
    mv "$scratch/package/axe.min.js" "$axe"
    rm -r "$scratch"
fi
