"""A packed model comes back as it was written, or is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.packed_file import read_packed, write_packed
from shoal.compression.range_coder import decode_codes, encode_codes
from shoal.compression.rounding import share_weight
from shoal.errors import ShoalError
from shoal.plan.compression import kept_shares, packed_share
from tests.compression.networks import Residual


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    model = Residual()
    with torch.no_grad():
        model.head.weight[:, ::2] = 0
    return model.state_dict()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_are_shared_values_and_zeros_stay(tmp_path, state, bits):
    file = tmp_path / "model.packed"
    write_packed(file, state, bits=bits)
    found = read_packed(file)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        back = found[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        if tensor.dim() > 1 and tensor.numel() > 2**bits:
            assert len(back.unique()) <= 2**bits
        assert ((tensor == 0) <= (back == 0)).all()
    write_packed(tmp_path / "again", found, bits=bits)
    again = read_packed(tmp_path / "again")
    assert all(torch.equal(again[name], one) for name, one in found.items() if one.dim() < 2)
    assert file.stat().st_size < sum(t.numel() * t.element_size() for t in state.values()) / (8 / bits) + 400


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounded_weights_come_back_as_they_are(tmp_path, bits):
    """One scale per output; also where the largest number of an output is not the largest that there is."""
    random = torch.Generator().manual_seed(bits)
    most = 2 ** (bits - 1) - 1
    codes = torch.randint(-most, most + 1, (30, 4, 5), generator=random)
    codes[0], codes[1] = 0, most
    weight = codes * torch.rand(30, 1, 1, generator=random)
    write_packed(tmp_path / "model.packed", {"weight": weight, "bias": torch.ones(30)}, bits=bits, rounded={"weight"})
    back = read_packed(tmp_path / "model.packed")["weight"]
    assert torch.allclose(back, weight, rtol=1e-5, atol=0)
    assert (tmp_path / "model.packed").stat().st_size < weight.numel() * bits / 8 * 1.05 + 4 * 30 + 400


def test_what_is_no_parameter_comes_back_as_it_is(tmp_path):
    """Masks, tables and running variances are not learned: nothing may be near them instead. So do parameters that 16
    bits or shared values would change much."""
    exact = {
        "mask": torch.full((20, 20), -torch.inf).triu(1),
        "seen": torch.ones(20, 20, dtype=torch.bool).tril(),
        "sines": torch.sin(torch.arange(600.0)).reshape(30, 20),
        "running_var": torch.tensor([1e-9, 1.0, 1e6]),
        "count": torch.tensor(3),
    }
    kept = {"tiny": torch.full((7,), 1e-9), "infinite": torch.full((20, 20), -torch.inf), "large": torch.tensor([1e6])}
    bias = torch.randn(50, generator=torch.Generator().manual_seed(0))
    write_packed(tmp_path / "model.packed", exact | kept | {"bias": bias}, bits=4, exact=exact)
    found = read_packed(tmp_path / "model.packed")
    for name, tensor in (exact | kept).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["bias"], bias.half().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_a_type_that_the_file_cannot_hold_is_told(tmp_path, dtype):
    state = {"weight": torch.ones(3, 3), "other": torch.ones(3, dtype=dtype)}
    with pytest.raises(ShoalError, match=r"'other' is .* which a packed file cannot hold") as refused:
        write_packed(tmp_path / "model.packed", state, bits=4)
    assert refused.value.code == "SH662"
    assert not (tmp_path / "model.packed").exists()


def test_the_same_weights_give_the_same_bytes(tmp_path, state):
    for name in ("one", "other"):
        write_packed(tmp_path / name, state, bits=4)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@settings(max_examples=60)
@given(place=st.integers(0, 10_000), value=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_refused(tmp_path_factory, place, value, cut):
    folder = tmp_path_factory.getbasetemp() / "packed"
    folder.mkdir(exist_ok=True)
    file = folder / "model.packed"
    whole = {"weight": torch.arange(600.0).reshape(30, 20), "bias": torch.ones(7), "count": torch.tensor(3)}
    write_packed(file, whole, bits=4)
    content = bytearray(file.read_bytes())
    place %= len(content)
    content = content[:place] if cut else content
    if not cut:
        content[place] ^= value
    file.write_bytes(content)
    with pytest.raises(ShoalError) as refused:
        read_packed(file)
    assert refused.value.code == "SH667"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 30), st.integers(1, 30), st.floats(0, 1))
def test_codes_come_back(seed, bits, rows, columns, zeros):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (rows, columns)) * (random.random((rows, columns)) >= zeros)
    codes = codes.astype(np.uint8)
    assert np.array_equal(decode_codes(encode_codes(codes, bits), codes.shape, bits), codes)


def test_rare_codes_take_few_bits_and_dead_columns_nearly_none():
    """Near the entropy for numbers without any order, and below it where half of the columns are always zero."""
    random = np.random.default_rng(0)
    flags = random.random((200, 300)) < 0.1
    codes = (flags * random.integers(1, 16, flags.shape)).astype(np.uint8)
    entropy = flags.size * (0.469 + 0.1 * np.log2(15)) / 8
    assert entropy < len(encode_codes(codes, 4)) < 1.06 * entropy
    codes[:, ::2] = 0
    assert len(encode_codes(codes, 4)) < 0.56 * entropy


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ShoalError, match="cannot be read"):
        read_packed(tmp_path / "none")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ShoalError, match="does not begin"):
        read_packed(tmp_path / "text")


@given(st.integers(0, 2**31), st.integers(2, 5))
@settings(max_examples=20)
def test_sharing_is_a_projection(seed, bits):
    """Values that are shared already stay as they are, and each weight goes to the nearest value."""
    weight = torch.randn(20, 9, generator=torch.Generator().manual_seed(seed))
    codes, values = share_weight(weight, bits)
    back = values[codes.long()]
    distances = (weight.flatten()[:, None].double() - values.double()).abs()
    assert torch.allclose((weight - back).abs().flatten().double(), distances.min(1).values, atol=1e-6)


def test_the_size_of_a_packed_file_is_foreseen(tmp_path):
    """Within a fifth: it decides how many weights are set to zero for the size that is asked for."""
    weight = torch.randn(100, 400, generator=torch.Generator().manual_seed(0))
    for keep in (0.08, 0.25):
        limit = weight.abs().flatten().kthvalue(int(weight.numel() * (1 - keep))).values
        write_packed(tmp_path / "model.packed", {"weight": weight * (weight.abs() > limit)}, bits=4)
        share = (tmp_path / "model.packed").stat().st_size / (4 * weight.numel())
        assert 0.8 < share / packed_share(keep, bits=4) < 1.2


@pytest.mark.parametrize("size", [None, 0.2, 1 / 40, 1 / 70, 1 / 1000])
def test_weights_go_in_ever_smaller_steps(size):
    shares = kept_shares(size)
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == (3 if size and size > 1 / 60 else 4)
    if size:
        assert packed_share(shares[-1], bits=4) < size
