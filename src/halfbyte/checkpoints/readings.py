"""What a checkpoint could be read as, and into what it could then be converted: headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.checkpoints.conversion_plan import LAYOUTS, find_obstacle
from halfbyte.checkpoints.family import Family, Layer, read_layer
from halfbyte.checkpoints.registry import (
    FAMILIES,
    FROM_FLAG,
    list_candidates,
    list_claims,
    list_passthrough,
)
from halfbyte.checkpoints.tensor_source import MetaSource, TensorSource
from halfbyte.errors import CheckpointError, FormatError


@dataclass(frozen=True)
class Reading:
    """A family that claims layers of the file.

    Attributes:
        family: its name, as --from takes it.
        is_candidate: whether it may be meant; a possible reading is none beside a certain one.
        is_certain: whether something in the file names the family.
        evidence: what that is, or what speaks for it.
        layers: how many layers it reads.
        problem: why it does not read the file after all; None where it does.
    """

    family: str
    is_candidate: bool
    is_certain: bool
    evidence: str
    layers: int
    problem: str | None


@dataclass(frozen=True)
class FileReadings:
    """All of them.

    Attributes:
        readings: in the registry's order.
        layers: the layers without values, by name, where exactly one candidate reads the file.
        targets: family -> "yes", or why not, where there are such layers.
        notes: ambiguity, and what decides; an error of a family about the file.
    """

    readings: tuple[Reading, ...]
    layers: Mapping[str, Layer]
    targets: Mapping[str, str]
    notes: tuple[str, ...]


def list_readings(source: TensorSource) -> FileReadings:
    """Return what `source` could be read as."""
    try:
        claims = list_claims(source)
    except CheckpointError as error:
        return FileReadings((), {}, {}, (str(error),))
    candidates = list_candidates(claims)
    readings = []
    for name, claim in claims.items():
        problem = None
        try:
            list_passthrough(source, claim.layers, FAMILIES[name])
        except CheckpointError as error:
            problem = str(error)
        is_candidate = name in candidates
        readings.append(
            Reading(
                name, is_candidate, claim.is_certain, claim.evidence, len(claim.layers), problem
            )
        )
    notes = [note for note in (explain_choice(candidates),) if note]
    layers: dict[str, Layer] = {}
    if len(candidates) == 1:
        try:
            plans = claims[candidates[0]].layers.items()
            meta, family = MetaSource(source), FAMILIES[candidates[0]]
            layers = {name: read_layer(family, meta, plan) for name, plan in plans}
        except (CheckpointError, FormatError) as error:
            notes.append(str(error))
    targets = {name: explain_target(family, layers) for name, family in FAMILIES.items()}
    return FileReadings(tuple(readings), layers, targets if layers else {}, tuple(notes))


def explain_choice(candidates: list[str]) -> str:
    """Return what decides between several candidates; "" where nothing is to decide."""
    if len(candidates) < 2:
        return ""
    return (
        f"could be read as {' or '.join(candidates)}, with different weights: `halfbyte convert` "
        f"takes {FROM_FLAG} FAMILY, or --original MODEL, which decides by trial"
    )


def explain_target(target: Family, layers: Mapping[str, Layer]) -> str:
    """Return "yes" where `target` holds all layers, or how many it does not hold and why."""
    if not target.can_write or target.container not in LAYOUTS:
        return "read, not written"
    obstacles = [find_obstacle(target, layer) for layer in layers.values()]
    found = [text for text in obstacles if text is not None]
    if not found:
        return "yes"
    return f"{len(found)} of {len(obstacles)} layers not: {found[0]}"
