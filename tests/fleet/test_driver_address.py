"""The file in which a driver says where it is."""

import os
import stat

import pytest

from shoal.fleet.driver_address import DriverAddress, read_driver_address, write_driver_address

CONTACT = DriverAddress("127.0.0.1", 4000, "very-secret")


def test_what_is_written_is_read_and_only_the_owner_can(tmp_path):
    old_mask = os.umask(0)
    try:
        write_driver_address(tmp_path / "contact.json", CONTACT)
    finally:
        os.umask(old_mask)
    assert read_driver_address(tmp_path / "contact.json") == CONTACT
    assert stat.S_IMODE((tmp_path / "contact.json").stat().st_mode) == 0o600


def test_a_new_driver_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "contact.json"
    path.write_text("anybody could read this")
    path.chmod(0o644)
    write_driver_address(path, CONTACT)
    write_driver_address(path, DriverAddress("::1", 4001, "other"))
    assert read_driver_address(path) == DriverAddress("::1", 4001, "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["contact.json"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "contact.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_driver_address(tmp_path / "contact.json", CONTACT)
    assert os.listdir(tmp_path) == ["contact.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"host": "a"}',
        '{"host": "a", "port": "1", "token": "t"}',
        '{"host": 1, "port": 1}',
        "\0",
    ],
)
def test_half_a_driver_address_is_none(tmp_path, content):
    assert read_driver_address(tmp_path / "contact.json") is None
    (tmp_path / "contact.json").write_text(content)
    assert read_driver_address(tmp_path / "contact.json") is None


def test_a_reader_sees_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "contact.json"
    for port in range(1, 50):
        write_driver_address(path, DriverAddress("a", port, "t" * port))
        assert read_driver_address(path) == DriverAddress("a", port, "t" * port)


def test_the_token_is_not_shown():
    assert "very-secret" not in f"{CONTACT} {CONTACT!r}"
