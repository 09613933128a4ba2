"""Errors that a user can mend."""


class UserError(ValueError):
    """A setting or an input that cannot work; the message names it and says what would."""
