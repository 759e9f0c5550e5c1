"""`network.tls`: whatever is wrong with the files is told before anything starts."""

import shutil

import pytest

from shoal.errors import ShoalError
from shoal.spec.certificates import load_tls_contexts, tls_contexts_for
from shoal.spec.load import load_job, make_job, save_job
from tests.conftest import MLP
from tests.net.certificate_authority import CertificateAuthority, needs_openssl

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return CertificateAuthority(tmp_path_factory.mktemp("authority") / "ours")


@pytest.fixture(scope="module")
def member(authority):
    return authority.issue("member")


@pytest.fixture
def files(member, tmp_path):
    """A copy to be spoilt."""
    return shutil.copytree(member, tmp_path / "tls")


def tls_failure(directory):
    with pytest.raises(ShoalError) as failure:
        load_tls_contexts(directory, where="network.tls")
    assert (failure.value.code, failure.value.where) == ("SH619", "network.tls")
    assert failure.value.fix
    return failure.value.message


def test_good_files(files):
    load_tls_contexts(files, where="network.tls")


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_a_missing_file_is_named(files, name):
    (files / name).unlink()
    assert tls_failure(files) == f"no such file: {files / name}"


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_a_file_with_something_else_is_named(files, name):
    (files / name).write_text("something else")
    assert name in tls_failure(files)


def test_a_key_of_another_certificate(files, authority):
    shutil.copy(authority.issue("other") / "key.pem", files)
    assert tls_failure(files) == f"{files / 'key.pem'} is not the key of cert.pem"


def test_an_expired_certificate(authority):
    assert "certificate has expired" in tls_failure(authority.issue("late", days=-1))


def test_a_certificate_of_another_authority(files, tmp_path):
    shutil.copy(CertificateAuthority(tmp_path / "theirs").directory / "ca.pem", files)
    assert "cert.pem is not accepted by peers that trust ca.pem: unable to get local issuer" in tls_failure(files)


def test_a_key_with_a_password_is_not_asked_for(files, authority):
    authority.encrypt_key(files)
    assert "without a password" in tls_failure(files)


def test_it_is_checked_with_the_job_and_its_path_starts_there(files, job_dir):
    data = MLP | {"network": {"tls": "tls"}}
    job = make_job(data, base_dir=job_dir)
    assert job.network.tls == str(files)
    assert tls_contexts_for(job)
    (files / "ca.pem").unlink()
    with pytest.raises(ShoalError, match=r"SH619 network\.tls.*ca\.pem"):
        make_job(data, base_dir=job_dir)
    save_job(job, job_dir / "saved.yaml")
    assert load_job(job_dir / "saved.yaml", check_names=False) == job, "what a run does not need any more is not missed"


def test_what_is_trained_does_not_depend_on_it(files, job_dir):
    plain, encrypted = (make_job(MLP | {"network": network}, base_dir=job_dir) for network in ({}, {"tls": "tls"}))
    assert tls_contexts_for(plain) is None
    assert plain.sha256() == encrypted.sha256()


def test_ddp_cannot_be_encrypted(files, job_dir):
    with pytest.raises(ShoalError, match=r"SH110 network\.tls.*all-reduce cannot be encrypted"):
        make_job(MLP | {"network": {"tls": "tls"}, "sync": "ddp"}, base_dir=job_dir)
