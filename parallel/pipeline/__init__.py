"""How micro-batches move through pipeline stages."""
