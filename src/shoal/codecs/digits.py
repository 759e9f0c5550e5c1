"""Small whole numbers, several in a word, with one scale per block: `int4` and `int3`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codecs.piecewise import Piecewise
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, blocks

GROUP = 1 << 19
TINY = 2.0**-120  # below, 1 / step would not be finite


@dataclass(frozen=True)
class Numbers:
    """-most..most. The step between them is the largest of a block's `typical` times the mean size of its values, and
    the size of its largest over `reach`: what is larger than `most` steps is cut off, and comes later. With a `reach`
    of `most` there is no such thing."""

    most: int
    per_word: int
    word: torch.dtype
    signed: torch.dtype
    reach: float
    typical: float = 0.0

    @property
    def base(self) -> int:
        return 1 << (2 * self.most).bit_length()

    @property
    def zero(self) -> int:
        """The word of zeros: digits are numbers plus `most`."""
        return sum(self.most * self.base**i for i in range(self.per_word))


INT4 = Numbers(7, 2, torch.uint8, torch.int8, reach=7)
# For normal values `typical` is nearly the best step, and `reach` does nothing. Where few values are large, as in what
# an embedding gets, a third of them comes at once.
INT3 = Numbers(3, 5, torch.int16, torch.int16, reach=8, typical=0.88)


class Digits(Piecewise):
    """What values are off by must not be forgotten.

    Values go in groups. Of a group, the first digits of all words come first, then the second ones, and so on: so all
    work is on neighbours. A block whose step is below 2**-120 becomes zeros. A block that holds a value that is not
    finite has a scale that is not finite, and all of it decodes to values that are not.
    """

    remembers = True

    def __init__(self, numbers: Numbers, block: int, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.width = group(block, numbers.per_word)
        self._block = block
        self._numbers = numbers

    def size_bytes(self, count: int) -> int:
        words = blocks(count, self._numbers.per_word)
        return FLOAT * blocks(count, self._block) + self._numbers.word.itemsize * words

    def _pieces(self, count: int, device: torch.device) -> Iterable[tuple[int, int]]:
        """Groups, on any device. A short rest goes with the one before it: each has two dozen kernels to start."""
        starts = list(range(0, count, self.width))
        if len(starts) > 1 and 2 * (count - starts[-1]) < self.width:
            starts.pop()
        return itertools.pairwise([*starts, count])

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT * blocks(count, self._block)
        return data[:end].view(torch.float32), data[end:].view(self._numbers.word)

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        numbers = self._numbers
        steps, words = self._of(parts, start, values)
        digits, count = self._digits(values), len(words)
        self._round(values, steps, digits)
        sums = self._scratch.take("sums", count, torch.float32, values.device)
        last = digits[(numbers.per_word - 1) * count : numbers.per_word * count]
        for i in reversed(range(numbers.per_word - 1)):
            last = torch.add(digits[i * count : (i + 1) * count], last, alpha=numbers.base, out=sums)
        words.view(numbers.signed).copy_(last)  # to what has a sign: torch is quick at that
        words.add_(numbers.zero)

    def _round(self, values: Tensor, steps: Tensor, digits: Tensor) -> None:
        """The numbers as floats, with zeros behind the last; and the steps."""
        numbers, count = self._numbers, values.numel()
        torch.abs(values, out=digits[:count])
        if len(digits) > count:
            digits[count:].zero_()
        rows = digits[: len(steps) * self._block].view(-1, self._block)
        torch.amax(rows, 1, out=steps).div_(numbers.reach)
        if numbers.typical:
            mean = self._scratch.take("mean", len(steps), torch.float32, values.device)
            torch.sum(rows, 1, out=mean).mul_(numbers.typical / self._block)
            if rest := count % self._block:
                mean[-1:].mul_(self._block / rest)
            torch.maximum(mean, steps, out=steps)
        tiny = steps < TINY
        factors = torch.reciprocal(steps).masked_fill_(tiny, 0)
        steps.masked_fill_(tiny, 0)
        self._scale(values, factors, digits[:count])
        if numbers.reach > numbers.most:
            digits.clamp_(-numbers.most, numbers.most)
        digits.round_()

    def _read_back(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """The numbers still lie there. Zeros have no sign in what is sent, and what is not finite reads as it reads."""
        steps, _ = self._of(parts, start, out)
        if math.isfinite(float(steps.sum())):
            self._scale(self._digits(out)[: out.numel()], steps, out)
            out.add_(0.0)
        else:
            self._read(parts, start, out)

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        numbers = self._numbers
        steps, words = self._of(parts, start, out)
        digits, count = self._digits(out), len(words)
        digit = self._scratch.take("digit", count, numbers.word, out.device)
        for i in range(numbers.per_word):
            torch.bitwise_right_shift(words, i * (numbers.base.bit_length() - 1), out=digit)
            digits[i * count : (i + 1) * count].copy_(digit.bitwise_and_(numbers.base - 1))
        torch.sub(digits[: out.numel()], numbers.most, out=out)
        self._scale(out, steps, out)

    def _scale(self, values: Tensor, factors: Tensor, out: Tensor) -> None:
        """Each block times its factor. The last may be shorter."""
        whole = values.numel() // self._block
        end = whole * self._block
        shape = (whole, self._block)
        torch.mul(values[:end].view(shape), factors[:whole, None], out=out[:end].view(shape))
        if end < values.numel():
            torch.mul(values[end:], factors[whole:], out=out[end:])

    def _digits(self, like: Tensor) -> Tensor:
        """Room for a number each, in whole words and blocks."""
        count, per_word = like.numel(), self._numbers.per_word
        size = max(per_word * blocks(count, per_word), self._block * blocks(count, self._block))
        return self._scratch.take("digits", size, torch.float32, like.device)

    def _of(self, parts: tuple[Tensor, ...], start: int, values: Tensor) -> tuple[Tensor, Tensor]:
        steps, words = parts
        first, word = start // self._block, start // self._numbers.per_word
        count = values.numel()
        last, end = first + blocks(count, self._block), word + blocks(count, self._numbers.per_word)
        return steps[first:last], words[word:end]


def group(block: int, per_word: int) -> int:
    """About as many values as are encoded at once, in whole blocks and words."""
    return block * per_word * max(GROUP // (block * per_word), 1)
