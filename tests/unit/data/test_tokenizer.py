"""Round trips, special tokens, and refusals of tokenizer files."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from k3train.data.tokenizer import ByteTokenizer, byte_vocab_size, image_placeholder, load_tokenizer
from k3train.errors import UserError

TEXTS = (
    "",
    "def f(x):\n    return x\n",
    "naïve 中文 mixed\r\n\n  spaces ",
    "emoji 🙂 1234567",
    "it's <|eod|> [EOS]",
)


def write_ranks(path: Path, extra: tuple[bytes, ...] = ()) -> Path:
    tokens = [bytes([value]) for value in range(256)] + list(extra)
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


def write_hf(path: Path, special: tuple[str, ...] = ("[EOS]", "[PAD]")) -> Path:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: number for number, character in enumerate(sorted(alphabet))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.save(str(path))
    return path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_array(text, np.uint16).tolist() == ids


def test_bytes_decode_of_anything() -> None:
    tokenizer = load_tokenizer("byte")
    assert tokenizer.decode([0xFF, 0x41, 0xE4, 0xB8]) == "\ufffdA\ufffd"
    assert tokenizer.decode([tokenizer.eod_id, 66, 257, 258, 259, 262, 5000, -1]) == "B"
    assert (tokenizer.eod_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 258, 263)
    assert byte_vocab_size() == 263


@pytest.mark.parametrize("text", TEXTS)
def test_files_round_trip(tmp_path: Path, text: str) -> None:
    for path in (
        write_ranks(tmp_path / "a.tiktoken", (b"de", b"def")),
        write_hf(tmp_path / "tokenizer.json"),
    ):
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eod_id]) == text
        # The name of a special token in a document is text, never the token.
        assert tokenizer.eod_id not in ids
        assert tokenizer.encode_array(text, np.int32).tolist() == ids


def test_tiktoken_merges_and_reserves_like_k3(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_ranks(tmp_path / "tiktoken.model", (b"de", b"def"))))
    assert tokenizer.encode("def de") == [257, 32, 256]
    assert (tokenizer.eod_id, tokenizer.pad_id, tokenizer.vocab_size) == (258 + 1, 258 + 255, 258 + 256)
    assert tokenizer.decode([257, 300, 10**6, 0xFF]) == "def\ufffd"
    assert tokenizer.encode("12345") == [ord(c) for c in "12345"]


def test_sibling_config_names_special_tokens(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "tiktoken.model")
    plain = load_tokenizer(str(tmp_path)).fingerprint
    added = {"300": {"content": "<stop>"}, "301": {"content": "<fill>"}}
    config = {"added_tokens_decoder": added, "eos_token": "<stop>", "pad_token": {"content": "<fill>"}}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eod_id, tokenizer.pad_id, tokenizer.vocab_size) == (300, 301, 302)
    assert tokenizer.fingerprint != plain


def test_padding_falls_back_to_the_end_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_hf(tmp_path / "tokenizer.json", ("</s>",))))
    assert tokenizer.pad_id == tokenizer.eod_id == 256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.json", None, "does not exist; valid: byte"),
        ("broken.json", b"{", "is not a tokenizer.json"),
        ("spm.model", b"\x0a\x0e\x0a\x05<unk>\x15\x00", "line 2: expected `base64-token rank`"),
        ("short.tiktoken", b"QQ== 0\n", "lacks 255 of the 256 single bytes"),
    ],
)
def test_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        load_tokenizer(str(path))
    assert "data.tokenizer=" in str(refused.value) and message in str(refused.value)


def test_no_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no end-of-document token"):
        load_tokenizer(str(write_hf(tmp_path / "tokenizer.json", ("<other>",))))
    with pytest.raises(UserError, match=r"is a folder without tokenizer.json"):
        (tmp_path / "empty").mkdir()
        load_tokenizer(str(tmp_path / "empty"))


def test_preparing_imports_no_torch() -> None:
    code = "import sys, k3train.data.prepare, k3train.data.bundled; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_placeholder_of_images(tmp_path: Path) -> None:
    byte = load_tokenizer("byte", "<image>")
    assert byte.image_id == 257 and byte.encode("<image>") == list(b"<image>")
    assert byte.decode([65, 257, 66]) == "AB"
    ranks = write_ranks(tmp_path / "plain.tiktoken")
    assert load_tokenizer(str(ranks)).image_id == 256 + 21
    hf = write_hf(tmp_path / "tokenizer.json", ("[EOS]", "[PAD]", "<image>", "<picture>"))
    assert (load_tokenizer(str(hf)).image_id, load_tokenizer(str(hf), "<picture>").image_id) == (258, 259)
    assert 258 not in load_tokenizer(str(hf)).encode("an <image> in text")
    assert load_tokenizer(str(hf)).fingerprint == load_tokenizer(str(hf), "<picture>").fingerprint


def test_placeholders_that_cannot_be(tmp_path: Path) -> None:
    without = write_hf(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(without)).image_id is None
    with pytest.raises(UserError, match="no placeholder for images; name a special token"):
        image_placeholder(load_tokenizer(str(without)))
    with pytest.raises(UserError, match="image_token=<img> is no special token"):
        load_tokenizer(str(without), "<img>")
    with pytest.raises(UserError, match=r"image_token=<img>; the byte tokenizer has <image> only"):
        load_tokenizer("byte", "<img>")
    inner = tokenizers.Tokenizer.from_file(str(without))
    inner.add_tokens(["<image>"])
    inner.save(str(without))
    # Added, but not special: text that holds the name would become an image.
    assert load_tokenizer(str(without)).image_id is None
    with pytest.raises(UserError, match="image_token=<image> is part of plain text"):
        load_tokenizer(str(without), "<image>")
