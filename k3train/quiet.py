"""Keeps the libraries' remarks to their own developers off the user's terminal."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Silence known warnings of megatron-core and torch; call before they are imported."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*ShardedTensor")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
