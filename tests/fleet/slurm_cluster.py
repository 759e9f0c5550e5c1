"""A real slurmctld and three slurmd on this machine, with a configuration and a key of their own: in a network
namespace each, or all on loopback."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.jobs.network_namespaces import THIS_ADDRESS, NamespaceHost, namespace_network

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SLURM = all(shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "srun", "munged", "setpriv"))
NODES = ("n1", "n2", "n3")
START_TIMEOUT_S = 300
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""States of jobs that use nothing any more. Any other is active: one that gets a signal is SIGNALING, and runs."""
LOOPBACK_ONLY = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
CONFIGURATION = """
ClusterName=shoal
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/munge.sock,cred_expire=5
{communication}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdSpoolDir={root}/spool/%n
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=5
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=batch Nodes=n[1-3] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes=n[1-3] PriorityTier=10 PreemptMode=OFF
"""


NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} "
    "CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000"
)


class SlurmCluster:
    """`environment` is what `srun` and its friends need to find it. `hosts` are network namespaces for slurmctld and
    each of the nodes, on a network that this process is on too; without them all are on loopback."""

    def __init__(self, root: Path, hosts: Sequence[NamespaceHost] = ()) -> None:
        self.root = root
        self.address = THIS_ADDRESS if hosts else "127.0.0.1"
        """Where the nodes reach this process."""
        self.hosts = dict(zip(("slurmctld", *NODES), hosts, strict=True)) if hosts else {}
        # munge runs as a user of its own, to whom other sessions of pytest close its directories
        self._munge = Path(tempfile.mkdtemp(prefix="shoal-munge-"))
        self._munge.chmod(0o711)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment |= {"SLURM_CONF": str(root / "slurm.conf"), "PATH": PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command, check=True, timeout=60):
        done = subprocess.run(
            list(command),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def jobs(self):
        """The jobs that are waiting or running: lines of job, state, name."""
        return self.run("squeue", "--noheader", "--format=%i %T %j", "--states=all").splitlines()

    def active_jobs(self):
        return [line for line in self.jobs() if line.split()[1] not in ENDED]

    def wait_for(self, condition, what):
        until = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert time.monotonic() < until, what
            time.sleep(0.1)

    def start_node(self, name):
        command = ["slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"]]
        self._start(f"slurmd.{name}", *self._command_on(name, *command))

    def _command_on(self, name, *words):
        return self.hosts[name].daemon_command(*words) if self.hosts else words

    def _address_of(self, name):
        return self.hosts[name].address if self.hosts else "127.0.0.1"

    def kill_node(self, name):
        """The machine crashes: slurmd, the steps on it, and their processes."""
        daemon = self._daemons.pop(f"slurmd.{name}")
        doomed = [psutil.Process(daemon.pid), *self.steps(name)]
        doomed += [one for step in self.steps(name) for one in step.children(recursive=True)]
        daemon.kill()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()

    def steps(self, node):
        """The slurmstepd processes of a node."""
        log = str(self.root / "log" / f"slurmd.{node}.log")
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"].startswith("slurmstepd"):
                    found += [process] if any(file.path == log for file in process.open_files()) else []
        return found

    @contextlib.contextmanager
    def running(self):
        self._write()
        try:
            self._start_munge()
            command = ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]]
            self._start("slurmctld", *self._command_on("slurmctld", *command))
            for name in NODES:
                self.start_node(name)
            self.wait_for(self._is_up, "the nodes are not idle")
            yield self
        finally:
            self._end()

    def _lives(self, name):
        assert self._daemons[name].poll() is None, f"{name} ended: {(self.root / 'log' / name).read_text()[-2000:]}"
        return True

    def _is_up(self):
        return (
            all(self._lives(name) for name in self._daemons)
            and self.run("sinfo", "--noheader", "--format=%T %D", "--partition=batch", check=False)
            == f"idle {len(NODES)}"
        )

    def _write(self):
        for name in ("state", "spool", "run", "log"):
            (self.root / name).mkdir()
        port = free_ports(1 + len(NODES))
        nodes = [
            NODE.format(name=name, address=self._address_of(name), port=port + n) for n, name in enumerate(NODES, 1)
        ]
        text = CONFIGURATION.format(
            root=self.root,
            munge=self._munge,
            port=port,
            controller=self._address_of("slurmctld"),
            communication="" if self.hosts else LOOPBACK_ONLY,
            nodes="\n".join(nodes),
        )
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self._munge / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for path in (self._munge, key):
            shutil.chown(path, "munge", "munge")

    def _start_munge(self):
        place = self._munge
        options = [("socket", "munge.sock"), ("key-file", "munge.key"), ("pid-file", "munged.pid")]
        options += [("log-file", "munged.log"), ("seed-file", "munge.seed")]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        words = [f"--{name}={place / file}" for name, file in options]
        self._start("munged", *user, "munged", "--force", "--foreground", *words)
        self.wait_for(lambda: self._lives("munged") and (place / "munge.sock").exists(), "munged does not listen")

    def _start(self, name, *command):
        with (self.root / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                list(command), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _end(self):
        with contextlib.suppress(Exception):
            self.run("scancel", "--user=root", "--signal=KILL", check=False)
        steps = [one for node in NODES for one in self.steps(node)]
        for process in [*steps, *(one for step in steps for one in step.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(self._munge)


def free_ports(count):
    """The first of so many free ports in a row."""
    for first in range(21000 + os.getpid() % 500 * 16, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


@contextlib.contextmanager
def slurm_cluster(root):
    """On loopback."""
    with SlurmCluster(root).running() as cluster:
        yield cluster


@contextlib.contextmanager
def slurm_network(root):
    """Nodes that share nothing with this process and with each other but files and a network."""
    with (
        namespace_network(1 + len(NODES), with_this_machine=True) as hosts,
        SlurmCluster(root, hosts).running() as cluster,
    ):
        yield cluster
