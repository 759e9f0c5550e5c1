"""The engine section: hosts, a hostfile, and what does not go with workers apart."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.errors import ErrorGroup, ShoalError
from shoal.spec.engine import (
    LocalEngineConfig,
    NetworkConfig,
    RayEngineConfig,
    SlurmEngineConfig,
    SshEngineConfig,
    SshHost,
    parse_ports,
)
from shoal.spec.load import load_job, make_job, save_job
from shoal.spec.remote.engine_option import parse_engine
from shoal.spec.remote.hostfile import parse_hostfile
from tests.conftest import MLP

APART = {"kind": "local", "apart": True}


def make(tmp_path, **changes):
    (tmp_path / "models.py").write_text("def mlp(inputs, classes): ...")
    return make_job(MLP | changes, base_dir=tmp_path)


def test_short_forms_mean_the_same(tmp_path):
    assert make(tmp_path, engine="local").engine == LocalEngineConfig()
    assert make(tmp_path, engine={"apart": True}).engine == LocalEngineConfig(apart=True)
    short = make(tmp_path, engine={"kind": "ssh", "hosts": ["a", {"host": "me@b", "seats": 4, "python": "/x"}]}).engine
    assert short.hosts == [SshHost(host="a"), SshHost(host="me@b", seats=4, python="/x")]
    assert [short.python_of(one) for one in short.hosts] == ["python3", "/x"]


def test_a_hostfile_is_read_when_the_job_is(tmp_path):
    (tmp_path / "hosts").write_text("# ours\na slots=4\n\nme@b  # one\n10.0.0.7 slots=2 python=/opt/python\n")
    job = make(tmp_path, engine={"kind": "ssh", "hostfile": "hosts", "python": "/py"})
    assert [(one.host, one.seats, job.engine.python_of(one)) for one in job.engine.hosts] == [
        ("a", 4, "/py"), ("me@b", 1, "/py"), ("10.0.0.7", 2, "/opt/python"),
    ]  # fmt: skip
    (tmp_path / "hosts").unlink()
    save_job(job, tmp_path / "job.yaml")
    assert load_job(tmp_path / "job.yaml").engine == job.engine


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a slots=0", "line 1.*greater than 0"),
        ("a\n-oProxyCommand=x", "line 2.*not beginning with '-'"),
        ("a slots=two", "line 1.*neither"),
        ("a b c", "line 1.*neither"),
        ("", "names 0 hosts"),
        ("a\na", "named twice"),
    ],
)
def test_a_bad_hostfile_is_told_by_line(tmp_path, text, told):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ShoalError, match=f"SH106(.|\n)*{told}"):
        make(tmp_path, engine={"kind": "ssh", "hostfile": "hosts"})


def test_a_missing_hostfile_is_told(tmp_path):
    with pytest.raises(ShoalError, match=r"SH301.*hosts cannot be read"):
        make(tmp_path, engine={"kind": "ssh", "hostfile": "hosts"})


@pytest.mark.parametrize("host", ["", "-oProxyCommand=touch x", "a b", "a;b", "a\nb", "$(x)", "a`b`", "x" * 300, "a'b"])
def test_a_host_is_no_option_and_no_command(host):
    with pytest.raises(ValidationError):
        SshHost(host=host)


@pytest.mark.parametrize("engine", [{"kind": "ssh"}, {"kind": "ssh", "hosts": ["a"], "hostfile": "b"}])
def test_hosts_or_a_hostfile(tmp_path, engine):
    with pytest.raises(ShoalError, match="one of the two"):
        make(tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"network": {"ports": "40000-40100"}, "sync": "ddp"}, "SH110.*chooses its ports itself"),
        ({"network": {"ports": "40000-40100"}, "shard": "fsdp"}, "SH110.*chooses its ports itself"),
        ({"engine": {"kind": "local", "machines": 2}}, "SH107.*apart"),
    ],
)
def test_what_does_not_go_together_is_told(tmp_path, changes, told):
    with pytest.raises(ShoalError, match=f"(?s){told}"):
        make(tmp_path, **changes)


def test_servers_and_weights_go_with_workers_apart(tmp_path):
    (tmp_path / "weights.safetensors").touch()
    job = make(tmp_path, engine=APART | {"price": 0.5}, sync="server", init_from={"path": "weights.safetensors"})
    assert job.engine.price == 0.5


def test_the_engine_is_no_part_of_the_identity(tmp_path):
    assert make(tmp_path, engine=APART).sha256() == make(tmp_path).sha256()


@given(st.text(max_size=60))
def test_any_text_is_hosts_or_an_error(text):
    try:
        hosts = parse_hostfile(text)
    except ErrorGroup:
        return
    assert all(isinstance(one, SshHost) for one in hosts)
    SshEngineConfig(kind="ssh", hosts=list({one.host: one for one in hosts}.values()))


def test_the_kind_of_an_engine_can_be_chosen_and_keeps_its_own_fields(tmp_path):
    (tmp_path / "models.py").write_text("def mlp(inputs, classes): ...")
    save_job(make(tmp_path, engine={"kind": "slurm", "seats": 3}), tmp_path / "job.yaml")

    def chosen(*overrides):
        return load_job(tmp_path / "job.yaml", overrides=overrides).engine

    assert chosen("engine.kind=slurm") == SlurmEngineConfig(kind="slurm", seats=3)
    assert chosen("engine.kind=local") == LocalEngineConfig()
    assert chosen("engine.kind=ray", "engine.seats=2") == RayEngineConfig(kind="ray", seats=2)
    with pytest.raises(ErrorGroup, match=r"SH107.*hosts"):
        chosen("engine.kind=ssh")
    with pytest.raises(ErrorGroup, match=r"SH106.*no kind 'mesos'.*local, machines, ray, slurm, ssh"):
        chosen("engine.kind=mesos")


@pytest.mark.parametrize("option", ["partition=x", "-p x", "--nodes=3", "--jobid=1", "--a b\n", "--output=/etc/x"])
def test_options_of_srun_that_shoal_sets_or_that_are_none_are_refused(option):
    with pytest.raises(ValidationError):
        SlurmEngineConfig(kind="slurm", options=["--partition=gpu", option])


def test_a_notice_is_for_workers_apart(tmp_path):
    assert make(tmp_path, engine=APART | {"notice": "/run/going"}).engine.notice == "/run/going"
    with pytest.raises(ErrorGroup, match="SH107"):
        make(tmp_path, engine={"notice": "/run/going"})
    with pytest.raises(ErrorGroup, match="SH10"):
        make(tmp_path, engine=APART | {"notice": "ftp://x"})


def test_a_range_of_ports():
    assert parse_ports("40000-40002") == range(40000, 40003)
    assert list(parse_ports(None)) == [0]
    for text in ("40000", "2-1", "0-5", "1-65536", "a-b", "-1-5"):
        with pytest.raises(ValidationError, match="range of ports"):
            NetworkConfig(ports=text)


def test_an_option_names_an_engine_by_kind_by_fields_or_by_a_file(tmp_path):
    assert parse_engine("ray") == RayEngineConfig(kind="ray")
    inline = parse_engine("{kind: ssh, hosts: [a, {host: b, seats: 2}]}")
    assert inline == SshEngineConfig(kind="ssh", hosts=["a", {"host": "b", "seats": 2}])
    (tmp_path / "hosts").write_text("a\nb slots=2\n")
    (tmp_path / "cluster.yaml").write_text("kind: ssh\nhostfile: hosts\n")
    assert parse_engine(str(tmp_path / "cluster.yaml")) == inline, "the hostfile lies beside the file that names it"
    (tmp_path / "job.yaml").write_text("name: digits\nengine: {apart: true, machines: 2}\n")
    assert parse_engine(str(tmp_path / "job.yaml")) == LocalEngineConfig(apart=True, machines=2)
    (tmp_path / "short.yaml").write_text("engine: slurm\n")
    assert parse_engine(str(tmp_path / "short.yaml")) == SlurmEngineConfig(kind="slurm")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("warp", "SH609 --engine: there is no engine 'warp'"),
        ("sssh", "Did you mean 'ssh'?"),
        ("machines", "SH609 --engine: there is no engine 'machines'"),
        ("{kind: machines, daemon: x}", "SH609 --engine: there is no engine 'machines'"),
        ("ssh", "give `hosts` or `hostfile`, one of the two"),
        ("{kind: ssh, hosts: [a], seat: 3}", "--engine engine.seat"),
        ("{kind: ssh, hostfile: nowhere}", "nowhere cannot be read"),
        ("{kind: ssh", "--engine"),
        ("nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_bad_engine_option_is_told(text, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ShoalError, ErrorGroup), match=re.escape(told)):
        parse_engine(text)


def test_a_bad_field_of_an_engine_file_is_told_with_its_line(tmp_path):
    (tmp_path / "cluster.yaml").write_text("kind: ssh\nhosts: [a]\nseats: 3\n")
    with pytest.raises(ErrorGroup, match=r"cluster\.yaml:3 "):
        parse_engine(str(tmp_path / "cluster.yaml"))
