"""What can go wrong where bytes are kept."""


class OffloadError(RuntimeError):
    """A tier failed and no other may take over; the message says which, why, and what to change."""
