"""`train(config)`: the entry of every rank. Prepares the process, then hands over to `session`."""

from __future__ import annotations

import os
import sys
import traceback

from parallel.cpu import enable_cpu

from ..config import Config
from ..errors import UserError
from ..quiet import quiet


def train(config: Config) -> int:
    """Run or continue a run on this rank; the exit status: 0 done, or interrupted and saved.

    Raises:
        UserError: the input cannot be used; the same on every rank where all of them see it.
    """
    quiet()
    enable_cpu()
    from offload.errors import OffloadError
    from parallel.groups import RankMismatchError, destroy
    from parallel.moonep.transport import TransportError
    from parallel.topology import LayoutError

    from .diagnose import NonFiniteError
    from .session import Session

    try:
        Session(config).run()
    except (LayoutError, RankMismatchError, TransportError) as error:
        raise UserError(str(error)) from error
    except UserError:
        raise
    except NonFiniteError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"k3train: {error}", file=sys.stderr)
        return 1
    except OffloadError as error:
        # A rank of many: the others wait for it in a collective, and end with it.
        print(f"k3train: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("k3train: interrupted; nothing was saved since the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)
    except Exception:
        # The other ranks may wait for this one in a collective: leave at once, and the agent ends them.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    destroy()
    return 0
