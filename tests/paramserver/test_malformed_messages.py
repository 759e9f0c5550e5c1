"""Nonsense from one that knows the token costs only its connection: the server lives, and serves others."""

import contextlib
import fcntl
import json
import os
import socket
import struct
from functools import cache
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.checkpoint import state_format
from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.collectives.transport.greeting import Greeting
from shoal.collectives.transport.shared_memory import SharedMemory
from shoal.net.errors import LinkError
from shoal.net.handshake import receive_exactly
from shoal.paramserver import connection, protocol
from shoal.paramserver.chunk_state import chunk_state_from_replica, group_hyperparameters, param_group_indices
from shoal.paramserver.protocol import HEADER_BYTES, ServerFrame, unpack
from shoal.spec.chunk_table import ChunkTable, build_pieces
from shoal.spec.view import View
from tests.paramserver.cluster import TOKEN, Cluster
from tests.paramserver.test_bit_exact import assert_exact
from tests.paramserver.workloads import Workload

MAX_GROWTH_BYTES = 700 << 20
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
KINDS = [*range(8), *range(15, 25), *range(31, 38), 255]
WORKLOAD = Workload(norm=0.5)

far = st.sampled_from([0, 1, 2, 3, 5, 77, (1 << 16) + 1, (1 << 31) - 1, (1 << 32) - 1])
further = far | st.sampled_from([(1 << 33) - 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
odd = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e300, float("inf"), float("nan")])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))


@cache
def reference_model():
    """A replica of the model, and what a worker says of it."""
    replica = WORKLOAD.replica()
    hyper = [
        {k: v for k, v in group.items() if k != "initial_lr"} for group in group_hyperparameters(replica.optimizer)
    ]
    model = {
        "layout": replica.layout.describe(),
        "optimizer": "AdamW",
        "groups": param_group_indices(replica),
        "hyper": hyper,
    }
    return replica, model


def entering(seat):
    return {"carries": {str(seat): [0, 1, 2, 3]}, "model": reference_model()[1], "lead": True, "ready": True}


def mutations(words):
    """Words with something else in one place."""
    paths = list(_paths(words))

    @st.composite
    def draw_one(draw):
        text = json.dumps(words)
        copy = json.loads(text)
        *way, last = draw(st.sampled_from(paths))
        place = copy
        for key in way:
            place = place[key]
        place[last] = draw(values)
        return json.dumps(copy).encode()

    return draw_one()


def _paths(value, way=()):
    if way:
        yield way
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(part, (*way, key))


BOMBS = [
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    b'{"groups":[' + b'"ab",' * 500_000 + b'"ab"],"clip_value":1}',
    b'{"count":' + b"9" * 4000 + b"}",
    b'{"count":1e999,"coefficient":NaN}',
    b"\xff\xfe{}",
    b"null",
    b"{}",
]


def payloads(seat):
    words = st.binary(max_size=300) | st.sampled_from(BOMBS) | mutations(entering(seat)) | values.map(_told)
    return (
        words
        | mutations({"groups": reference_model()[1]["hyper"], "clip_value": None})
        | mutations({"count": 1.0, "coefficient": 0.5})
    )


def _told(value):
    return json.dumps(value).encode(errors="surrogatepass")


def malformed_frames(seat, *, view=further, table=far):
    """Frames with what follows them; the size that is told may be another one."""
    frame = st.builds(
        ServerFrame,
        kind=st.sampled_from(KINDS),
        chunk_table_number=table,
        piece=st.integers(0, 12) | far,
        view=view.filter(lambda v: v < 1 << 32),
        seat=far,
        step=further,
        flags=st.integers(0, 255),
        size=further,
        number=further,
        scale=odd,
        divisor=odd,
        coefficient=odd,
    )
    honest = st.tuples(frame, payloads(seat)).map(lambda it: (it[0]._replace(size=len(it[1])), it[1]))
    return honest | st.tuples(frame, payloads(seat))


def descriptor(kind):
    """Something to send along."""
    if kind == "arena":
        return SharedMemory(4096).fd
    if kind == "empty":
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return fd
    return os.open("/dev/null", os.O_RDONLY) if kind == "file" else os.memfd_create("x")


def send_raw(address, seat, purpose, sayings, *, fd=None, cut=0, holds=False):
    """Say all that, perhaps not to the end, and wait until the server has had enough."""
    sock = connect_to_peer(address, TOKEN, Greeting(purpose=purpose, seat=seat, view=0))
    raw = b"".join(frame.pack() + content for frame, content in sayings)
    raw = raw[: len(raw) - cut]
    with sock, contextlib.suppress(OSError):
        sock.settimeout(0.1 if holds else 20)  # who is held is not read to the end
        if fd is not None and sock.family == socket.AF_UNIX:
            socket.send_fds(sock, [raw[:1]], [fd])
            raw = raw[1:]
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        while not holds and sock.recv(1 << 16):
            pass


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def assert_still_serving(cluster, seat, before):
    assert cluster.request(seat, "dump")["failures"] == 0
    assert peak_bytes(cluster.children[seat].pid) - before < MAX_GROWTH_BYTES


def test_malformed_messages_from_outside_the_view():
    """From seats that have no part in it, while a worker trains."""
    with Cluster(WORKLOAD, workers=1) as cluster:
        cluster.begin()
        cluster.run_until(lambda: cluster.step >= 1)
        cluster.send(0, "pause")
        before = peak_bytes(cluster.children[100].pid)
        address = cluster.placement.chunk_table.addresses[100]

        @EXAMPLES
        @given(
            st.lists(malformed_frames(900), min_size=1, max_size=4),
            st.sampled_from(["push", "chain"]),
            st.none() | st.sampled_from(["arena", "empty", "file", "unsealed"]),
            st.just(0) | st.integers(0, 100),
            st.booleans(),
        )
        def pour(sayings, purpose, sent, cut, tcp):
            fd = None if sent is None else descriptor(sent)
            to = address.model_copy(update={"host_id": "x"}) if tcp else address
            unknown_view = [frame for frame, _ in sayings if frame.kind == protocol.ENTER and frame.view > 1]
            holds = bool(unknown_view) or any(frame.chunk_table_number > 1 for frame, _ in sayings)
            send_raw(to, 900, purpose, sayings, fd=fd, cut=cut, holds=holds)
            if fd is not None:
                os.close(fd)
            assert_still_serving(cluster, 100, before)

        pour()
        cluster.send(0, "go")
        assert_exact(cluster, cluster.finish())
        cluster.assert_backups_equal()


def part_of(server, other):
    """A table in which the server leads, follows and is followed by the other."""
    cuts = reference_model()[0].layout.chunk_offsets
    chains = [([100], [900, 100], [100, 901])[i % 3] for i in range(len(cuts) - 1)]
    addresses = {100: server, 900: other, 901: other}
    return ChunkTable(number=1, cuts=cuts, chains=chains, filling=[[] for _ in chains], addresses=addresses)


def states():
    """Of some chunks, with something else in one place."""

    @st.composite
    def draw_one(draw):
        replica, _ = reference_model()
        first = draw(st.integers(0, len(replica.layout.chunk_offsets) - 2))
        state = chunk_state_from_replica(
            replica, replica.layout, first, first + 1, step=draw(st.integers(0, 3)), lanes=4
        )
        name = draw(st.sampled_from([*state, "none"]))
        if name in state:
            state[name] = draw(st.sampled_from([None, 3, "x", [], torch.zeros(0), torch.full((1,), -1), [{}], [None]]))
        elif draw(st.booleans()) and state["runs"]:
            state["runs"][0]["state"] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}
        return state_format.pack_state(state)

    return draw_one()


def plausible_frames(table):
    """What one with a part in the view could say, with right sizes."""
    found = build_pieces(table)

    @st.composite
    def draw_one(draw):
        piece = draw(st.sampled_from(found))
        kind = draw(
            st.sampled_from(
                [protocol.PUSH, protocol.SET, protocol.RECORD, protocol.PULL, protocol.APPLY, protocol.HYPER]
            )
        )
        number, flags = draw(st.integers(0, 2)), draw(st.integers(0, 255))
        step = draw(st.integers(0, 3) | further)
        size = piece.stop - piece.start
        content = {
            protocol.PUSH: bytes(size * number.bit_count() if not flags & (protocol.SHARED | protocol.EMPTY) else 0),
            protocol.RECORD: b"" if flags & protocol.EMPTY else bytes(size),
        }.get(kind)
        if kind == protocol.SET:
            content = draw(states())
        if kind in (protocol.APPLY, protocol.HYPER):
            content = draw(payloads(900))
        content = content or b""
        return ServerFrame(kind, 1, piece.index, 1, 900, step, flags, len(content), number), content

    return draw_one()


def frame_sequences(meant, meaningless):
    """Often all of them could be meant."""
    return st.lists(meant, min_size=1, max_size=5) | st.lists(meant | meaningless, min_size=1, max_size=5)


def test_malformed_messages_from_a_member():
    """It may spoil what the server holds, and nothing else."""
    other = Endpoint(TOKEN, services={"chain": _answer_with_noise}, keep_open=("chain",))
    with Cluster(WORKLOAD, workers=0, servers=1, backups=0) as cluster, contextlib.closing(other):
        cluster.run_until(lambda: 100 in cluster.placement._servers)
        address = cluster.placement._servers[100]
        table = part_of(address, other.address)
        cluster.send(100, "table", table)
        cluster.send(100, "view", View(number=1, carries={900: [0, 1, 2, 3]}))
        cluster.request(100, "learnt")
        words = json.dumps(entering(900)).encode()
        hyper = json.dumps({"groups": reference_model()[1]["hyper"], "clip_value": None}).encode()
        start = [
            (ServerFrame(protocol.ENTER, 1, view=1, seat=900, size=len(words)), words),
            (ServerFrame(protocol.HYPER, 1, view=1, seat=900, size=len(hyper)), hyper),
        ]
        join = json.dumps({"model": reference_model()[1]}).encode()
        joining = [(ServerFrame(protocol.JOIN, 1, seat=900, size=len(join)), join), start[1]]
        for piece in build_pieces(table):
            content = state_format.pack_state(
                chunk_state_from_replica(
                    reference_model()[0], reference_model()[0].layout, piece.first_chunk, piece.end_chunk, lanes=4
                )
            )
            setting = ServerFrame(protocol.SET, 1, piece.index, 1, 900, size=len(content))
            (start if piece.primary == 100 else joining).append((setting, content))
        before = peak_bytes(cluster.children[100].pid)

        @EXAMPLES
        @given(
            frame_sequences(plausible_frames(table), malformed_frames(900, view=st.just(1), table=st.just(1))),
            st.booleans(),
        )
        def pour(sayings, chain):
            send_raw(address, 900, "chain" if chain else "push", [*(joining if chain else start), *sayings])
            assert_still_serving(cluster, 100, before)

        pour()


def _answer_with_noise(sock, hello):
    """A successor that knows nothing of acknowledgements."""
    with sock, contextlib.suppress(OSError, LinkError):
        sock.settimeout(20)
        head = unpack(receive_exactly(sock, HEADER_BYTES), protocol.PREDECESSOR_KINDS)
        receive_exactly(sock, head.size)
        stamps = struct.pack("<q", -1) * 2 * (len(reference_model()[0].layout.chunk_offsets) - 1)
        sock.sendall(ServerFrame(protocol.STAMPS, 1, seat=901, size=len(stamps)).pack() + stamps)
        for piece in range(40):
            sock.sendall(ServerFrame(protocol.ACK, 1, piece, number=(1 << 63) + piece).pack())


def test_malformed_messages_before_any_client_has_entered():
    """The server knows its table, and of the model what it is told now and then."""
    with Cluster(WORKLOAD, workers=0, servers=1, backups=0) as cluster:
        cluster.run_until(lambda: 100 in cluster.placement._servers)
        address = cluster.placement._servers[100]
        table = part_of(address, address)
        cluster.send(100, "table", table)
        cluster.request(100, "learnt")
        before = peak_bytes(cluster.children[100].pid)
        join = json.dumps({"model": reference_model()[1]}).encode()
        joining = (ServerFrame(protocol.JOIN, 1, seat=900, size=len(join)), join)
        to_nobody = plausible_frames(table).map(lambda it: (it[0]._replace(view=0), it[1]))

        @EXAMPLES
        @given(
            frame_sequences(to_nobody, malformed_frames(900, view=st.just(0), table=st.just(1))),
            st.sampled_from(["push", "chain"]),
        )
        def pour(sayings, purpose):
            send_raw(address, 900, purpose, sayings)
            assert_still_serving(cluster, 100, before)

        pour()
        send_raw(address, 900, "chain", [joining])
        pour()


def test_one_who_asks_and_never_reads_is_not_heard():
    most = 1 << 20
    with patch.object(connection, "MAX_UNREAD_BYTES", most), Cluster(WORKLOAD, workers=1) as cluster:
        cluster.begin()
        cluster.run_until(lambda: cluster.step >= 1)
        table = cluster.placement.chunk_table
        mine = [piece.index for piece in build_pieces(table) if piece.primary == 100]
        asked = 100 * b"".join(ServerFrame(protocol.PULL, 1, piece, flags=protocol.WHOLE).pack() for piece in mine)
        with connect_to_peer(table.addresses[100], TOKEN, Greeting(purpose="push", seat=900, view=0)) as sock:
            sock.setblocking(False)
            rest, unsent, deaf = asked, 0, 0
            while deaf < 300:
                with contextlib.suppress(BlockingIOError):
                    rest = rest[sock.send(rest) :] or asked
                before, unsent = unsent, cluster.request(100, "unsent")
                assert unsent < 2 * most
                deaf = deaf + 1 if before == unsent >= most else 0
            assert_exact(cluster, cluster.finish())
