"""What must hold among the ranks of a layout; each check gives one line for what does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import prod

from parallel.pipeline.rows import RowPlan
from parallel.topology import Topology

from .checkpoint.tensors import place
from .config import Config
from .memory import tower_parameters
from .optim.groups import moments
from .rehearsal_facts import KINDS, Post, Problem, RankFacts, Saved, Shape, Trade
from .shapes import EXPERT, Parameter, buffers, compact_parameters

MASTER = "fp32_param"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Boxes = Sequence[tuple[Shape, Shape, int]]
"""(offset, size, rank) of rectangles."""


def groups_agree(topology: Topology, ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Members of a group know the same group, at their own places in it, and it is the layout's."""
    planned = {
        kind: {rank: tuple(group) for group in topology.groups(kind) for rank in group} for kind in KINDS
    }
    for facts in ranks:
        for kind in KINDS:
            group, wanted = facts.groups[kind], planned[kind][facts.rank]
            name = f"{kind} group"
            if group != wanted:
                yield Problem(facts.rank, name, f"is {_some(group)}, and the layout has {_some(wanted)}")
            elif group[facts.seats[kind]] != facts.rank:
                yield Problem(facts.rank, name, f"has this rank at place {facts.seats[kind]}, not its own")


def same_calls(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """All ranks make the same communicators, and members of a group the same collectives, in one order."""
    first = ranks[0]
    for facts in ranks:
        if facts.built == first.built and facts.communicators != first.communicators:
            text = f"{facts.communicators[0]} are made, in another order than the {first.communicators[0]} of"
            yield Problem(facts.rank, "communicators", f"{text} rank {first.rank}")
    calls: dict[Shape, tuple[int, Shape]] = {}
    for facts in filter(lambda facts: facts.built, ranks):
        for group, made in facts.collectives.items():
            other, others = calls.setdefault(group, (facts.rank, made))
            if made != others:
                text = f"{made[0]} collectives while it is built, and rank {other} has {others[0]} or others"
                yield Problem(facts.rank, f"group {_some(group)}", text)


def cuts_agree(
    config: Config, topology: Topology, cuts: Sequence[range], rows: RowPlan, ranks: Sequence[RankFacts]
) -> Iterator[Problem]:
    """Chunks hold the layers of the cut and begin the rows that the messages carry."""
    for facts in ranks:
        pipeline = topology.coordinates(facts.rank)["pipeline"]
        wanted = [topology.stage_of(pipeline, chunk) for chunk in range(topology.virtual)]
        if [stage.number for stage in facts.stages] != wanted:
            have = [stage.number for stage in facts.stages]
            yield Problem(facts.rank, "chunks", f"are stages {have} of the pipeline, not {wanted}")
            continue
        for stage in facts.stages:
            name = f"stage {stage.number}"
            if stage.layers != cuts[stage.number]:
                text = f"has layers {_span(stage.layers)}, and the cut {_span(cuts[stage.number])}"
                yield Problem(facts.rank, name, text)
            elif stage.rows != len(rows.created(stage.number)):
                text = f"begins {stage.rows} rows, and messages carry {len(rows.created(stage.number))}"
                yield Problem(facts.rank, name, text)


def parameters_add_up(config: Config, topology: Topology, ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Over pipeline places, chunks and expert ranks, parameters are the whole model's.

    One rank of each place stands for the others, which is checked of those that are here.
    """
    found: dict[int, RankFacts] = {}
    for facts in ranks:
        first = found.setdefault(topology.coordinates(facts.rank)["pipeline"], facts)
        if facts.numel != first.numel:
            text = f"{facts.numel}, and rank {first.rank} at the same place of its pipeline {first.numel}"
            yield Problem(facts.rank, "parameters", text)
    if len(found) < topology.pipeline:
        return
    total = sum(each.numel["dense"] + each.numel["expert"] * topology.expert for each in found.values())
    planned = sum(entry.numel for entry in compact_parameters(config.model))
    if total != planned:
        yield Problem(None, "parameters", f"add up to {total:,} elements, and the model has {planned:,}")


def ledger_holds(
    topology: Topology, planned: Sequence[Mapping[str, int]], ranks: Sequence[RankFacts], *, even: bool
) -> Iterator[Problem]:
    """Bytes are the plan's: parameters and whole gradients to the byte, shards to their padding.

    Args:
        planned: by pipeline place.
        even: all elements have equally many moments, so that every shard holds as much.
    """
    for facts in ranks:
        ledger = planned[topology.coordinates(facts.rank)["pipeline"]]
        for kind, held in facts.held.items():
            if not even and kind in ("optimizer_states", "vision_states"):
                continue
            wanted, slack = ledger.get(kind, 0), facts.slack.get(kind, 0)
            if held > wanted + slack or (not slack and held != wanted):
                text = f"{held:,} bytes are held and {wanted:,} planned"
                yield Problem(facts.rank, kind.replace("_", " "), text)


def experts_divide(config: Config, topology: Topology, ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Ranks of an expert group hold every expert of each layer once, and lend as many slots as each other."""
    every = set(range(config.model.num_experts))
    for group, members in _members("expert", ranks):
        if len(members) < len(group):
            continue
        for layer in members[0].experts:
            held = [(expert, facts.rank) for facts in members for expert in facts.experts.get(layer, ())]
            counted: dict[int, int] = {}
            for expert, rank in held:
                if expert in counted:
                    text = f"expert {expert} is held by rank {counted[expert]} of the group too"
                    yield Problem(rank, layer, text)
                counted[expert] = rank
            if missing := every - set(counted):
                text = f"experts {_some(sorted(missing))} are on no rank of group {_some(group)}"
                yield Problem(group[0], layer, text)
        for facts in members:
            if facts.slots != members[0].slots:
                text = f"{facts.slots} slots, and rank {members[0].rank} has {members[0].slots}"
                yield Problem(facts.rank, "MoonEP", text)


def trades_meet(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """What a rank sends to a block's owner in Muon's exchange the owner expects; all take part or none."""
    for group, number, members in _trading(ranks):
        name = f"Muon exchange {number} of group {_some(group)}"
        for place_, (rank, trade) in members.items():
            for other, (peer, theirs) in members.items():
                if trade.moved != theirs.moved:
                    yield Problem(rank, name, f"moves {trade.moved} elements, and rank {peer} {theirs.moved}")
                    return
                if trade.sent[other] != theirs.received[place_]:
                    sent, taken = trade.sent[other], theirs.received[place_]
                    yield Problem(rank, name, f"sends {sent} elements to rank {peer}, which takes {taken}")


def _trading(ranks: Sequence[RankFacts]) -> Iterator[tuple[Shape, int, dict[int, tuple[int, Trade]]]]:
    """(group, number, {place in it: (rank, its part)}) of each exchange."""
    found: dict[tuple[Shape, int], dict[int, tuple[int, Trade]]] = defaultdict(dict)
    for facts in ranks:
        numbers: dict[Shape, int] = defaultdict(int)
        for trade in facts.trades:
            at = found[trade.group, numbers[trade.group]]
            at[trade.group.index(facts.rank)] = facts.rank, trade
            numbers[trade.group] += 1
    for (group, number), members in found.items():
        yield group, number, members


def transfers_meet(topology: Topology, ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Every send of a pipeline has its receive of the same width, in the same order between two ranks."""
    said: dict[int, RankFacts] = {}
    for facts in ranks:
        if facts.posts is not None:
            said.setdefault(topology.coordinates(facts.rank)["pipeline"], facts)
    lanes = {place_: _lanes(facts.posts or ()) for place_, facts in said.items()}
    for place_, facts in said.items():
        for (action, flow, peer), posts in lanes[place_].items():
            other = "recv" if action == "send" else "send"
            if peer not in said:
                continue
            theirs = lanes[peer].get((other, flow, place_), [])
            if flaw := _apart(posts, theirs):
                name = (
                    f"{flow} messages, {action} {'to' if action == 'send' else 'from'} rank {said[peer].rank}"
                )
                yield Problem(facts.rank, name, flaw)


def _lanes(posts: Iterable[Post]) -> dict[tuple[str, str, int], list[tuple[str, int]]]:
    """Messages of each direction, flow and peer, in order."""
    lanes: dict[tuple[str, str, int], list[tuple[str, int]]] = defaultdict(list)
    for post in posts:
        flow = post.message.partition("(")[0]
        lanes[post.action, flow, post.peer].append((post.message, post.width))
    return lanes


def _apart(posts: Sequence[tuple[str, int]], theirs: Sequence[tuple[str, int]]) -> str | None:
    """Where two sides of a lane differ first."""
    for (message, width), (other, expected) in zip(posts, theirs, strict=False):
        if message != other:
            return f"{message} meets {other}"
        if width != expected:
            return f"{message} has {width} elements of a token here and {expected} there"
    if len(posts) != len(theirs):
        return f"{len(posts)} here and {len(theirs)} there"
    return None


def samples_divide(config: Config, topology: Topology, ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Data ranks read different samples, and those of one pipeline and context group the same."""
    readers: dict[int, RankFacts] = {}
    owners: dict[int, int] = {}
    for facts in ranks:
        data = topology.coordinates(facts.rank)["data"]
        first = readers.setdefault(data, facts)
        if first.samples != facts.samples:
            text = f"begin with {facts.samples[:1]}, and those of rank {first.rank} with {first.samples[:1]}"
            yield Problem(facts.rank, "samples", text)
    for facts in readers.values():
        for sample in facts.samples:
            if sample in owners:
                text = f"number {sample} is read by rank {owners[sample]}, of other data, too"
                yield Problem(facts.rank, "samples", text)
                return
            owners[sample] = facts.rank
    count = config.data.micro_batch_size * config.run.microbatches * topology.data
    if len(readers) == topology.data and set(owners) != set(range(count)):
        yield Problem(None, "samples", f"{len(owners)} of the {count} of a step are read")


class Coverage:
    """That checkpoints hold every tensor of the whole model, and its optimizer states, exactly once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.boxes: dict[str, list[tuple[Shape, Shape, int]]] = defaultdict(list)
        self.found: dict[str, tuple[Shape, str, int]] = {}
        """Shape and dtype of a tensor, and who said so first."""
        self.problems: list[Problem] = []

    def add(self, facts: RankFacts) -> None:
        """Take what a rank saves."""
        for saved in facts.saved:
            shape, dtype, first = self.found.setdefault(saved.key, (saved.shape, saved.dtype, facts.rank))
            if (shape, dtype) != (saved.shape, saved.dtype):
                text = f"is {_kind(saved.shape, saved.dtype)}, and rank {first} has {_kind(shape, dtype)}"
                self.problems.append(Problem(facts.rank, saved.key, text))
                continue
            if flaw := _outside(saved):
                self.problems.append(Problem(facts.rank, saved.key, flaw))
                continue
            self.boxes[saved.key].append((saved.offset, saved.size, facts.rank))

    def check(self, *, complete: bool) -> Iterator[Problem]:
        """What is wrong; with `complete`, also what no rank saves."""
        yield from self.problems
        for key, boxes in self.boxes.items():
            if pair := overlap(boxes):
                text = f"both rank {pair[0]} and rank {pair[1]} save {_some(pair[2])}"
                yield Problem(max(pair[:2]), key, text)
            elif complete and (missing := prod(self.found[key][0]) - sum(prod(b[1]) for b in boxes)):
                text = f"{missing:,} of {prod(self.found[key][0]):,} elements are saved by no rank"
                yield Problem(boxes[0][2], key, text)
        yield from self._against_plan(complete)

    def elements(self) -> int:
        """Of the model's parameters and buffers, saved so far."""
        return sum(
            prod(size)
            for key, boxes in self.boxes.items()
            if key.startswith("model.")
            for _, size, _ in boxes
        )

    def _against_plan(self, complete: bool) -> Iterator[Problem]:
        for key, entry in self._planned():
            shape = (entry.copies, *entry.shape) if EXPERT in entry.name else entry.shape
            if key in self.found:
                have, dtype, rank = self.found[key]
                if have != shape or dtype != DTYPES[entry.dtype]:
                    wanted = _kind(shape, DTYPES[entry.dtype])
                    yield Problem(rank, key, f"is {_kind(have, dtype)}, and the plan has {wanted}")
            elif complete:
                yield Problem(None, key, "is saved by no rank")
            if complete and entry.trainable:
                yield from self._states(key, entry)

    def _states(self, key: str, entry: Parameter) -> Iterator[Problem]:
        """A parameter's master weights and moments are all there."""
        kinds = {
            found.removeprefix("optimizer.").partition(".")[0] for found in self._state_keys().get(key, ())
        }
        wanted = moments(entry, self.config)
        if (entry.dtype == "bf16") != (MASTER in kinds) or len(kinds - {MASTER}) != wanted:
            text = f"has the states {', '.join(sorted(kinds)) or 'none'}; the plan has {wanted} moments"
            yield Problem(None, key, text)

    def _state_keys(self) -> dict[str, list[str]]:
        if not hasattr(self, "_by_parameter"):
            self._by_parameter: dict[str, list[str]] = defaultdict(list)
            for key in self.boxes:
                if key.startswith("optimizer."):
                    kind = key.removeprefix("optimizer.").partition(".")[0]
                    self._by_parameter[key.removeprefix(f"optimizer.{kind}.")].append(key)
        return self._by_parameter

    def _planned(self) -> Iterator[tuple[str, Parameter]]:
        model = self.config.model
        for entry in (*compact_parameters(model), *tower_parameters(self.config)):
            yield place(entry.name.replace(EXPERT, "0"))[0], entry
        for entry in buffers(model):
            yield place(entry.name)[0], entry


def overlap(boxes: Boxes, axis: int = 0) -> tuple[int, int, Shape] | None:
    """Ranks of two rectangles that share elements, and where; None if none do."""
    if len(boxes) < 2:
        return None
    if axis == len(boxes[0][0]):
        return boxes[0][2], boxes[1][2], boxes[0][0]
    ordered = sorted(boxes, key=lambda box: (box[0][axis], box[1][axis]))
    columns = [list(same) for _, same in groupby(ordered, key=lambda box: (box[0][axis], box[1][axis]))]
    for here, there in pairwise(columns):
        # Rectangles that meet at other places than their whole sides do not come about by cutting.
        if there[0][0][axis] < here[0][0][axis] + here[0][1][axis]:
            return here[0][2], there[0][2], there[0][0]
    return next((found for column in columns if (found := overlap(column, axis + 1))), None)


def _outside(saved: Saved) -> str | None:
    for start, length, extent in zip(saved.offset, saved.size, saved.shape, strict=True):
        if start < 0 or start + length > extent:
            return f"{_some(saved.size)} at {_some(saved.offset)} lies outside of {_some(saved.shape)}"
    return None


def _members(kind: str, ranks: Sequence[RankFacts]) -> Iterator[tuple[Shape, list[RankFacts]]]:
    """Each group with those of its ranks that are here, in its order."""
    found: dict[Shape, list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        found[facts.groups[kind]].append(facts)
    yield from found.items()


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"[{shown}, ... {numbers[-1]}]" if len(numbers) > 7 else str(list(numbers))


def _span(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start)


def _kind(shape: Shape, dtype: str) -> str:
    return f"{dtype} {list(shape)}"
