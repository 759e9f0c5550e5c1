"""Small whole numbers, several in a word, with one scale per block: `int4` and `int3`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codecs.piecewise import Piecewise
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, blocks, scales

TINY = 2.0**-120  # below, 1 / step would not be finite


@dataclass(frozen=True)
class Numbers:
    """-most..most. The step between them is the largest of a block's `typical` times the mean size of its values, and
    the size of its largest over `reach`: what is larger than `most` steps is cut off, and comes later."""

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

    As many blocks as a word has digits share words, one below the other, so that all work is on neighbours; what is
    left at the end is one block. A block whose step is below 2**-120 becomes zeros. A block that holds a value that is
    not finite has a scale that is not finite, and all of it decodes to values that are not.
    """

    remembers = True

    def __init__(self, numbers: Numbers, block: int, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.width = block * numbers.per_word
        self._block = block
        self._numbers = numbers

    def size_bytes(self, count: int) -> int:
        words = blocks(count, self._numbers.per_word)
        return FLOAT * scales(count, self._block, self._numbers.per_word) + self._numbers.word.itemsize * words

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT * scales(count, self._block, self._numbers.per_word)
        return data[:end].view(torch.float32), data[end:].view(self._numbers.word)

    def _rows(self, piece: Tensor) -> Tensor:
        return piece.view(-1, self._block if piece.numel() >= self.width else piece.numel())

    def _planes(self, digits: Tensor) -> Tensor:
        """By word, digit, and place in the block."""
        return digits.view(-1, self._numbers.per_word, min(self._block, digits.numel() // self._numbers.per_word))

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        numbers = self._numbers
        steps, words = self._of(parts, start, values)
        digits = self._digits(values)
        self._round(self._rows(values), steps, digits)
        planes = self._planes(digits)
        sums = self._scratch.take("sums", words.numel(), torch.float32, values.device).view_as(planes[:, 0])
        sums.copy_(planes[:, -1])
        for i in reversed(range(numbers.per_word - 1)):
            torch.add(planes[:, i], sums, alpha=numbers.base, out=sums)
        words.view(numbers.signed).copy_(sums.view(-1))  # to what has a sign: torch is quick at that
        words.add_(numbers.zero)

    def _round(self, rows: Tensor, steps: Tensor, digits: Tensor) -> None:
        """The numbers as floats, with zeros where the last row has no values; and the steps."""
        numbers, room = self._numbers, digits[: rows.numel()].view_as(rows)
        digits[rows.numel() :].zero_()
        torch.abs(rows, out=room)
        torch.amax(room, 1, out=steps).div_(numbers.reach)
        if numbers.typical:
            mean = self._scratch.take("mean", len(rows), torch.float32, rows.device)
            torch.maximum(torch.sum(room, 1, out=mean).mul_(numbers.typical / rows.shape[1]), steps, out=steps)
        tiny = steps < TINY
        factors = torch.reciprocal(steps).masked_fill_(tiny, 0)
        steps.masked_fill_(tiny, 0)
        torch.mul(rows, factors[:, None], out=room).clamp_(-numbers.most, numbers.most).round_()

    def _read_back(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """The numbers still lie there."""
        steps, _ = self._of(parts, start, out)
        rows = self._rows(out)
        torch.mul(self._digits(out)[: out.numel()].view_as(rows), steps[:, None], out=rows)

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        numbers = self._numbers
        steps, words = self._of(parts, start, out)
        digits = self._digits(out)
        planes = self._planes(digits)
        digit = self._scratch.take("digit", words.numel(), numbers.word, out.device)
        for i in range(numbers.per_word):
            torch.bitwise_right_shift(words, i * (numbers.base.bit_length() - 1), out=digit)
            planes[:, i].copy_(digit.bitwise_and_(numbers.base - 1).view_as(planes[:, i]))
        rows = self._rows(out)
        torch.sub(digits[: out.numel()].view_as(rows), numbers.most, out=rows).mul_(steps[:, None])

    def _digits(self, like: Tensor) -> Tensor:
        """Room for a number each, in whole words."""
        count = self._numbers.per_word * blocks(like.numel(), self._numbers.per_word)
        return self._scratch.take("digits", count, torch.float32, like.device)

    def _of(self, parts: tuple[Tensor, ...], start: int, values: Tensor) -> tuple[Tensor, Tensor]:
        steps, words = parts
        per_word, count = self._numbers.per_word, values.numel()
        first, word = start // self._block, start // per_word
        return steps[first : first + len(self._rows(values))], words[word : word + blocks(count, per_word)]
