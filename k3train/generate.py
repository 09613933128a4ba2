"""A model loaded for generation: one rank, no optimizer. Letters: b batch, s sequence, v vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from parallel.groups import destroy, initialize

from .checkpoint.weights import load_weights
from .config import Config
from .data.tokenizer import load_tokenizer
from .model.decoder import LanguageModelChunk
from .model.transformer_config import transformer_config
from .ops.packing import Packing
from .train.assemble import set_numerics, topology


class Generator:
    """Draws one token after another, running the whole context each time.

    K3's recurrent state and latent cache would save that; a trainer's sample does not need them.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        set_numerics(config)
        self.config = config
        self.groups = initialize(topology(config), timeout_minutes=1, seed=config.run.seed)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.model = LanguageModelChunk(
            transformer_config(config), range(config.model.num_layers), self.groups.pg_collection
        )
        self.model.to(self.groups.device).eval()
        load_weights(run_dir / "checkpoints", self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        destroy()

    @torch.no_grad()
    def extend(self, prompt: str, tokens: int, temperature: float, top_p: float, seed: int) -> str:
        """The prompt and its continuation; see `sample.sample`."""
        ids = self.tokenizer.encode(prompt)
        random = torch.Generator().manual_seed(seed)
        for _ in range(tokens):
            context = torch.tensor([ids], device=self.groups.device)
            packing = Packing.single(1, len(ids), self.groups.device)
            logits = self.model(context, packing)[0, -1, : self.tokenizer.vocab_size].float().cpu()
            token = draw(logits, temperature, top_p, random)
            if token == self.tokenizer.eod_id:
                break
            ids.append(token)
        return self.tokenizer.decode(ids)


def draw(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """One token from logits [v]: from the likeliest ones that together hold `top_p` of the probability."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = torch.where(before < top_p, probabilities, 0)
    return int(order[torch.multinomial(kept, 1, generator=random)])
