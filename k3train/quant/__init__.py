"""Low-precision number formats, and training that is aware of them."""
