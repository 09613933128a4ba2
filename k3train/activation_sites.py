"""Where the model saves tensors for its backward: every site by name, and what is known of a tensor.

Sites are those that `k3train.model` names through `offload.sites`; `activation_bytes` knows what each saves.
A tensor belongs to the site where it is saved first: what enters a region to the region's, what leaves it to
the next one's. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .config import Config
from .expert_plan import balanced
from .shapes import layer_kinds


class Site(NamedTuple):
    """One name."""

    name: str
    holds: str
    is_region: bool = False
    """Whether it may be run again instead of what it saves being kept."""


_KDA = (
    Site("kda.input", "normed input of the projections of q, k and v", True),
    Site("kda.qkv", "q, k and v before convolution and SiLU", True),
    Site("kda.decay", "low-rank decay logits, beta", True),
    Site("kda.core", "q and k normalised, v, decay logits, products inside chunks", True),
    Site("kda.gate_input", "what the projection of the output gate makes", True),
    Site("kda.gate", "output, its norm, and the gate", True),
    Site("kda.output", "gated output"),
)
_MLA = (
    Site("mla.input", "normed input of the projections of both latents", True),
    Site("mla.query", "latent of the queries and its norm", True),
    Site("mla.key", "latent of keys and values and its norm", True),
    Site("mla.core", "queries, keys, values, attention output", True),
    Site("mla.gate_input", "what the projection of the output gate makes", True),
    Site("mla.gate", "the gate", True),
    Site("mla.output", "gated output"),
)
_DENSE = (
    Site("ffn.input", "normed input", True),
    Site("ffn.activation", "gate and up", True),
    Site("ffn.output", "activated"),
)
_MOE = (
    Site("moe.router", "normed input, which all of the layer reads, and scores", True),
    Site("moe.input", "what the projection to the latent width makes", True),
    Site("moe.dispatch", "indices"),
    Site("moe.dispatch_input", "rows of the experts", True),
    Site("moe.activation", "gate and up of the experts", True),
    Site("moe.experts", "activated rows of the experts"),
    Site("moe.combine", "outputs of the experts, weights", True),
    Site("moe.norm", "combined rows", True),
    Site("moe.output", "combined rows, normed"),
    Site("moe.shared.input", "what the first projection of the shared experts makes", True),
    Site("moe.shared.activation", "gate and up of the shared experts", True),
    Site("moe.shared.output", "activated, of the shared experts"),
)
_ONE_STEP = ("moe.dispatch_input", "moe.activation", "moe.experts", "moe.combine")
_MOONEP = (
    # Dispatch, experts and combine are one step of autograd, which is no region.
    Site("moe.dispatch_input", "latent tokens"),
    Site("moe.experts", "gate and up of the experts, weights of their rows"),
    *(site for site in _MOE if site.name not in _ONE_STEP),
)
_DECODER = (
    Site("layer", "what enters a decoder layer, or some of them together", True),
    Site("attn_res.bank", "finished block sums, which many places read"),
    Site("attn_res.mix", "running sums, mixtures, statistics of mixture and norm", True),
)
_MTP = (
    Site("mtp.layer", "what enters the MTP layer", True),
    Site("mtp.input", "embeddings of the tokens ahead, norms", True),
    Site("mtp.fusion", "both normed inputs side by side"),
    Site("mtp.norm", "residual stream of the MTP layer", True),
    Site("mtp.head", "normed features, softmax of the logits or what makes it again", True),
)
_TOWER = (
    Site("vit.input", "pixels"),
    Site("vit.layer", "what enters a block of the tower", True),
    Site("vit.norm", "residual stream", True),
    Site("vit.qkv", "normed input of the attention, rotary tables", True),
    Site("vit.core", "q, k, v, attention output", True),
    Site("vit.output", "attention output, where the core does not keep it"),
    Site("vit.ffn", "normed input of the feed-forward part", True),
    Site("vit.activation", "inner rows before GELU", True),
    Site("vit.ffn_output", "inner rows behind GELU"),
    Site("vit.projector", "merged patches, rows of the projector"),
)
_HEAD = Site("head", "normed features, softmax of the logits or what makes it again", True)
OTHER = Site("other", "token ids")
_REGIONS = {
    site.name for site in (*_KDA, *_MLA, *_DENSE, *_MOE, *_DECODER, *_MTP, *_TOWER, _HEAD) if site.is_region
}


def _in_mtp(found: Iterable[Site]) -> list[Site]:
    return [site._replace(name=f"mtp.{site.name}") for site in found]


_SUBLAYERS = (*_KDA, *_MLA, *_DENSE, *_MOE)
SITES = (OTHER, *_DECODER, *_SUBLAYERS, _HEAD, *_MTP, *_in_mtp(_SUBLAYERS), *_TOWER)
"""Every site that any model has."""


def sites(config: Config) -> tuple[Site, ...]:
    """Every site of a configured model, the MTP layer's and the tower's with their prefix."""
    kinds = layer_kinds(config.model)
    moe = _MOONEP if balanced(config) else _MOE
    found = [
        OTHER,
        *_DECODER,
        *_sublayers(kinds, moe),
        _HEAD,
    ]
    if config.model.mtp_layers:
        found += [*_MTP, *_in_mtp(_sublayers(kinds[-1:], moe))]
    return (*found, *(_TOWER if config.vision.enabled else ()))


def is_region(name: str) -> bool:
    """Whether a site, with its prefix or without, may be run again."""
    return name in _REGIONS or name.removeprefix("mtp.") in _REGIONS


def _sublayers(kinds: Iterable[tuple[str, str]], moe: tuple[Site, ...]) -> list[Site]:
    present = {part for kind in kinds for part in kind}
    parts = {"kda": _KDA, "mla": _MLA, "dense": _DENSE, "moe": moe}
    return [site for part, group in parts.items() if part in present for site in group]


@dataclass(frozen=True)
class Saved:
    """A tensor that backward needs, or would need if some region were run again."""

    site: str
    what: str
    bytes: float
    """Of one token, or patch."""
    kind: str
    """model (its dtype; block-FP8 is possible), fp32, or index (integers, which always stay)."""
    made_in: str | None
    """The region that makes it, and makes it again under recompute."""
    saved_by: tuple[str, ...]
    """Sites that save it; a region does so unless it is recomputed."""
    taken_by: tuple[str, ...]
    """Regions that need it to run again."""

    def is_held(self, is_recomputed: Callable[[str], bool]) -> bool:
        """Whether it is stored from forward to backward."""

        def is_run_again(site: str) -> bool:
            return is_region(site) and is_recomputed(site)

        if self.kind == "index":
            return True
        if self.made_in is not None and is_run_again(self.made_in):
            return False
        return not all(map(is_run_again, self.saved_by)) or any(map(is_run_again, self.taken_by))


@dataclass(frozen=True)
class Cost:
    """Of running a region forward for one token or patch."""

    flops: float
    """Of matrix products and cores, as in `flops`."""
    bytes: float
    """Moved through device memory, weights left out."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def held_bytes(
    tensors: Iterable[Saved], is_recomputed: Callable[[str], bool] = lambda _: False
) -> dict[str, float]:
    """Bytes of one token that are stored, by site."""
    held: dict[str, float] = {}
    for tensor in tensors:
        if tensor.is_held(is_recomputed):
            held[tensor.site] = held.get(tensor.site, 0) + tensor.bytes
    return held
