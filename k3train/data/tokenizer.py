"""Text to token ids and back: bytes, Hugging Face `tokenizer.json`, tiktoken rank files. Imports no torch."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UserError

VALID = "byte, or the path of a Hugging Face tokenizer.json or of a tiktoken file (or of a folder with one)"
FOLDER_FILES = ("tokenizer.json", "tiktoken.model")
END_NAMES = ("<|eod|>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOD]")
PAD_NAMES = ("<|pad|>", "[PAD]", "<pad>")
BYTE_IMAGE_NAME = "<image>"
IMAGE_NAMES = ("<|media_pad|>", "<|image_pad|>", "<|image|>", "<image>", "[IMG]")

STRUCTURE_NAMES = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
MEDIA_NAMES = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")

# Words with their leading mark or space, Han runs apart, at most three digits, line ends kept together.
LETTER = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTER}]*[\p{{Ll}}{LETTER}]+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTER}]+[\p{{Ll}}{LETTER}]*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Slots of K3's vocabulary behind the ranks: 256 reserved ids, of which training needs these.
RESERVED = 256
RESERVED_SLOTS = {
    "[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5,
    "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21, "[PAD]": 255,
}  # fmt: skip


class Structure(NamedTuple):
    """Ids of the tokens that build a chat. No text gives one of them."""

    open: int
    close: int
    sep: int
    end: int
    """Behind a message."""
    media: tuple[int, int, int] | None = None
    """Around an image: begin, content, end; None where the vocabulary has only its placeholder."""


class Tokenizer(Protocol):
    """Text to ids in [0, vocab_size) and back. `fingerprint` changes when any id of a text would.

    `image_id` stands where an image's features go. No text gives it; None where the vocabulary has none.
    `structure` builds chats; None likewise.
    """

    vocab_size: int
    eod_id: int
    pad_id: int
    image_id: int | None
    structure: Structure | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as plain text: the names of special tokens in it are not special."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; special and unknown ids are left out, incomplete UTF-8 becomes U+FFFD."""
        ...

    def encode_array(self, text: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Ids of `text` as an array [n]."""
        return np.array(self.encode(text), dtype=dtype)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then <|eod|>, <image>, <|pad|> and the four tokens that build a chat."""

    eod_id = 256
    image_id = 257
    pad_id = 258
    structure = Structure(259, 260, 261, 262)
    vocab_size = 263
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; a `tokenizer_config.json` beside it names its end and padding tokens."""

    def __init__(self, path: Path, image_token: str | None = None) -> None:
        import tokenizers

        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer={path} is not a tokenizer.json: {error}") from error
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id, self.pad_id = _end_and_pad(vocabulary, path)
        self.image_id = _image_id(vocabulary, self, image_token)
        self.structure = _structure(vocabulary, self)
        self.fingerprint = _fingerprint("hf", path)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


class TiktokenTokenizer(Tokenizer):
    """Lines of `base64-token rank`, then special tokens.

    The special tokens are those of `tokenizer_config.json` beside the file; without one, 256 ids are
    reserved behind the ranks as in K3's vocabulary: [BOS] first, [EOS] second, [PAD] last, the tokens of
    chats and images between them.
    """

    def __init__(self, path: Path, image_token: str | None = None, pattern: str = SPLIT_PATTERN) -> None:
        import tiktoken

        ranks = _read_ranks(path)
        first_special = max(ranks.values()) + 1
        added = _sibling_config(path).get("added_tokens_decoder", {})
        special = {entry["content"]: int(number) for number, entry in added.items()}
        special = special or {name: first_special + slot for name, slot in RESERVED_SLOTS.items()}
        try:
            self.inner = tiktoken.Encoding(
                path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except (ValueError, AssertionError) as error:
            raise UserError(f"data.tokenizer={path} is not a usable tiktoken file: {error}") from error
        self.text_ids = frozenset(ranks.values())
        self.vocab_size = self.inner.max_token_value + 1
        self.eod_id, self.pad_id = _end_and_pad(special, path)
        self.image_id = _image_id(special, self, image_token)
        self.structure = _structure(special, self)
        self.fingerprint = _fingerprint("tiktoken", path)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode([i for i in ids if i in self.text_ids], errors="replace")


def byte_vocab_size() -> int:
    """Vocabulary of the byte tokenizer, for planning without one."""
    return ByteTokenizer.vocab_size


def load_tokenizer(spec: str, image_token: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, with `data.image_token` as the placeholder of images.

    Raises:
        UserError: the file is missing, unreadable, of another kind, or has no end-of-document token; the
            vocabulary has no `image_token`, or plain text could give it.
    """
    if spec == "byte":
        if image_token not in (None, BYTE_IMAGE_NAME):
            raise UserError(f"data.image_token={image_token}; the byte tokenizer has {BYTE_IMAGE_NAME} only")
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        found = [path / name for name in FOLDER_FILES if (path / name).is_file()]
        if not found:
            raise UserError(f"data.tokenizer={spec} is a folder without {' or '.join(FOLDER_FILES)}")
        path = found[0]
    if not path.is_file():
        raise UserError(f"data.tokenizer={spec} does not exist; valid: {VALID}")
    try:
        kind = HuggingFaceTokenizer if path.suffix == ".json" else TiktokenTokenizer
        return kind(path, image_token)
    except OSError as error:
        raise UserError(f"data.tokenizer={spec} cannot be read: {error.strerror}") from error


def image_placeholder(tokenizer: Tokenizer) -> int:
    """`image_id` of a tokenizer that is used with images.

    Raises:
        UserError: it has none.
    """
    if tokenizer.image_id is None:
        raise UserError(
            "data.tokenizer has no placeholder for images; name a special token of it as data.image_token "
            f"(looked for {', '.join(IMAGE_NAMES)})"
        )
    return tokenizer.image_id


def chat_structure(tokenizer: Tokenizer) -> Structure:
    """`structure` of a tokenizer that is used with chats.

    Raises:
        UserError: it has none.
    """
    if tokenizer.structure is None:
        raise UserError(
            f"data.tokenizer cannot build chats: it needs {', '.join(STRUCTURE_NAMES)} as special tokens; "
            "add them, or use one that has them, such as byte"
        )
    return tokenizer.structure


def _structure(vocabulary: dict[str, int], tokenizer: Tokenizer) -> Structure | None:
    """The ids of a chat's tokens, unless one is missing or plain text can give it."""

    def special(name: str) -> int | None:
        number = vocabulary.get(name)
        return None if number is None or number in tokenizer.encode(name) else number

    found = [number for name in STRUCTURE_NAMES if (number := special(name)) is not None]
    media = [number for name in MEDIA_NAMES if (number := special(name)) is not None]
    if len(found) < len(STRUCTURE_NAMES):
        return None
    opening, closing, sep, end = found
    return Structure(opening, closing, sep, end, (media[0], media[1], media[2]) if len(media) == 3 else None)


def _image_id(vocabulary: dict[str, int], tokenizer: Tokenizer, name: str | None) -> int | None:
    """Id of the placeholder `name`, or of the first usual one; never one that plain text can give."""
    found = [token for token in ((name,) if name else IMAGE_NAMES) if token in vocabulary]
    kept = [token for token in found if vocabulary[token] not in tokenizer.encode(token)]
    if name and not found:
        raise UserError(f"data.image_token={name} is no special token of data.tokenizer; name one that is")
    if name and not kept:
        raise UserError(
            f"data.image_token={name} is part of plain text for data.tokenizer; mark it as special"
        )
    return vocabulary[kept[0]] if kept else None


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"data.tokenizer={path}, line {number}: expected `base64-token rank`; valid: {VALID}"
            ) from None
    missing = 256 - sum(bytes([value]) in ranks for value in range(256))
    if missing:
        raise UserError(f"data.tokenizer={path} lacks {missing} of the 256 single bytes: is the file whole?")
    return ranks


def _sibling_config(path: Path) -> dict[str, Any]:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        return json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}, beside data.tokenizer, is not valid JSON: {error}") from error


def _end_and_pad(vocabulary: dict[str, int], path: Path) -> tuple[int, int]:
    config = _sibling_config(path)

    def named(key: str, names: tuple[str, ...]) -> int | None:
        token = config.get(key)
        token = token["content"] if isinstance(token, dict) else token
        return next((vocabulary[name] for name in (token, *names) if name in vocabulary), None)

    eod_id = named("eos_token", END_NAMES)
    if eod_id is None:
        raise UserError(
            f"data.tokenizer={path} has no end-of-document token: add one of {', '.join(END_NAMES)}, "
            "or name it as eos_token in a tokenizer_config.json beside it"
        )
    pad_id = named("pad_token", PAD_NAMES)
    return eod_id, eod_id if pad_id is None else pad_id


def _fingerprint(kind: str, path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes())
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        digest.update(config.read_bytes())
    return f"{kind}-{digest.hexdigest()[:16]}"
