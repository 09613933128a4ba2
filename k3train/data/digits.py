"""Bundled images: the 1797 handwritten digits that scikit-learn ships, each captioned with its name."""

from __future__ import annotations

import hashlib

import numpy as np

from .documents import Document, Picture

VALID_SHARE = 0.2
PROMPT, END = "=", "\n"


class Digits:
    """Documents `<image>=7` and a line end: an 8 x 8 image, which gives one token, and its caption.

    The hash of a digit's index puts it into `train` or `valid`, on every machine alike.
    """

    name = "digits"
    fingerprint = None

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits

        assert split in ("train", "valid")
        digits = load_digits()
        self.indices = [i for i in range(len(digits.target)) if is_held_out(i) == (split == "valid")]
        grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
        self.images = np.repeat(grey[..., None], 3, axis=-1)
        self.labels = digits.target

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Document:
        """Digit `index` of this split. The parts of its text are tokenized apart."""
        number = self.indices[index]
        picture = Picture(f"digit {number}", (self.images[number][None],))
        parts = (picture, PROMPT, str(self.labels[number]), END)
        return Document(f"digit {number}", parts, caption=True, answer=2)


def is_held_out(number: int) -> bool:
    """Whether digit `number` of the 1797 belongs to the held-out split."""
    digest = hashlib.sha256(f"k3train/digit/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < VALID_SHARE
