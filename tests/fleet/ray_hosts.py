"""A node of Ray on each host of a small network. Each has files and shared memory of its own."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fleet import ray_nodes

ENVIRONMENT = {name: value for name, value in ray_nodes.ENVIRONMENT.items() if "WINDOWS" not in name}
"""For whoever starts or uses the nodes: each has an address of its own."""
PORT = 6379
ATTEMPTS = 3
"""A node whose helpers do not answer within 15 s aborts, which happens on a busy machine."""
OWN_FILES = 'mount -t tmpfs tmpfs "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@contextlib.contextmanager
def ray_on_hosts(hosts, log):
    """The head, without cores, is on the first host, and a core on each of the others. Yields the address. What was
    started ends with the hosts."""
    place = Path(tempfile.mkdtemp(prefix="shoal-ray-"))  # short: Ray puts sockets there
    address = f"{hosts[0].address}:{PORT}"
    try:
        head = ["--head", "--include-dashboard=false", f"--port={PORT}", f"--temp-dir={place}", "--num-cpus=0"]
        start(hosts[0], log, *head)  # the driver is there too, and needs its files
        own_files = ["unshare", "--mount", "sh", "-c", OWN_FILES, str(place)]
        for host in hosts[1:]:
            start(host, log, f"--address={address}", "--num-cpus=1", inside=own_files)
        yield address
    finally:
        shutil.rmtree(place, ignore_errors=True)


def start(host, log, *options, inside=()):
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", *options]
    ray += ["--disable-usage-stats", "--object-store-memory=100000000"]
    command = host.command(*inside, *ray)
    for _ in range(ATTEMPTS):
        with log.open("a") as file:
            done = subprocess.run(
                command, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        if done.returncode == 0:
            return
        host.end_processes()
    raise AssertionError(log.read_text()[-3000:])
