"""The engine over a real sshd on loopback. Run by `make test-ssh`."""

import os
import re
import signal
import sys

import psutil
import pytest

from shoal.fleet.agents.agent_pipe import SetupCommand
from shoal.fleet.engines.agents import AgentEngine
from shoal.fleet.engines.ssh import ssh_hosts
from shoal.spec.engine import SshEngineConfig
from shoal.spec.run_paths import RunPaths
from tests.fleet.engine_contract import AgentContract, collect_exits, launch, wait_exits, wait_ready
from tests.fleet.ssh_server import SSHD, ssh_server
from tests.fleet.test_agent_engine import ENTRY, pids, wait_gone

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="no sshd: tools/install_sshd.sh")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def make(server, tmp_path):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    made = []

    def make(*hosts, python=sys.executable):
        config = SshEngineConfig(kind="ssh", hosts=list(hosts or ["n1"]), python=python, config=str(server.config))
        setup = SetupCommand(environment={"PYTHONPATH": str(tmp_path)}, modules=["seat_entry"])
        made.append(AgentEngine(ssh_hosts(config, setup=setup), RunPaths(tmp_path)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class TestSshEngine(AgentContract):
    outlives_driver = False

    @pytest.fixture
    def make_engine(self, make):
        return make

    @pytest.fixture
    def engine(self, make_engine):
        return make_engine()


def test_a_killed_ssh_leaves_nothing_behind(make, tmp_path):
    engine = make("n1", "n2")
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    os.kill(engine.agent_pids()["n1"], signal.SIGKILL)
    (one,) = wait_exits(engine, 1)
    assert one.reason.startswith("the loss of host n1")
    wait_gone(*pids(tmp_path, one.seat))
    assert engine.running() == [1 - one.seat]
    assert psutil.pid_exists(pids(tmp_path, 1 - one.seat)[0])
    engine.close()
    wait_gone(*pids(tmp_path, 0, 1))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("no-such-host.invalid", "SH651.*no-such-host.invalid.*cannot be reached"),
        ("closed", "SH651.*closed.*refused"),
        ("stranger", "SH652.*the key of stranger is unknown"),
        ("keyless", "SH652.*keyless does not accept your key"),
    ],
)
def test_a_host_that_ssh_cannot_use_is_told(make, host, told):
    engine = make("n1", host)
    engine.start([launch(0, "0"), launch(1, "0")])
    found = wait_exits(engine, 2)
    assert [one.code for one in found] == [1, 1]
    assert re.search(told, str(found[0].start_error), re.DOTALL), str(found[0].start_error)


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("/no/such/python", "SH653.*no /no/such/python on n1"),
        ("/usr/bin/false", "SH653.*cannot run Shoal's agent"),
        ("python with a space; touch /tmp/never", "SH653"),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_told(make, python, told):
    engine = make("n1", python=python)
    engine.start([launch(0, "0")])
    (one,) = wait_exits(engine, 1)
    assert re.search(told, str(one.start_error), re.DOTALL), str(one.start_error)
    assert not os.path.exists("/tmp/never")


def test_an_interpreter_without_shoal_is_told(make, tmp_path):
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    engine = make("n1", python=str(bare))
    engine.start([launch(0, "0")])
    (one,) = wait_exits(engine, 1)
    assert re.search("SH653.*No module named 'shoal'", str(one.start_error), re.DOTALL), str(one.start_error)


def test_the_output_of_a_login_shell_is_skipped(make, tmp_path):
    noisy = tmp_path / "noisy-python"
    noisy.write_text(f'#!/bin/sh\necho Welcome!\necho \'{{"kind":"ready"}}\'\nexec {sys.executable} "$@"\n')
    noisy.chmod(0o755)
    engine = make("n1", python=str(noisy))
    engine.start([launch(0, "7")])
    assert collect_exits(engine, 1) == {0: 7}
