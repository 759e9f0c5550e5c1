"""The files behind `engine.tls`: who we are (cert.pem, key.pem), and who vouches for the others (ca.pem)."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError, error
from shoal.spec.job import Job
from shoal.spec.nearby import nearby

FILES = ("cert.pem", "key.pem", "ca.pem")


class Certificates(NamedTuple):
    """As contexts of TLS 1.3 for both ends of a connection. Either end shows its certificate, and wants one that the
    same authority signed; names and addresses in it are not looked at, for workers come from anywhere."""

    serving: ssl.SSLContext
    calling: ssl.SSLContext


def certificates_of(job: Job) -> Certificates | None:
    """None if the job does not use TLS. SH619 if it cannot."""
    if job.engine.tls is None:
        return None
    return read_certificates(Path(job.base_dir) / Path(job.engine.tls).expanduser(), where="engine.tls")


def read_certificates(directory: Path, *, where: str) -> Certificates:
    """Checked as far as one can alone: a peer with the same files would accept us, as caller and as called."""
    for name in FILES:
        if not (directory / name).is_file():
            fix = nearby(directory / name) or f"Put {', '.join(FILES)} there."
            raise error("SH619", f"no such file: {directory / name}", where=where, fix=fix)
    made = Certificates(
        _context(directory, ssl.PROTOCOL_TLS_SERVER, where=where),
        _context(directory, ssl.PROTOCOL_TLS_CLIENT, where=where),
    )
    try:
        _talk_to_itself(made)
    except ssl.SSLCertVerificationError as failure:
        message = f"{directory / 'cert.pem'} is not accepted by those who trust ca.pem: {failure.verify_message}"
        raise error("SH619", message, where=where) from failure
    except ssl.SSLError as failure:
        raise error("SH619", f"no connection can be made with {directory}: {failure}", where=where) from failure
    return made


def _context(directory: Path, protocol: int, *, where: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes a session, and a caller that never reads would not take them
    certificate, key, authority = (directory / name for name in FILES)
    try:
        context.load_cert_chain(certificate, key, password="")  # else it would ask on the terminal
    except (OSError, ValueError) as failure:
        raise _unfit(certificate, key, failure).at(where) from failure
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as failure:
        raise error("SH619", f"{authority} holds no certificate: {_reason(failure)}", where=where) from failure
    return context


def _unfit(certificate: Path, key: Path, failure: Exception) -> ShoalError:
    if "KEY_VALUES_MISMATCH" in str(failure):
        return error("SH619", f"{key} is not the key of {certificate.name}")
    return error("SH619", f"{certificate} and {key.name} (without a password) cannot be read: {_reason(failure)}")


def _reason(failure: Exception) -> str:
    return getattr(failure, "reason", None) or getattr(failure, "strerror", None) or str(failure)


def _talk_to_itself(made: Certificates) -> None:
    """A handshake in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [made.calling.wrap_bio(back, there), made.serving.wrap_bio(there, back, server_side=True)]
    while ends:
        try:
            ends[0].do_handshake()
            ends.pop(0)
        except ssl.SSLWantReadError:
            ends.reverse()
