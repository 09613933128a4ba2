"""The micro-batches of a run: its corpus cut for this rank, on this rank's device.

Shapes: b batch, s sequence.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from parallel.context.exchange import even
from parallel.groups import Groups

from ..config import Config
from ..curriculum import data_salt, stage_of
from ..data.blend import Blend
from ..data.chat.windows import build_chats
from ..data.datasets import Samples, build_datasets, describe_long
from ..data.encode import Encoder
from ..data.loader import BatchLoader, Dataset, collate
from ..data.long.windows import build_needles
from ..data.multimodal import TextWindows, build_encoder, caption_samples, image_blend
from ..data.ngram import LARGEST_VOCABULARY, byte_bigram_loss
from ..data.packed import Sample
from ..data.skips import Skips
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..ops.packing import Packing
from ..vision_shapes import Grid
from .step import Batch

IMAGE_SALT = 2 << 32
"""Images come in an order of their own."""

BY_COLUMN = ("tokens", "labels", "loss_mask")

AGREED = ("tokens", "grids", "image_positions", "loss_mask")


class Inputs:
    """Training steps in order from any point on, and the same validation micro-batches every time."""

    def __init__(self, config: Config, groups: Groups, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` tells a person, on one rank, what is slow to prepare and what was left out."""
        data, run = config.data, config.run
        self.config, self.groups = config, groups
        self.stage = stage_of(config)
        self.seed = run.seed + data_salt(config)
        self.tokenizer: Tokenizer = load_tokenizer(data.tokenizer, data.image_token)
        ranks = groups.pg_collection.dp.size()
        self.global_batch_size = data.micro_batch_size * run.microbatches * ranks
        self.skips = Skips(say)
        self.encoder = (
            build_encoder(data, config.vision, self.tokenizer, self.skips) if config.vision.enabled else None
        )
        self.train, self.valid = self._chats(say) if data.source == "chat" else self._texts(say)
        self.loader = open_loader(config, groups, self.train)
        self._ahead: list[Batch] | None = None
        self._jumps: dict[int, int] = {}
        self._read_steps = self.stage.first

    def seek(self, steps_done: int, skips: dict[int, int] | None = None) -> None:
        """Continue behind `steps_done` steps of the run.

        Args:
            skips: step -> steps whose samples are left out before it.
        """
        self._ahead, self._read_steps = None, steps_done
        self._jumps = skips or {}
        skipped = sum(count for step, count in self._jumps.items() if self.stage.first < step <= steps_done)
        own = steps_done - self.stage.first + skipped
        self.loader.load_state_dict({"consumed_samples": own * self.global_batch_size, "microbatch": 0})

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step; with images a collective of its pipeline."""
        batches, self._ahead = self._ahead or self._read(), None
        return [self._place(batch) for batch in batches]

    def images_ahead(self) -> list[list[Grid]]:
        """Grids of the images, by micro-batch, of what `next_step` will give; a collective likewise."""
        if self._ahead is None:
            self._ahead = self._read()
        return [_grids(batch) for batch in self._ahead]

    def validation(self) -> list[Batch]:
        """This rank's share of the validation micro-batches."""
        assert self.valid is not None
        size, ranks = self.config.data.micro_batch_size, self.groups.pg_collection.dp.size()
        count = self.config.eval.batches // ranks
        first = self.groups.pg_collection.dp.rank() * count
        return [
            self._place(collate([self.valid[index] for index in range(batch * size, (batch + 1) * size)]))
            for batch in range(first, first + count)
        ]

    def captions(self) -> list[Batch]:
        """This rank's share of the held-out digits, all of them over the ranks; [] without digits."""
        data = self.config.data
        if self.encoder is None or "digits" not in data.images:
            return []
        samples = self._held_out
        size, ranks = data.micro_batch_size, self.groups.pg_collection.dp.size()
        # Every rank runs as many micro-batches; what fills them up asks nothing.
        blank = samples[0] | {"answer_positions": np.empty(0, np.int64)}
        samples = samples + [blank] * (-len(samples) % (size * ranks))
        share = len(samples) // ranks
        first = self.groups.pg_collection.dp.rank() * share
        return [
            self._place(collate(samples[index : index + size])) for index in range(first, first + share, size)
        ]

    def bigram_loss(self) -> float | None:
        """What a bigram model fitted on the whole training split makes of the validation samples, in nats.

        None for a corpus or vocabulary that is too large to count within seconds.
        """
        vocabulary = self.tokenizer.vocab_size
        if self.config.data.source != "bundled" or vocabulary > LARGEST_VOCABULARY or self.valid is None:
            return None
        corpus = self.text.corpora[0].corpus
        windows = [
            np.append(sample["tokens"], sample["labels"][-1])
            for sample in (self.valid[index] for index in range(len(self.valid)))
        ]
        return byte_bigram_loss(corpus.tokens, windows, vocabulary)

    def left_out(self) -> dict[str, int]:
        """Images, documents and chats that could not be used, over all ranks, by reason; a collective."""
        if self.encoder is None and self.config.data.source != "chat":
            return {}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self.skips.entries())
        return dict(Counter(reason for reason, _ in {entry for entries in ranks for entry in entries}))

    def close(self) -> None:
        """End the reading thread."""
        self.loader.close()

    @property
    def _train_samples(self) -> int:
        """Those of all steps, and those that loss spikes may leave out."""
        spike = self.config.fault.spike
        left_out = 0 if spike.threshold is None else spike.rollbacks * spike.steps
        return self.global_batch_size * (self.stage.steps + left_out)

    @cached_property
    def _held_out(self) -> list[Sample]:
        assert self.encoder is not None
        return caption_samples(self.encoder, self.config.data.sequence_length, self.config.data.max_patches)

    def _texts(self, say: Callable[[str], None]) -> tuple[Samples, Samples | None]:
        """Samples of a text corpus, with those of images among the ones to train on."""
        data, valid_samples = self.config.data, self.config.eval.batches * self.config.data.micro_batch_size
        train_samples = self._train_samples
        build = build_needles if data.source == "needles" else build_datasets
        train, valid = build(
            data, self.tokenizer, data.sequence_length, self.seed, train_samples, valid_samples
        )
        self.text: Any = train.blend
        if shares := describe_long(cast(Blend[Any], train.blend), data.long_documents):
            say(shares)
        if self.encoder is None:
            return train, valid
        if valid:
            valid = Samples(TextWindows(valid.blend, self.encoder.image_id), len(valid))
        return self._with_images(train, self.encoder, say), valid

    def _chats(self, say: Callable[[str], None]) -> tuple[Samples, Samples | None]:
        data = self.config.data
        return build_chats(
            data,
            self.tokenizer,
            self.encoder,
            self.skips,
            self.seed,
            self._train_samples,
            self.config.eval.batches * data.micro_batch_size,
            say,
        )

    def _with_images(self, text: Samples, encoder: Encoder, say: Callable[[str], None]) -> Samples:
        data = self.config.data
        images = image_blend(
            data.images,
            data.image_weights,
            "train",
            encoder,
            sequence_length=data.sequence_length,
            max_patches=data.max_patches,
            seed=self.seed + IMAGE_SALT,
            cache_dir=data.cache_dir,
            say=say,
        )
        mixed: Blend[Any] = Blend(
            [TextWindows(text.blend, encoder.image_id), images],
            [1 - data.image_share, data.image_share],
        )
        return Samples(mixed, text.num_samples)

    def _read(self) -> list[Batch]:
        self._read_steps += 1
        if skipped := self._jumps.get(self._read_steps, 0):
            consumed = self.loader.consumed_samples + skipped * self.global_batch_size
            self.loader.load_state_dict({"consumed_samples": consumed, "microbatch": 0})
        batches = [next(self.loader) for _ in range(self.config.run.microbatches)]
        return batches if self.encoder is None else self._agreed(batches)

    def _agreed(self, batches: list[Batch]) -> list[Batch]:
        """The batches, or those of the first rank where a rank that reads the same could not read an image.

        The shapes of the features follow from the batches: ranks that disagree would wait for each other.
        """
        collection = self.groups.pg_collection
        groups = [group for group in (collection.pp, collection.cp) if group.size() > 1]
        digest = _digest(batches)
        largest = torch.tensor([digest, -digest], device=self.groups.device)
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        if largest.tolist() == [digest, -digest]:
            return batches
        held = [batches]
        for group in groups:
            dist.broadcast_object_list(held, src=dist.get_global_rank(group, 0), group=group)
        return held[0]

    def _place(self, batch: Batch) -> Batch:
        """This rank's columns of a micro-batch on its device; images are those of the whole rows."""
        group, device = self.groups.pg_collection.cp, self.groups.device
        packing = Packing.from_tokens(batch["tokens"], self.tokenizer.eod_id)
        if group.size() > 1:
            packing = packing.shard(group, even(batch["tokens"].shape[1], group.size()))
            batch = columns(batch, packing)
        placed: Batch = {
            name: value.to(device, non_blocking=True) for name, value in batch.items() if name != "grids"
        }
        if "grids" in batch:
            placed["grids"] = _grids(batch)
            if group.size() > 1:  # they are sorted out there
                placed["image_positions"] = batch["image_positions"]
        placed["packing"] = packing.to(device)
        return placed


def open_loader(config: Config, groups: Groups, samples: Dataset) -> BatchLoader:
    """This rank's micro-batches of samples that are the same on all ranks."""
    return BatchLoader(
        samples,
        micro_batch_size=config.data.micro_batch_size,
        num_microbatches=config.run.microbatches,
        data_parallel_rank=groups.pg_collection.dp.rank(),
        data_parallel_size=groups.pg_collection.dp.size(),
    )


def columns(batch: Batch, packing: Packing) -> Batch:
    """A micro-batch of whole rows cut to this rank's columns.

    `image_positions` stay places in the whole rows; of `answer_positions` those in these columns are kept, as
    places in these columns.
    """
    span = packing.span
    assert span is not None
    length, share = span.starts[-1], span.stop - span.start
    cut = {name: batch[name][:, span.start : span.stop].contiguous() for name in BY_COLUMN}
    if "answer_positions" in batch:
        rows, columns = batch["answer_positions"] // length, batch["answer_positions"] % length
        here = (columns >= span.start) & (columns < span.stop)
        cut["answer_positions"] = rows[here] * share + columns[here] - span.start
    return batch | cut


def _grids(batch: Batch) -> list[Grid]:
    return [tuple(grid) for grid in batch["grids"].tolist()]


def _digest(batches: list[Batch]) -> int:
    checksum = 0
    for batch in batches:
        for name in AGREED:
            checksum = zlib.crc32(batch[name].numpy().tobytes(), checksum)
    return checksum
