"""Context parallelism: exchanges between ranks that hold neighbouring parts of the same rows."""
