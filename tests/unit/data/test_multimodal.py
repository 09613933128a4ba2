"""Packing by two costs, samples as a function of their index, damage that moves nothing, captions."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3train.data.blend import Blend
from k3train.data.digits import Digits, is_held_out
from k3train.data.documents import Document, Picture
from k3train.data.encode import Encoder
from k3train.data.images import ImageLimits, load_image
from k3train.data.indexed import open_corpus
from k3train.data.joint import OPEN_WINDOWS, Segment, cut, pack
from k3train.data.loader import BatchLoader, collate
from k3train.data.measure import measure
from k3train.data.multimodal import (
    ImageWindows,
    TextWindows,
    caption_samples,
    image_blend,
    open_source,
    sample_limits,
)
from k3train.data.packed import PackedWindows
from k3train.data.skips import Skips
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from tests.unit.data.pictures import encoded, noise, plain

IMAGE, EOD, PAD = ByteTokenizer.image_id, ByteTokenizer.eod_id, ByteTokenizer.pad_id
LENGTH, PATCHES = 64, 48

Costs = list[tuple[int, int]]
pieces = st.one_of(
    st.tuples(st.integers(1, 70), st.just(0)), st.tuples(st.integers(1, 20), st.integers(4, 40))
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "cache")


def encoder() -> Encoder:
    limits = sample_limits(ImageLimits(), LENGTH, PATCHES)
    return Encoder(ByteTokenizer(), limits, Skips(lambda _: None))


class Made:
    """Documents from memory."""

    name = "made"
    fingerprint = None

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, index: int) -> Document:
        return self.documents[index]


def made(count: int, seed: int = 0) -> Made:
    random = np.random.RandomState(seed)
    documents = []
    for number in range(count):
        parts: list[Any] = []
        for _ in range(random.randint(1, 4)):
            parts.append(chr(97 + number % 26) * random.randint(1, 30))
            if random.rand() < 0.7:
                size = random.randint(1, 120, 2).tolist()
                parts.append(Picture(f"p{number}", (encoded(plain(*size, colour=(number, 0, 0))),)))
        documents.append(Document(f"d{number}", tuple(parts)))
    return Made(documents)


def windows(source: Any, seed: int | None = 1, reader: Encoder | None = None, **options: Any) -> ImageWindows:
    reader = reader or encoder()
    return ImageWindows(source, reader, measure(source, reader), LENGTH, PATCHES, seed, **options)


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@given(st.lists(pieces, min_size=1, max_size=12))
def test_cut_loses_nothing_and_spares_items(costs: Costs) -> None:
    parts = list(cut(costs, LENGTH, PATCHES))
    assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts[:-1])]
    assert parts[-1][1] == sum(tokens for tokens, _ in costs)
    assert sum(patches for _, _, patches in parts) == sum(patches for _, patches in costs)
    assert all(0 < stop - start <= LENGTH and patches <= PATCHES for start, stop, patches in parts)
    borders, position = {stop for _, stop, _ in parts}, 0
    for tokens, patches in costs:
        assert not patches or not borders & set(range(position + 1, position + tokens))
        position += tokens


@given(st.lists(st.tuples(st.integers(1, LENGTH), st.integers(0, PATCHES)), max_size=80))
def test_packed_windows_hold_each_segment_once_within_both_limits(costs: Costs) -> None:
    segments = [Segment(i, 5, 5 + tokens, patches) for i, (tokens, patches) in enumerate(costs)]
    packed = list(pack(segments, LENGTH, PATCHES))
    assert sorted(segment for window in packed for segment in window) == segments
    for window in packed:
        assert window
        assert sum(s.stop - s.start for s in window) <= LENGTH and sum(s.patches for s in window) <= PATCHES
    # The first of any two windows that were open together had no room for the first segment of the second.
    for first, second in combinations(packed, 2) if len(packed) <= OPEN_WINDOWS else ():
        early, late = sorted((first, second))
        before = [s for s in early if s < late[0]]
        assert (
            sum(s.stop - s.start for s in before) + late[0].stop - late[0].start > LENGTH
            or sum(s.patches for s in before) + late[0].patches > PATCHES
        )


def check(sample: dict[str, Any]) -> None:
    tokens, labels, mask = sample["tokens"], sample["labels"], sample["loss_mask"]
    assert (tokens.dtype, labels.dtype, mask.dtype) == (np.int64, np.int64, np.float32)
    assert tokens.shape == labels.shape == mask.shape == (LENGTH,)
    used = int((tokens != PAD).sum())
    assert (tokens[:used] != PAD).all() and labels[: used - 1].tolist() == tokens[1:used].tolist()
    expected = np.arange(LENGTH) < used - 1
    expected &= labels != IMAGE
    assert mask.tolist() == expected.astype(float).tolist()
    grids = sample["grids"]
    assert sample["image_positions"].tolist() == np.flatnonzero(tokens == IMAGE).tolist()
    assert (grids[:, 1:] % 2 == 0).all()
    assert (grids[:, 1] * grids[:, 2] // 4).sum() == len(sample["image_positions"])
    assert sample["patches"].shape == (grids.prod(1).sum(), 588) and len(sample["patches"]) <= PATCHES
    assert sample["patches"].dtype == np.float32 and grids.dtype == np.int64


def test_samples_are_whole_and_an_epoch_has_every_document_once() -> None:
    source = made(60)
    mixed = windows(source)
    mixed[0]
    count = mixed.windows
    samples = [mixed[i] for i in range(count)]
    for index, sample in enumerate(samples):
        check(sample)
        assert sample["sample_id"] == index
    reader = encoder()
    expected = np.concatenate([piece.ids for d in source.documents for piece in reader.pieces(d)])
    seen = np.concatenate([sample["tokens"] for sample in samples])
    assert np.bincount(seen[seen != PAD]).tolist() == np.bincount(expected).tolist()
    # Items stand in the order of their placeholders: the colour of a patch is the number of its document.
    for sample in samples:
        colours = [round(float(p[0] + 1) * 127.5) for p in sample["patches"]]
        firsts = np.cumsum([0, *sample["grids"].prod(1)[:-1]]) if len(sample["grids"]) else []
        merged = (sample["grids"][:, 1] * sample["grids"][:, 2] // 4).tolist()
        places = np.cumsum([0, *merged[:-1]])
        for first, place in zip(firsts, places, strict=False):
            position = int(sample["image_positions"][place])
            letter = sample["tokens"][position - 1]
            assert position == 0 or letter >= 256 or letter == 97 + colours[first] % 26
    assert (seen != PAD).mean() > 0.6


def test_order_depends_on_seed_and_index_only() -> None:
    source = made(40)
    straight = windows(source)
    forward = [straight[i] for i in range(80)]
    assert straight._starts[2] < 80
    backwards = windows(source)
    assert all(alike(backwards[i], forward[i]) for i in reversed(range(80)))
    assert alike(windows(source)[47], forward[47])
    assert any(not alike(windows(source, seed=2)[i], forward[i]) for i in range(3))
    second = straight._starts[1]
    assert any(not np.array_equal(forward[i]["tokens"], forward[second + i]["tokens"]) for i in range(5))


def write(path: Path, images: dict[str, bytes], records: list[Any]) -> None:
    path.mkdir(exist_ok=True)
    for name, content in images.items():
        (path / name).write_bytes(content)
    (path / "index.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_an_image_that_fails_late_leaves_padding_and_moves_nothing(tmp_path: Path) -> None:
    images = {f"{i}.png": encoded(noise(56, 28, i)) for i in range(12)}
    records = [{"image": f"{i}.png", "text": f"caption {i:02}"} for i in range(12)]
    write(tmp_path, images, records)
    intact = windows(open_source(str(tmp_path), "train"))
    whole = [ByteTokenizer().decode(intact[0]["tokens"].tolist())]
    whole += [ByteTokenizer().decode(intact[i]["tokens"].tolist()) for i in range(1, intact.windows)]
    reader = encoder()
    damaged = windows(open_source(str(tmp_path), "train"), reader=reader)
    (tmp_path / "4.png").write_bytes(images["4.png"][:900])
    (tmp_path / "7.png").unlink()
    hit = []
    for index, good in enumerate(whole):
        bad = damaged[index]
        check(bad)
        left = ByteTokenizer().decode(bad["tokens"].tolist())
        assert left == good.replace("caption 04", "").replace("caption 07", "")
        hit.append(left != good)
    assert any(hit) and not all(hit)
    # The header of 4.png is whole, so that it fails when its pixels are read.
    assert reader.skips.counts["truncated"] == 1 and reader.skips.counts["missing"] == 1


def test_a_source_that_rots_away_ends_with_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": encoded(plain())}, [{"image": "a.png"}] * 20)
    rotten = windows(open_source(str(tmp_path), "train"))
    assert rotten[0]["loss_mask"].sum() > 0
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"none of 100 samples is usable \(left out .* missing"):
        rotten[0]
    (tmp_path / "index.jsonl").write_text('{"image": "a.png"}\n')
    with pytest.raises(UserError, match="holds no document that can be used .* missing"):
        windows(open_source(str(tmp_path), "train"))


def test_measures_are_kept_and_follow_the_index(tmp_path: Path, cache: str) -> None:
    data = tmp_path / "data"
    write(data, {"a.png": encoded(plain(56, 56))}, [{"image": "a.png", "text": "x"}] * 3)
    first = measure(open_source(str(data), "train"), encoder(), cache)
    assert [first[i] for i in range(len(first))] == [[(4, 16), (1, 0), (1, 0)]] * 3
    (data / "a.png").unlink()
    again = encoder()
    kept = measure(open_source(str(data), "train"), again, cache)
    assert kept[2] == first[2] and again.skips.total == 0
    write(data, {"a.png": encoded(plain())}, [{"image": "a.png", "text": "longer"}])
    assert measure(open_source(str(data), "train"), again, cache)[0] == [(1, 4), (6, 0), (1, 0)]
    for stored in Path(cache, "measures").glob("*.npz"):
        stored.write_bytes(b"torn")
    assert measure(open_source(str(data), "train"), again, cache)[0] == [(1, 4), (6, 0), (1, 0)]
    (data / "b.png").write_bytes(b"nothing")
    write(data, {}, [{"image": "a.png"}, {"image": "b.png"}])
    for _ in range(2):
        counting = encoder()
        measure(open_source(str(data), "train"), counting, cache)
        assert counting.skips.counts == {"unknown format": 1}


def test_measures_without_a_file_that_may_come_back_are_not_kept(tmp_path: Path, cache: str) -> None:
    data = tmp_path / "data"
    write(data, {"a.png": encoded(plain())}, [{"image": "a.png"}, {"image": "late.png", "text": "x"}])
    before = encoder()
    absent = measure(open_source(str(data), "train"), before, cache)
    assert absent[1] == [] and before.skips.counts == {"missing": 1}
    (data / "late.png").write_bytes(encoded(plain(56, 56)))
    after = encoder()
    assert measure(open_source(str(data), "train"), after, cache)[1] == [(4, 16), (1, 0), (1, 0)]
    assert after.skips.total == 0 and len(list(Path(cache, "measures").glob("*.npz"))) == 1


def test_digits_split_and_pixels() -> None:
    train, valid = Digits("train"), Digits("valid")
    assert len(train) + len(valid) == 1797
    assert not set(train.indices) & set(valid.indices)
    assert 0.17 < len(valid) / 1797 < 0.23
    assert is_held_out(valid.indices[0]) and not is_held_out(train.indices[0])
    # The first digit of the set is a nought: dark inside, light on its ring.
    document = train.read(0) if train.indices[0] == 0 else valid.read(valid.indices.index(0))
    picture = document.parts[0]
    assert isinstance(picture, Picture) and document.parts[1:] == ("=", "0", "\n")
    frames = load_image(picture.blobs[0], ImageLimits())
    assert frames.shape == (1, 8, 8, 3) and frames[0, 3, 3, 0] < 100 < frames[0, 3, 2, 0]
    reader = encoder()
    assert [p.ids.tolist() for p in reader.pieces(document)] == [[IMAGE], [61], [48], [10], [EOD]]


def test_caption_samples_ask_for_every_held_out_digit_once() -> None:
    samples = caption_samples(encoder(), LENGTH, PATCHES)
    asked: list[int] = []
    for sample in samples:
        check(sample)
        places = sample["answer_positions"]
        assert (sample["tokens"][places] == ord("=")).all() and (sample["tokens"][places - 1] == IMAGE).all()
        assert len(places) == len(sample["grids"])
        asked += (sample["labels"][places] - ord("0")).tolist()
    valid = Digits("valid")
    assert sorted(asked) == sorted(valid.labels[valid.indices].tolist())
    batch = collate(samples[:2])
    assert batch["labels"].flatten()[batch["answer_positions"]].tolist() == [a + 48 for a in asked[:24]]


MakeCorpus = Callable[[str, list[list[int]]], str]


def text(prefix: str) -> PackedWindows:
    return PackedWindows(open_corpus(prefix), LENGTH, seed=1, vocab_size=259, pad_id=PAD)


def test_blend_with_text_and_exact_resume(make_corpus: MakeCorpus) -> None:
    letters = TextWindows(text(make_corpus("a", [[65] * 500, [66] * 500])), IMAGE)
    digits = image_blend(
        ["digits"], None, "train", encoder(), sequence_length=LENGTH, max_patches=PATCHES, seed=1
    )
    mixed: Blend[Any] = Blend([letters, digits], [0.5, 0.5])
    batches = [next(b) for b in [loader(mixed, 0)] for _ in range(6)]
    with_images = [[len(mixed[i]["grids"]) > 0 for i in range(j, j + 2)] for j in range(0, 12, 2)]
    assert with_images == [[False, True]] * 6
    for done, expected in enumerate(batches):
        resumed = next(loader(mixed, 2 * done))
        assert all(torch.equal(resumed[key], expected[key]) for key in expected)
    batch = batches[0]
    assert batch["image_positions"].min() >= LENGTH
    assert (batch["tokens"].flatten()[batch["image_positions"]] == IMAGE).all()
    assert (batch["tokens"] == IMAGE).sum() == len(batch["image_positions"]) == len(batch["grids"])
    assert batch["patches"].shape == (4 * len(batch["grids"]), 588)


def loader(dataset: Any, consumed: int) -> BatchLoader:
    return BatchLoader(
        dataset,
        micro_batch_size=2,
        num_microbatches=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        consumed_samples=consumed,
    )


def test_text_alone_is_a_micro_batch_with_no_items(make_corpus: MakeCorpus) -> None:
    letters = TextWindows(text(make_corpus("a", [[65] * 500])), IMAGE)
    batch = collate([letters[0], letters[1]])
    assert batch["patches"].shape == (0, 588) and batch["patches"].dtype == torch.float32
    assert batch["grids"].shape == (0, 3) and batch["image_positions"].shape == (0,)
    assert batch["grids"].dtype == batch["image_positions"].dtype == torch.int64
    with pytest.raises(UserError, match="token 257, the placeholder"):
        TextWindows(text(make_corpus("b", [[65] * 40 + [IMAGE] + [65] * 30])), IMAGE)[0]


def test_a_sample_too_small_for_an_item() -> None:
    with pytest.raises(UserError, match=r"data.max_patches=15 with data.sequence_length=64; valid: 16"):
        sample_limits(ImageLimits(), 64, 15)
    with pytest.raises(UserError, match="does not exist"):
        open_source("nowhere", "train")
