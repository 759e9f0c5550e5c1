"""A real sshd on loopback, with keys of its own, and an ssh configuration in which each alias is a "machine"."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
HOSTS = ("n1", "n2", "n3")
START_TIMEOUT_S = 120


class SshServer:
    """`config` is a file for `ssh -F`: `n1`, `n2` and `n3` work, `stranger` has an unknown key, `keyless` no key of
    ours, and at `closed` nothing listens. Other `addresses` than loopback are those of network namespaces, in each of
    which a server runs."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.port = port
        self.config = root / "ssh_config"

    def write(self, addresses=None) -> None:
        addresses = addresses or {"sshd": "127.0.0.1"}
        for name in ("host", "user", "other"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / name))
        shutil.copy(self.root / "user.pub", self.root / "authorized_keys")
        host_key = (self.root / "host.pub").read_text()
        known = "".join(f"[{name}]:{self.port} {host_key}" for name in (*HOSTS, "keyless"))
        (self.root / "known_hosts").write_text(known)
        path = os.environ.get("PYTHONPATH")  # a session would have none: the hosts run the code under test
        environment = f"SetEnv PYTHONPATH={path}\n" if path else ""
        for name, address in addresses.items():
            (self.root / f"{name}.conf").write_text(
                f"Port {self.port}\nListenAddress {address}\nHostKey {self.root / 'host'}\n"
                f"AuthorizedKeysFile {self.root / 'authorized_keys'}\nPidFile {self.root / name}.pid\n"
                "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n"
                f"PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n{environment}"
            )
        common = f"UserKnownHostsFile {self.root / 'known_hosts'}\n  IdentitiesOnly yes\n"
        alias = [(name, self.port, "user") for name in (*HOSTS, "stranger")]
        alias += [("keyless", self.port, "other"), ("closed", free_port(), "user")]
        self.config.write_text(
            "".join(
                f"Host {name}\n  HostName {addresses.get(name, '127.0.0.1')}\n  Port {port}\n  {common}"
                f"  HostKeyAlias [{name}]:{self.port}\n  IdentityFile {self.root / key}\n"
                for name, port, key in alias
            )
        )

    @contextlib.contextmanager
    def running(self, name="sshd", *, inside=None):
        """`inside` is a network namespace."""
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(exist_ok=True)
        log = self.root / f"{name}.log"
        command = [SSHD, "-D", "-f", str(self.root / f"{name}.conf"), "-E", str(log)]
        with subprocess.Popen(inside.command(*command) if inside else command) as process:
            try:
                self._wait(process, log)
                yield self
            finally:
                process.terminate()

    @staticmethod
    def _wait(process, log):
        until = time.monotonic() + START_TIMEOUT_S
        while not (log.is_file() and "Server listening" in log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, "sshd does not listen"
            time.sleep(0.05)

    @staticmethod
    def _run(*command):
        subprocess.run(command, check=True, capture_output=True)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def ssh_server(root):
    server = SshServer(root, free_port())
    server.write()
    with server.running():
        yield server
