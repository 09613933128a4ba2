"""`train(stages)`: the entry of every rank. Prepares the process, then hands over to `session`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from parallel.cpu import enable_cpu

from ..config import Config
from ..errors import UserError
from ..exit_status import DIVERGED, DONE, FAILED, INTERRUPTED, SAVED, UNHEALTHY
from ..quiet import quiet


def train(stages: Sequence[Config], stages_behind: Callable[[int], Sequence[Config]] | None = None) -> int:
    """Run or continue a run on this rank; the exit status, of `exit_status`.

    Args:
        stages: the configuration of each stage that is left, or the single one of a run without stages.
        stages_behind: gives those that are left behind a step; asked when a checkpoint is damaged and the
            intact one before it is of an earlier stage.

    Raises:
        UserError: the input cannot be used; the same on every rank where all of them see it.
    """
    quiet()
    enable_cpu()
    from offload.errors import OffloadError
    from parallel.groups import RankMismatchError, destroy
    from parallel.moonep.transport import TransportError
    from parallel.topology import LayoutError

    from ..checkpoint.saving import SaveError
    from .diagnose import NonFiniteError
    from .health import UnhealthyError
    from .session import Session
    from .spike import SpikeError

    try:
        session = Session(stages, stages_behind)
        session.run()
    except (LayoutError, RankMismatchError, TransportError) as error:
        raise UserError(str(error)) from error
    except UserError:
        raise
    except (NonFiniteError, SpikeError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"k3train: {error}", file=sys.stderr)
        return DIVERGED
    except SaveError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"k3train: {error}", file=sys.stderr)
        return FAILED
    except UnhealthyError as error:
        if not error.alike or os.environ.get("RANK", "0") == "0":
            print(f"k3train: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(UNHEALTHY)
    except OffloadError as error:
        # A rank of many: the others wait for it in a collective, and end with it.
        print(f"k3train: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(FAILED)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("k3train: interrupted; nothing was saved since the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    except Exception:
        # The other ranks may wait for this one in a collective: leave at once, and the agent ends them.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    destroy()
    return SAVED if session.unfinished else DONE
