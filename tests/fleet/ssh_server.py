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
START_TIMEOUT_S = 20


class SshServer:
    """`config` is a file for `ssh -F`: `n1`, `n2` and `n3` work, `stranger` has an unknown key, `keyless` no key of
    ours, and at `closed` nothing listens."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.port = port
        self.config = root / "ssh_config"

    def write(self) -> None:
        for name in ("host", "user", "other"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / name))
        shutil.copy(self.root / "user.pub", self.root / "authorized_keys")
        host_key = (self.root / "host.pub").read_text()
        known = "".join(f"[{name}]:{self.port} {host_key}" for name in (*HOSTS, "keyless"))
        (self.root / "known_hosts").write_text(known)
        (self.root / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.root / 'host'}\n"
            f"AuthorizedKeysFile {self.root / 'authorized_keys'}\nPidFile {self.root / 'pid'}\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n"
            "PermitRootLogin prohibit-password\n"
        )
        common = f"HostName 127.0.0.1\n  UserKnownHostsFile {self.root / 'known_hosts'}\n  IdentitiesOnly yes\n"
        alias = [(name, self.port, "user") for name in (*HOSTS, "stranger")]
        alias += [("keyless", self.port, "other"), ("closed", free_port(), "user")]
        self.config.write_text(
            "".join(
                f"Host {name}\n  {common}  HostKeyAlias [{name}]:{self.port}\n  Port {port}\n"
                f"  IdentityFile {self.root / key}\n"
                for name, port, key in alias
            )
        )

    @contextlib.contextmanager
    def running(self):
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(exist_ok=True)
        log = self.root / "sshd.log"
        command = [SSHD, "-D", "-f", str(self.root / "sshd_config"), "-E", str(log)]
        with subprocess.Popen(command) as process:
            try:
                self._wait(process, log)
                yield self
            finally:
                process.terminate()

    def _wait(self, process, log):
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        raise AssertionError("sshd does not listen")

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
