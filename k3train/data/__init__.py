"""From text to micro-batches: tokenizers, indexed corpora, packed windows, deterministic loading."""
