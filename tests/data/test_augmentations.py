"""Ready augmentations: what each does, that the generator decides alone, and the same weights on 1 and 2 workers."""

import colorsys
import inspect

import numpy as np
import pytest
import torch

from shoal import Batch
from shoal.data import augmentations
from shoal.data.augment_rng import Augment, AugmentSequence
from shoal.errors import ShoalError
from shoal.spec.base import Ref
from shoal.spec.data import DataConfig
from shoal.spec.load import make_job
from shoal.train.build import build, make_batch_loader
from tests.conftest import CNN

IMAGES = torch.rand(6, 3, 8, 10, generator=torch.Generator().manual_seed(3))
SERIES = torch.randn(6, 2, 20, generator=torch.Generator().manual_seed(4))
ROWS = torch.randn(6, 5, generator=torch.Generator().manual_seed(5))
TOKENS = torch.randint(1, 9, (6, 12), generator=torch.Generator().manual_seed(6))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])

CASES = {
    "RandomHorizontalFlip": ({}, IMAGES),
    "RandomVerticalFlip": ({}, IMAGES),
    "RandomCrop": ({"size": [8, 10], "padding": 2}, IMAGES),
    "RandomRotation": ({"degrees": 30, "interpolation": "bilinear"}, IMAGES),
    "ColorJitter": ({"brightness": 0.4, "contrast": 0.4, "saturation": [0.5, 1.5], "hue": 0.1}, IMAGES),
    "RandomErasing": ({"p": 1.0}, IMAGES),
    "MixUp": ({"alpha": 0.4, "num_classes": 3}, IMAGES),
    "CutMix": ({"num_classes": 3}, IMAGES),
    "Jitter": ({}, SERIES),
    "Scaling": ({}, SERIES),
    "WindowSlice": ({}, SERIES),
    "GaussianNoise": ({}, ROWS),
    "SwapNoise": ({"p": 0.5}, ROWS),
    "TokenDropout": ({"p": 0.5}, TOKENS),
}


def apply(name, x, *, target=CLASSES, seed=1, **args):
    made = getattr(augmentations, name)(**args)
    return Augment.of(made)(Batch((x, "other"), target, len(x)), seed)


def test_every_augmentation_is_tested():
    assert set(CASES) == set(augmentations.__all__)


@pytest.mark.parametrize("name", CASES)
def test_the_generator_alone_decides(name):
    args, x = CASES[name]
    before = x.clone()
    torch.manual_seed(0)
    one = apply(name, x, **args)
    torch.manual_seed(99)
    again, other = apply(name, x, **args), apply(name, x, seed=2, **args)
    assert torch.equal(one.inputs[0], again.inputs[0])
    assert torch.equal(one.target, again.target)
    assert not torch.equal(one.inputs[0], other.inputs[0])
    assert (one.inputs[0].shape, one.inputs[0].dtype, one.inputs[1], one.size) == (x.shape, x.dtype, "other", 6)
    assert torch.equal(x, before)


def test_flips_and_turns_are_exact():
    assert torch.equal(apply("RandomHorizontalFlip", IMAGES, p=1.0).inputs[0], IMAGES.flip(3))
    assert torch.equal(apply("RandomVerticalFlip", IMAGES, p=1.0).inputs[0], IMAGES.flip(2))
    assert torch.equal(apply("RandomHorizontalFlip", IMAGES, p=0.0).inputs[0], IMAGES)
    square = IMAGES[..., :8]
    turned = apply("RandomRotation", square, degrees=[90, 90]).inputs[0]
    assert torch.equal(turned, square.rot90(1, (2, 3)))  # counter-clockwise, as torchvision turns
    flipped = apply("RandomHorizontalFlip", IMAGES).inputs[0]
    assert {bool(torch.equal(a, b)) for a, b in zip(flipped, IMAGES, strict=True)} == {True, False}  # each by itself


def test_a_crop_is_a_window_of_the_padded_image():
    padded = np.pad(IMAGES.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), constant_values=7)
    cropped = apply("RandomCrop", IMAGES, size=[6, 7], padding=2, fill=7.0).inputs[0]
    for image, crop in zip(padded, cropped.numpy(), strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(image, (3, 6, 7)).reshape(-1, 3, 6, 7)
        assert (windows == crop).all((1, 2, 3)).sum() == 1


def test_colours_stay_in_their_range_and_grey_stays_grey():
    bright = apply("ColorJitter", IMAGES, brightness=[2, 2]).inputs[0]
    assert torch.equal(bright, (IMAGES * 2).clamp(0, 1))
    grey = apply("ColorJitter", IMAGES, saturation=[0, 0]).inputs[0]
    assert torch.allclose(grey, grey[:, :1].expand_as(grey))


@pytest.mark.parametrize("turn", [-0.5, -0.3, 0.0, 0.1, 0.25, 0.5])
def test_the_hue_is_turned_as_hsv_has_it(turn):
    """Against the conversions of Python's library, pixel by pixel; max_value changes no hue."""
    corners = torch.tensor([[r, g, b] for r in (0.0, 1.0) for g in (0.0, 1.0) for b in (0.0, 1.0)])  # ties of channels
    pixels = torch.cat([IMAGES.movedim(1, 3).reshape(-1, 3), corners])
    expected = [_turned(*pixel, turn) for pixel in pixels.tolist()]
    images = pixels.T.reshape(1, 3, -1, 1)
    turned = apply("ColorJitter", images, hue=[turn, turn]).inputs[0]
    wide = apply("ColorJitter", images * 255, hue=[turn, turn], max_value=255).inputs[0]
    torch.testing.assert_close(turned.reshape(3, -1).T, torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(wide / 255, turned, atol=1e-5, rtol=0)


def _turned(red, green, blue, turn):
    hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
    return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)


def test_a_hue_is_drawn_for_each_image_from_its_range_and_no_other_number_changes():
    same = IMAGES[:1].expand(64, -1, -1, -1)
    turned = apply("ColorJitter", same, target=None, hue=0.2).inputs[0]
    hues = [colorsys.rgb_to_hsv(*pixel)[0] for pixel in turned[:, :, 0, 0].tolist()]
    start = colorsys.rgb_to_hsv(*IMAGES[0, :, 0, 0].tolist())[0]
    turns = [(hue - start + 0.5) % 1 - 0.5 for hue in hues]
    assert -0.2001 <= min(turns) < -0.15
    assert 0.15 < max(turns) <= 0.2001
    factors = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
    plain, with_hue = (apply("ColorJitter", IMAGES, hue=hue, **factors).inputs[0] for hue in (0, 0.2))
    torch.testing.assert_close(with_hue.amax(1), plain.amax(1))  # the value of HSV
    torch.testing.assert_close(with_hue.amin(1), plain.amin(1))


def test_an_erased_rectangle_has_the_asked_size():
    gone = apply("RandomErasing", IMAGES, p=1.0, scale=[0.25, 0.25], ratio=[1, 1], value=9.0).inputs[0] == 9
    assert gone[:, 0].flatten(1).sum(1).tolist() == [16] * 6  # 4 x 4: of 80 pixels a quarter, rounded
    assert (gone.all(1) == gone.any(1)).all()


def test_mixed_targets_are_the_shares_of_the_samples():
    ones = torch.eye(3)[CLASSES][:, :, None, None].expand(6, 3, 8, 10)  # a sample's pixels are its own target
    for name in ("MixUp", "CutMix"):
        mixed = apply(name, ones, num_classes=3)
        torch.testing.assert_close(mixed.inputs[0].mean((2, 3)), mixed.target)
        torch.testing.assert_close(mixed.target.sum(1), torch.ones(6))
    numbers = apply("MixUp", ROWS, target=ROWS[:, 0].clone())
    torch.testing.assert_close(numbers.inputs[0][:, 0], numbers.target)


def test_a_slice_of_a_straight_line_is_a_straight_line():
    line = torch.arange(20.0).expand(6, 2, 20)
    sliced = apply("WindowSlice", line, reduce_ratio=0.5).inputs[0]
    torch.testing.assert_close(sliced.diff(dim=-1), torch.full((6, 2, 19), 9 / 19))
    assert sliced.min() >= 0
    assert sliced.max() <= 19


def test_swapped_values_come_from_their_own_column():
    columns = torch.arange(5.0).expand(6, 5)
    assert torch.equal(apply("SwapNoise", columns, p=1.0).inputs[0], columns)
    dropped = apply("TokenDropout", TOKENS, p=0.5, token=0).inputs[0]
    assert torch.equal(dropped[dropped != 0], TOKENS[dropped != 0])


def test_each_step_of_a_list_draws_for_itself():
    def plain(batch):
        return Batch((batch.inputs[0] + torch.rand(()),), batch.target, batch.size)

    sequence = AugmentSequence((Augment.of(plain), Augment.of(augmentations.Jitter()), Augment.of(plain)))
    first, again = (Augment.of(sequence)(Batch((SERIES,), None, 6), 5).inputs[0] for _ in range(2))
    assert torch.equal(first, again)
    assert "generator" in inspect.signature(sequence).parameters


@pytest.mark.parametrize(
    ("name", "args", "x", "target", "code", "words"),
    [
        ("RandomCrop", {"size": 4}, ROWS, CLASSES, "SH720", r"gets float32 \[6, 5\]"),
        ("RandomCrop", {"size": 40}, IMAGES, CLASSES, "SH720", "images of 8 x 10"),
        ("RandomCrop", {"size": 2.5}, IMAGES, CLASSES, "SH205", "whole"),
        ("ColorJitter", {"saturation": 0.5}, IMAGES[:, :1], CLASSES, "SH720", "1 channels"),
        ("ColorJitter", {"hue": 0.1}, IMAGES[:, :1], CLASSES, "SH720", "1 channels"),
        ("ColorJitter", {"hue": 0.6}, IMAGES, CLASSES, "SH205", "'hue' is 0.6, not a number from 0 to 0.5"),
        ("ColorJitter", {"hue": [-0.6, 0]}, IMAGES, CLASSES, "SH205", "'hue' is -0.6"),
        ("Jitter", {}, TOKENS, CLASSES, "SH720", "int64"),
        ("TokenDropout", {}, ROWS, CLASSES, "SH720", "float32"),
        ("MixUp", {}, IMAGES, CLASSES, "SH720", "class numbers"),
        ("MixUp", {"num_classes": 2}, IMAGES, CLASSES, "SH720", "from 0 to 2"),
        ("CutMix", {"num_classes": 3}, ROWS, CLASSES, "SH720", "images"),
        ("MixUp", {}, IMAGES, None, "SH720", "NoneType"),
        ("RandomErasing", {"p": 2}, IMAGES, CLASSES, "SH205", "'p' is 2"),
        ("RandomRotation", {"degrees": 5, "interpolation": "cubic"}, IMAGES, CLASSES, "SH205", "interpolation"),
    ],
)
def test_what_does_not_fit_is_told(name, args, x, target, code, words):
    with pytest.raises(ShoalError, match=words) as caught:
        apply(name, x, target=target, **args)
    assert caught.value.code == code


def test_one_name_is_written_as_before():
    source = {"kind": "sklearn", "name": "digits"}
    one = DataConfig.model_validate({"source": source, "augment": "Jitter"})
    assert one.augment == Ref(name="Jitter")
    several = DataConfig.model_validate({"source": source, "augment": ["Jitter", {"name": "f.py:g", "args": {"a": 1}}]})
    assert several.augment == [Ref(name="Jitter"), Ref(name="f.py:g", args={"a": 1})]


SEVERAL = [
    "RandomHorizontalFlip",
    {"name": "RandomCrop", "args": {"size": 8, "padding": 1}},
    {"name": "RandomRotation", "args": {"degrees": 10}},
    "models.py:shift",
    {"name": "CutMix", "args": {"num_classes": 10}},
]


def test_augmented_weights_are_the_same_on_one_worker_and_on_two(run, job_dir):
    data = CNN["data"] | {"augment": SEVERAL}
    short = CNN | {"steps": 6, "evaluate": {"every_steps": 6}, "data": data}
    one, two = (run(short, workers=n, runs=f"runs-{n}").receipt.weights_sha256 for n in (1, 2))
    assert one == two
    built = build(make_job(short, base_dir=str(job_dir)), cache_dir=job_dir, report=lambda kind, **fields: None)
    batch = make_batch_loader(built).get(0, 0)
    assert batch.target.shape == (batch.size, 10)  # CutMix has made probabilities: the list is applied
