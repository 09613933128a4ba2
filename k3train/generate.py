"""A model loaded for generation: one rank, no optimizer. Letters: b batch, s sequence, v vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from parallel.groups import destroy, initialize

from .checkpoint.weights import load_weights
from .config import Config
from .data.chat.messages import Chat, Message
from .data.chat.parse import XtmlError, parse_answer, shown
from .data.chat.spans import ChatEncoder
from .data.tokenizer import load_tokenizer
from .layout import layout_of
from .model.decoder import LanguageModelChunk
from .model.transformer_config import transformer_config
from .ops.packing import Packing
from .train.assemble import set_numerics


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: up to `tokens` of them, from the `top_p` share of the probability."""

    tokens: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_p: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What a model wrote behind a chat."""

    text: str
    """All of it, structural tokens by name."""
    message: Message | None
    """What it says, where it follows the grammar."""
    problem: str = ""
    """Where it does not, why."""


class Generator:
    """Draws one token after another, running the whole context each time.

    K3's recurrent state and latent cache would save that; a trainer's sample does not need them.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        set_numerics(config)
        self.config = config
        self.groups = initialize(layout_of(config), timeout_minutes=1, seed=config.run.seed)
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

    def extend(self, prompt: str, drawing: Drawing) -> str:
        """The prompt and its continuation; see `sample.sample`."""
        ids = self.tokenizer.encode(prompt)
        (more,) = self._continue([ids], drawing, {self.tokenizer.eod_id})
        return self.tokenizer.decode([*ids, *more])

    def answers(self, chats: Sequence[Chat], drawing: Drawing) -> list[Answer]:
        """The assistant's next message of each chat, all drawn together.

        Raises:
            UserError: the tokenizer cannot build chats, or a chat has images.
        """
        encoder = ChatEncoder(self.tokenizer)
        prompts = [encoder.prompt(chat, "the chat").tolist() for chat in chats]
        stops = {encoder.structure.end, self.tokenizer.eod_id}
        return [
            self._answer(ids, chat.thinking)
            for ids, chat in zip(self._continue(prompts, drawing, stops), chats, strict=True)
        ]

    def _answer(self, ids: list[int], thinking: bool) -> Answer:
        text = shown(ids, self.tokenizer)
        try:
            return Answer(text, parse_answer(ids, self.tokenizer, thinking=thinking))
        except XtmlError as error:
            return Answer(text, None, str(error))

    @torch.no_grad()
    def _continue(self, prompts: list[list[int]], drawing: Drawing, stops: set[int]) -> list[list[int]]:
        """What is drawn behind each prompt, the token that stops it included."""
        drawn: list[list[int]] = [[] for _ in prompts]
        random = [torch.Generator().manual_seed(drawing.seed + i) for i in range(len(prompts))]
        going = list(range(len(prompts)))
        for _ in range(drawing.tokens):
            logits = self._next_logits([prompts[i] + drawn[i] for i in going])
            for i, row in zip(going, logits, strict=True):
                drawn[i].append(draw(row, drawing.temperature, drawing.top_p, random[i]))
            going = [i for i in going if drawn[i][-1] not in stops]
            if not going:
                break
        return drawn

    def _next_logits(self, contexts: list[list[int]]) -> Tensor:
        """Logits [contexts, v] of the token behind each context; they share one row, as packed documents."""
        lengths = torch.tensor([len(context) for context in contexts])
        ends = lengths.cumsum(0)
        device = self.groups.device
        packing = Packing(
            torch.arange(len(contexts)).repeat_interleave(lengths)[None].int().to(device),
            torch.cat((torch.zeros(1, dtype=ends.dtype), ends)).int().to(device),
            int(lengths.max()),
        )
        tokens = torch.tensor([[token for context in contexts for token in context]], device=device)
        logits = self.model(tokens, packing, logits_at=(ends - 1).to(device))
        return logits[:, : self.tokenizer.vocab_size].float().cpu()


def draw(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """One token from logits [v]: from the likeliest ones that together hold `top_p` of the probability."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = torch.where(before < top_p, probabilities, 0)
    return int(order[torch.multinomial(kept, 1, generator=random)])
