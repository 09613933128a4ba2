"""Who may change what a command writes: its user, and the group where the umask lets it, never all others."""

from __future__ import annotations

import os
import stat


def keep_from_others() -> None:
    """Let no file or folder that this process and its children make be writable to all.

    A umask of 0002 goes on sharing a run with its group; one of 0000, which some containers have, does not
    open it to everybody.
    """
    os.umask(os.umask(0o077) | stat.S_IWOTH)
