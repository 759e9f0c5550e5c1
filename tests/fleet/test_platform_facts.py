"""What tells machines apart that would compute different bits."""

import sys

from shoal.fleet.platform_facts import describe_difference, platform_facts, processor_maker


def test_the_facts_of_this_process():
    facts = platform_facts()
    assert facts["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert facts["numpy"] == sys.modules["numpy"].__version__
    assert describe_difference(facts, facts) == ""


def test_other_versions_are_told():
    one = {"torch": "2.13.0", "numpy": "2.1.0", "machine": "x86_64"}
    assert describe_difference(one, one | {"numpy": "2.2.0"}) == "numpy 2.1.0 and 2.2.0"
    assert describe_difference(one, one | {"machine": "arm64"}) == "machine x86_64 and arm64"


def test_a_package_that_one_machine_lacks_is_no_difference_but_torch_is():
    one = {"torch": "2.13.0", "numpy": "2.1.0", "pandas": "3.0"}
    assert describe_difference(one, {"torch": "2.13.0", "numpy": "2.1.0"}) == ""
    assert describe_difference(one, {"numpy": "2.1.0", "pandas": "3.0"}) == "torch 2.13.0 and missing"


def test_processors_of_another_maker_differ(tmp_path):
    """They may have the same instructions, and MKL still chooses other kernels."""
    (tmp_path / "intel").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\n")
    (tmp_path / "arm").write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert processor_maker(tmp_path / "intel") == "GenuineIntel"
    assert processor_maker(tmp_path / "arm") == "0x41"
    assert processor_maker(tmp_path / "none") == ""
    facts = platform_facts()
    assert facts["maker"] == processor_maker()
    assert describe_difference(facts, facts | {"maker": "another"}) == f"maker {facts['maker']} and another"
