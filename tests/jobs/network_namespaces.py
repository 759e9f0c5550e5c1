"""Hosts of a small network: namespaces with an address each, on one bridge."""

import contextlib
import os
import subprocess
import sys

THIS_ADDRESS = "10.213.7.254"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class NamespaceHost:
    def __init__(self, network, number):
        self.name = f"{network}-{number}"
        self.address = f"10.213.7.{number}"
        self._outer, self._inner = f"{network}o{number}", f"{network}i{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self._outer, "type", "veth", "peer", "name", self._inner)
        ip("link", "set", self._inner, "netns", self.name)
        ip("link", "set", self._outer, "master", network, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self._inner)
        ip("-n", self.name, "link", "set", self._inner, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def python(self, *words, log, env, cwd=None):
        with log.open("a") as file:
            return subprocess.Popen(self.command(sys.executable, *words), stdout=file, stderr=file, env=env, cwd=cwd)

    def command(self, *words):
        """The command that runs these words on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def daemon_command(self, *words):
        """The same for a daemon that looks at /sys/fs/cgroup, which `ip netns exec` hides."""
        return ["nsenter", f"--net=/var/run/netns/{self.name}", *words]

    def pids(self):
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def limit_bandwidth(self, mbit):
        """What it sends; what others send to it goes as fast as they do."""
        shape = f"tc qdisc replace dev {self._inner} root tbf rate {mbit}mbit burst 16k latency 200ms"
        ip("netns", "exec", self.name, *shape.split())

    def disconnect(self):
        ip("link", "set", self._outer, "down")

    def reconnect(self):
        ip("link", "set", self._outer, "up")

    def cut_from(self, other):
        """What they send to each other is lost without a word; both reach all others."""
        for one, far in ((self, other), (other, self)):
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", one._inner, "nud", "permanent")
            ip("-n", one.name, "neigh", "replace", far.address, *nobody)

    def reach_again(self, other):
        for one, far in ((self, other), (other, self)):
            ip("-n", one.name, "neigh", "del", far.address, "dev", one._inner)

    def end_processes(self):
        """As a crash of the host does."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def remove(self):
        self.end_processes()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._outer], check=False, capture_output=True)


@contextlib.contextmanager
def namespace_network(host_count, *, with_this_machine=False):
    """So many hosts. Nothing of them is left afterwards. `with_this_machine`: this process is on their network too, at
    THIS_ADDRESS."""
    name = f"shl{os.getpid() % 100000}"
    made = []
    try:
        ip("link", "add", name, "type", "bridge")
        ip("link", "set", name, "up")
        if with_this_machine:
            ip("addr", "add", f"{THIS_ADDRESS}/24", "dev", name)
        for n in range(1, host_count + 1):
            made.append(NamespaceHost(name, n))
        yield made
    finally:
        for host in made:
            host.remove()
        subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
