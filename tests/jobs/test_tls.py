"""Whole runs whose members meet over TCP, with somebody on the way who records everything."""

import contextlib
import json

import pytest

from shoal.errors import ShoalError
from shoal.fleet.contact import read_contact
from shoal.jobs import harbour, helm, wishes
from shoal.jobs import join as joining
from shoal.spec.view import Address
from shoal.wire import handshake, tls
from shoal.wire.door import call_host
from shoal.wire.handshake import TlsError
from tests.conftest import MLP
from tests.jobs.disturbed import JOBS, assert_same, calm, fired, in_time, rows, script
from tests.jobs.driven import driven
from tests.jobs.test_join import ENDLESS, LONG
from tests.wire.authority import Authority, needs_openssl
from tests.wire.relay import Relay

pytestmark = needs_openssl


@pytest.fixture(autouse=True)
def soon():
    with in_time(120):
        yield
    tls.use(None)


@pytest.fixture
def certificates(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority") / "ours").member("member")


class Far:
    """In the place of `Address`: everybody seems to be on a host of its own, behind a relay."""

    def __init__(self):
        self.relays = {}

    def model_validate(self, said):
        address = Address.model_validate(said)
        if address.port not in self.relays:
            self.relays[address.port] = Relay((address.host, address.port))
        return address.model_copy(update={"host_id": "far", "unix": "", "port": self.relays[address.port].address[1]})

    @property
    def tape(self):
        return b"".join(relay.tape for relay in self.relays.values())

    def close(self):
        for relay in self.relays.values():
            relay.close()


@pytest.fixture
def far(monkeypatch):
    with contextlib.closing(Far()) as made:
        monkeypatch.setattr(helm, "Address", made)
        monkeypatch.setattr(harbour, "Address", made)
        yield made


SYNCS = {"lanes": {"kind": "lanes"}, "server": {"kind": "server", "servers": 2, "backups": 1}}


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("sync", SYNCS)
def test_the_same_bits_and_nothing_to_read_on_the_way(run, far, certificates, sync, encrypted):
    engine = {"tls": str(certificates)} if encrypted else {}
    outcome = run(JOBS["mlp"], workers=2, sync=SYNCS[sync], engine=engine)
    assert_same(outcome, calm(run, JOBS["mlp"]))
    assert not rows(outcome, "worker_died")
    tape = far.tape
    assert len(tape) > 100_000, "everything went through the relays"
    assert {handshake.MAGIC in tape, b"purpose" in tape} == {not encrypted}


def test_a_killed_worker_is_missed_at_once(run, far, place, certificates):
    line = "kill worker 1 at step 7 in exchange"
    job = JOBS["gpt"]
    outcome = run(job, workers=3, watch=script(place, line), engine={"tls": str(certificates)})
    assert_same(outcome, calm(run, job))
    assert fired(place) == {line}
    assert not rows(outcome, "put_out"), "nobody had to be suspected"


@pytest.mark.long
def test_users_and_joiners_come_in_with_certificates_alone(
    run,
    place,
    elsewhere,
    their_nursery,
    certificates,
    tmp_path_factory,
):
    ready = place / "ready"
    watch = [{"name": "pace.py:Dawdle", "args": {"seconds": 0.2, "until": str(ready)}}]
    stranger = Authority(tmp_path_factory.mktemp("others") / "theirs").member("member")
    said = []

    def join(directory):
        def show(text):
            said.append(text)
            if "trains from step" in text:
                ready.touch()

        token = wishes.token(it.paths)
        return joining.join(it.address, token, base_dir=elsewhere, tls_dir=directory, show=show, nursery=their_nursery)

    with driven(run, MLP, watch=watch, engine={"tls": str(certificates)}, **LONG) as it:
        it.trains(1)
        with pytest.raises(ShoalError, match=r"SH620 127.*it uses TLS, and we do not"):
            join(None)
        with pytest.raises(ShoalError, match=r"SH620 127.*its certificate is not accepted"):
            join(stranger)
        with pytest.raises(ShoalError, match=r"SH619 --tls.*cert\.pem"):
            join(place)
        assert wishes.scale(it.paths, 1).wanted == 1
        assert join(certificates) == 0, said
    receipt = it.outcome.result().receipt
    assert receipt.carried["worker-1"].samples > 0
    assert receipt.weights_sha256 == calm(run, MLP, **LONG).weights_sha256


def test_certificates_at_a_run_without_tls(run, certificates, their_nursery):
    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        with pytest.raises(ShoalError, match=r"SH620 127.*it does not use TLS, and we do"):
            joining.join(
                it.address,
                wishes.token(it.paths),
                base_dir=".",
                tls_dir=certificates,
                show=print,
                nursery=their_nursery,
            )
        wishes.stop(it.paths)
    assert it.outcome.result().status == "stopped"


def test_a_plain_caller_costs_a_run_nothing(run, certificates):
    def look(paths, event, picture):
        if event.kind == "joined" and not asked:
            contact = read_contact(paths.control)
            tls.use(None)  # this process has its door open already
            with pytest.raises(TlsError, match="it uses TLS"):
                call_host(contact.host, contact.port, contact.token, json.dumps({"role": "user"}).encode())
            asked.append(1)

    asked = []
    outcome = run(JOBS["mlp"], workers=2, engine={"tls": str(certificates)}, look=look)
    assert_same(outcome, calm(run, JOBS["mlp"]))
    assert asked
