"""The model's operators: a plain reference beside every fast path, chosen by `backends.resolve`."""
