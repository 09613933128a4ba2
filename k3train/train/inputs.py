"""The micro-batches of a run: its corpus cut for this rank, on this rank's device.

Shapes: b batch, s sequence.
"""

from __future__ import annotations

import numpy as np

from parallel.groups import Groups

from ..config import Config
from ..data.datasets import build_datasets
from ..data.loader import BatchLoader, collate
from ..data.ngram import LARGEST_VOCABULARY, byte_bigram_loss
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..ops.packing import Packing
from .step import Batch


class Inputs:
    """Training steps in order from any point on, and the same validation micro-batches every time."""

    def __init__(self, config: Config, groups: Groups) -> None:
        data, run = config.data, config.run
        self.config, self.groups = config, groups
        self.tokenizer: Tokenizer = load_tokenizer(data.tokenizer)
        ranks = groups.pg_collection.dp.size()
        self.global_batch_size = data.micro_batch_size * run.microbatches * ranks
        self.train, self.valid = build_datasets(
            data,
            self.tokenizer,
            data.sequence_length,
            run.seed,
            self.global_batch_size * run.steps,
            config.eval.batches * data.micro_batch_size,
        )
        self.loader = BatchLoader(
            self.train,
            micro_batch_size=data.micro_batch_size,
            num_microbatches=run.microbatches,
            data_parallel_rank=groups.pg_collection.dp.rank(),
            data_parallel_size=ranks,
        )

    def seek(self, steps_done: int) -> None:
        """Continue behind `steps_done` steps."""
        self.loader.load_state_dict(
            {"consumed_samples": steps_done * self.global_batch_size, "microbatch": 0}
        )

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step."""
        return [self._place(next(self.loader)) for _ in range(self.config.run.microbatches)]

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

    def bigram_loss(self) -> float | None:
        """What a bigram model fitted on the whole training split makes of the validation samples, in nats.

        None for a corpus or vocabulary that is too large to count within seconds.
        """
        vocabulary = self.tokenizer.vocab_size
        if self.config.data.source != "bundled" or vocabulary > LARGEST_VOCABULARY or self.valid is None:
            return None
        corpus = self.train.blend.corpora[0].corpus
        windows = [
            np.append(sample["tokens"], sample["labels"][-1])
            for sample in (self.valid[index] for index in range(len(self.valid)))
        ]
        return byte_bigram_loss(corpus.tokens, windows, vocabulary)

    def close(self) -> None:
        """End the reading thread."""
        self.loader.close()

    def _place(self, batch: Batch) -> Batch:
        device = self.groups.device
        placed = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        placed["packing"] = Packing.from_tokens(placed["tokens"], self.tokenizer.eod_id)
        return placed
