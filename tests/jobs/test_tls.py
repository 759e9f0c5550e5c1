"""Whole runs whose members meet over TCP, with somebody on the way who records everything."""

import contextlib
import json

import pytest

from shoal.errors import ShoalError
from shoal.fleet import messages
from shoal.fleet.driver_address import read_driver_address
from shoal.jobs import commands, server_group, worker_group
from shoal.jobs import join as joining
from shoal.net import handshake
from shoal.net.errors import TlsError
from shoal.net.listener import connect_host
from shoal.spec.trust import CodeTrust
from tests.conftest import MLP
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import (
    JOBS,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    reference_receipt,
    time_limit,
)
from tests.jobs.test_join import ENDLESS, LONG
from tests.net.certificate_authority import CertificateAuthority, needs_openssl
from tests.net.recording_proxy import RecordingProxy

pytestmark = needs_openssl


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(120):
        yield


@pytest.fixture
def certificates(tmp_path_factory):
    return CertificateAuthority(tmp_path_factory.mktemp("authority") / "ours").issue("member")


class ProxiedHellos:
    """In the place of `parse_hello`: everybody seems to be on a host of its own, behind a proxy."""

    def __init__(self):
        self.proxies = {}

    def parse_hello(self, fields):
        hello = messages.parse_hello(fields)
        address = hello.address
        if address.port not in self.proxies:
            self.proxies[address.port] = RecordingProxy((address.host, address.port))
        port = self.proxies[address.port].address[1]
        far = address.model_copy(update={"host_id": "far", "unix": "", "port": port})
        return hello.model_copy(update={"address": far})

    @property
    def recorded(self):
        return b"".join(proxy.recorded for proxy in self.proxies.values())

    def close(self):
        for proxy in self.proxies.values():
            proxy.close()


@pytest.fixture
def proxied(monkeypatch):
    with contextlib.closing(ProxiedHellos()) as made:
        monkeypatch.setattr(worker_group, "parse_hello", made.parse_hello)
        monkeypatch.setattr(server_group, "parse_hello", made.parse_hello)
        yield made


SYNCS = {"lanes": {"kind": "lanes"}, "server": {"kind": "server", "servers": 2, "backups": 1}}


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("sync", SYNCS)
def test_the_same_bits_and_nothing_to_read_on_the_way(run, proxied, certificates, sync, encrypted):
    network = {"tls": str(certificates)} if encrypted else {}
    outcome = run(JOBS["mlp"], workers=2, sync=SYNCS[sync], network=network)
    assert_same(outcome, reference_receipt(run, JOBS["mlp"]))
    assert not events_of_kind(outcome, "worker_died")
    recorded = proxied.recorded
    assert len(recorded) > 100_000, "everything went through the proxies"
    assert {handshake.MAGIC in recorded, b"purpose" in recorded} == {not encrypted}


def test_a_killed_worker_is_missed_at_once(run, proxied, job_dir, certificates):
    line = "kill worker 1 at step 7 in exchange"
    job = JOBS["gpt"]
    outcome = run(job, workers=3, watchers=fault_script(job_dir, line), network={"tls": str(certificates)})
    assert_same(outcome, reference_receipt(run, job))
    assert fired_faults(job_dir) == {line}
    assert not events_of_kind(outcome, "evicted"), "nobody had to be suspected"


@pytest.mark.long
def test_users_and_joiners_come_in_with_certificates_alone(
    run,
    job_dir,
    copied_job_dir,
    second_fork_server,
    certificates,
    tmp_path_factory,
):
    ready = job_dir / "ready"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    stranger = CertificateAuthority(tmp_path_factory.mktemp("others") / "theirs").issue("member")
    said = []

    def join(directory):
        def show(text):
            said.append(text)
            if "trains from step" in text:
                ready.touch()

        token = commands.read_token(it.paths)
        return joining.join(
            it.address,
            token,
            base_dir=copied_job_dir,
            tls_dir=directory,
            trust=CodeTrust(everything=True),
            show=show,
            fork_server=second_fork_server,
        )

    with background_run(run, MLP, watchers=watchers, network={"tls": str(certificates)}, **LONG) as it:
        it.wait_for_workers(1)
        with pytest.raises(ShoalError, match=r"SH620 127.*the other side uses TLS"):
            join(None)
        with pytest.raises(ShoalError, match=r"SH620 127.*the certificate of the other side is not accepted"):
            join(stranger)
        with pytest.raises(ShoalError, match=r"SH619 --tls.*cert\.pem"):
            join(job_dir)
        assert commands.scale(it.paths, 1).wanted == 1
        assert join(certificates) == 0, said
    receipt = it.outcome.result().receipt
    assert receipt.carried["worker-1"].samples > 0
    assert receipt.weights_sha256 == reference_receipt(run, MLP, **LONG).weights_sha256


def test_certificates_at_a_run_without_tls(run, certificates, second_fork_server):
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        with pytest.raises(ShoalError, match=r"SH620 127.*the other side does not use TLS"):
            joining.join(
                it.address,
                commands.read_token(it.paths),
                base_dir=".",
                tls_dir=certificates,
                show=print,
                fork_server=second_fork_server,
            )
        commands.stop(it.paths)
    assert it.outcome.result().status == "stopped"


def test_a_plain_caller_costs_a_run_nothing(run, certificates):
    def look(paths, event, run_state):
        if event.kind == "joined" and not asked:
            address = read_driver_address(paths.driver_address)
            with pytest.raises(TlsError, match="the other side uses TLS"):
                connect_host(address.host, address.port, address.token, json.dumps({"role": "user"}).encode())
            asked.append(1)

    asked = []
    outcome = run(JOBS["mlp"], workers=2, network={"tls": str(certificates)}, look=look)
    assert_same(outcome, reference_receipt(run, JOBS["mlp"]))
    assert asked
