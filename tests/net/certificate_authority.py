"""Certificates for the tests, made by the openssl command; without it, the tests that need them are skipped."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class CertificateAuthority:
    """Signs certificates; each of its members has a directory as `network.tls` wants it."""

    def __init__(self, place: Path):
        self.directory = place
        place.mkdir(parents=True)
        named = ["-days", "30", "-subj", f"/CN={place.name}"]
        self._openssl("req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.pem", *named)

    def issue(self, name: str, *, days: int = 30) -> Path:
        """`days` below 0: it has expired."""
        there = self.directory / name
        there.mkdir()
        self._openssl("req", *KEY, "-keyout", f"{name}/key.pem", "-out", f"{name}/csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days)]
        self._openssl("x509", "-req", "-in", f"{name}/csr", *signed, "-out", f"{name}/cert.pem")
        shutil.copy(self.directory / "ca.pem", there)
        return there

    def encrypt_key(self, member: Path) -> None:
        """Its key needs a password from now on."""
        key = str(member / "key.pem")
        self._openssl("pkcs8", "-topk8", "-in", key, "-passout", "pass:secret", "-out", key + ".locked")
        Path(key + ".locked").replace(key)

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.directory, check=True, capture_output=True)
