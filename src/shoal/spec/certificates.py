"""The files behind `network.tls`: our certificate and key (cert.pem, key.pem), and the authority that signs all
certificates of the run (ca.pem)."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError, error, suggest_path
from shoal.spec.job import Job

CERTIFICATE_FILES = ("cert.pem", "key.pem", "ca.pem")


class TlsContexts(NamedTuple):
    """TLS 1.3 contexts for both ends of a connection. Each end shows its certificate and requires one that the same
    authority signed. Names and addresses in certificates are not checked, because workers may join from any host."""

    server_context: ssl.SSLContext
    client_context: ssl.SSLContext


def tls_contexts_for(job: Job) -> TlsContexts | None:
    """None if the job does not use TLS. SH619 if it cannot."""
    if job.network.tls is None:
        return None
    return load_tls_contexts(Path(job.base_dir) / Path(job.network.tls).expanduser(), where="network.tls")


def load_tls_contexts(directory: Path, *, where: str) -> TlsContexts:
    """Load the contexts and check that a peer with the same files would accept them, as client and as server."""
    for name in CERTIFICATE_FILES:
        if not (directory / name).is_file():
            fix = suggest_path(directory / name) or f"Put {', '.join(CERTIFICATE_FILES)} there."
            raise error("SH619", f"no such file: {directory / name}", where=where, fix=fix)
    made = TlsContexts(
        _context(directory, ssl.PROTOCOL_TLS_SERVER, where=where),
        _context(directory, ssl.PROTOCOL_TLS_CLIENT, where=where),
    )
    try:
        _self_handshake(made)
    except ssl.SSLCertVerificationError as failure:
        message = f"{directory / 'cert.pem'} is not accepted by peers that trust ca.pem: {failure.verify_message}"
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
        context.num_tickets = 0  # sessions are never resumed, and a client that never reads would block on them
    certificate, key, authority = (directory / name for name in CERTIFICATE_FILES)
    try:
        context.load_cert_chain(certificate, key, password="")  # without a password OpenSSL would ask on the terminal
    except (OSError, ValueError) as failure:
        raise _certificate_error(certificate, key, failure).at(where) from failure
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as failure:
        raise error("SH619", f"{authority} holds no certificate: {_reason(failure)}", where=where) from failure
    return context


def _certificate_error(certificate: Path, key: Path, failure: Exception) -> ShoalError:
    if "KEY_VALUES_MISMATCH" in str(failure):
        return error("SH619", f"{key} is not the key of {certificate.name}")
    return error("SH619", f"{certificate} and {key.name} (without a password) cannot be read: {_reason(failure)}")


def _reason(failure: Exception) -> str:
    return getattr(failure, "reason", None) or getattr(failure, "strerror", None) or str(failure)


def _self_handshake(contexts: TlsContexts) -> None:
    """Do a TLS handshake with ourselves, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts.client_context.wrap_bio(back, there),
        contexts.server_context.wrap_bio(there, back, server_side=True),
    ]
    while ends:
        try:
            ends[0].do_handshake()
            ends.pop(0)
        except ssl.SSLWantReadError:
            ends.reverse()
