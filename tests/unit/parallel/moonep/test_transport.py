"""Which transport runs, and a transport of one rank."""

from __future__ import annotations

import pytest
import torch

from parallel.moonep import MoonEP
from parallel.moonep.transport import TransportError, choose, open_transport

CPU = torch.device("cpu")


def test_the_choice_says_why_not_the_other() -> None:
    choice = choose("auto", None, CPU)
    assert choice.name == "collective"
    assert choice.reasons == {"peer": "reaches into the memory of GPUs, and this run is on cpu"}
    assert choose("collective", None, CPU).reasons == {"peer": "not asked for"}


def test_what_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(TransportError, match="transport=peer: reaches into the memory of GPUs.*use auto"):
        open_transport("peer", None, CPU)
    with pytest.raises(TransportError, match="transport=pigeon: use auto, peer, collective"):
        choose("pigeon", None, CPU)


def test_one_rank_keeps_its_rows() -> None:
    transport = open_transport("auto", None, CPU)
    rows = torch.randn(3, 2)
    assert torch.equal(transport.exchange(rows, [3], [3]).wait(), rows)
    assert torch.equal(transport.gather(rows[0]), rows[:1])
    assert transport.fetch_experts([[]], [rows]).wait() == []
    assert transport.return_gradients([[]], [], 1, rows).wait() == [[]]


def test_bad_arguments_are_refused() -> None:
    for options, words in (
        ({"slots": 4}, "slots=4: use 1 to 3"),
        ({"slots": 0}, "slots=0: use 1 to 3"),
        ({"combine": "maybe"}, "use auto, sums or entries"),
    ):
        with pytest.raises(ValueError, match=words):
            MoonEP(None, 3, device=CPU, **options)  # type: ignore[arg-type]
