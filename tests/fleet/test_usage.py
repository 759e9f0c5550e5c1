"""What a worker uses, from files of the kernel."""

from shoal.fleet import usage
from shoal.fleet.messages import UsageFields
from shoal.fleet.usage import INTERVAL_S, UsageSampler, memory_of, own_cgroups, room_bytes


def test_a_sample_every_two_seconds():
    now, moved = [0.0], [0]
    sampler = UsageSampler(lambda: moved[0], lambda: (5, 10), clock=lambda: now[0])
    assert sampler.sample() is None
    now[0], moved[0] = INTERVAL_S, 1000
    found = sampler.sample()
    assert found["net_bytes_s"] == 1000 / INTERVAL_S
    assert found["rss_bytes"] > 10**6
    assert found["room_bytes"] > 0
    assert (found["device_bytes"], found["device_total_bytes"]) == (5, 10)
    assert sampler.sample() is None
    UsageFields.model_validate(found)


def test_room_is_that_of_the_tightest_group(tmp_path):
    """The outermost has a limit where it is that of a container. Cached files are not in use."""
    inner = tmp_path / "slice" / "run"
    inner.mkdir(parents=True)
    for directory, limit, used in ((inner, "max", 10), (inner.parent, "1000", 600), (tmp_path, "9000", 2000)):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text("anon 400\ninactive_file 150\nactive_file 50\n")
    groups = list(own_cgroups(tmp_path, "1:name=x:/\n0::/slice/run\n"))
    assert groups == [inner, inner.parent, tmp_path]
    assert [memory_of(group) for group in groups] == [None, (1000, 400), (9000, 1800)]
    assert room_bytes(groups) == 600
    assert list(own_cgroups(tmp_path, "8:pids:/\n")) == []
    (inner.parent / "memory.max").write_text("damaged")
    assert room_bytes(groups) == 7200


def test_kills_for_lack_of_memory_are_counted():
    assert usage.oom_kills() >= 0
