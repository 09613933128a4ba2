"""How the loss gets its logits: all of them at once, or those of some words at a time. Needs no torch."""

from __future__ import annotations

from .config import Config
from .microbatch import element_bytes, tokens_per_microbatch
from .shapes import vocab_rows

CHUNKED, WHOLE = "chunked", "megatron"
IN_CHUNKS = (CHUNKED, "triton")
FLOAT = 4
ALIGNED = 64
"""A chunk of more words than this has a multiple of it."""


def chunk_words(tokens: int, vocabulary: int, logits_mib: int) -> int:
    """Words of the vocabulary whose FP32 logits fit the budget, for all tokens, in chunks of like size."""
    fitting = max(1, (logits_mib << 20) // (FLOAT * max(1, tokens)))
    if fitting > ALIGNED:
        fitting -= fitting % ALIGNED
    even = -(-vocabulary // -(-vocabulary // fitting))
    return min(fitting, -(-even // ALIGNED) * ALIGNED)


def chosen(config: Config) -> str:
    """The backend that a configuration's training takes."""
    requested = config.model.backends.cross_entropy
    return WHOLE if requested == "auto" else requested


def logits_bytes(config: Config) -> int:
    """What a pass through the head needs beside what is held for backward, and the gradients of weights.

    Whole: logits and their FP32 copy, or the gradients of both, while the softmax is held; the plain
    reference makes a second FP32 gradient. In chunks: those of one chunk and its gradient in the model's
    dtype, and twice the gradient of all tokens' features in FP32.
    """
    model, tokens, element = config.model, tokens_per_microbatch(config), element_bytes(config.model)
    words, backend = vocab_rows(model), chosen(config)
    if backend in IN_CHUNKS:
        words = min(words, chunk_words(tokens, words, model.backends.logits_mib))
        low = element if element < FLOAT else 0
        return tokens * (words * (FLOAT + low) + 2 * model.hidden_size * FLOAT)
    return tokens * words * (element + (1 if backend == WHOLE else 2) * FLOAT)


def assumptions(config: Config) -> list[str]:
    """What a plan says of a loss in chunks."""
    if chosen(config) not in IN_CHUNKS:
        return []
    words = vocab_rows(config.model)
    chunk = chunk_words(tokens_per_microbatch(config), words, config.model.backends.logits_mib)
    some = f"{min(chunk, words):,} of {words:,} words"
    return [f"the loss takes logits of {some} at a time and makes them again in backward, one product more"]
