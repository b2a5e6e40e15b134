"""Our own format as a family: the record itself, and beside it what a converted layer came from.

docs/formats.md specifies it; `formats.halfbyte_file` reads and writes it without converting.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

from halfbyte.checkpoints.family import (
    NO_CLAIM,
    Claim,
    Facts,
    Family,
    Layer,
    LayerPlan,
    Parts,
    SideContent,
)
from halfbyte.checkpoints.tensor_source import SafetensorsSource, TensorSource
from halfbyte.formats.halfbyte_file import (
    HalfbyteFile,
    is_halfbyte_metadata,
    make_metadata,
    make_tensor_name,
)
from halfbyte.formats.halfbyte_layer import join_parts, parse_layer_record, split_linear
from halfbyte.formats.layer_origin import LayerOrigin, make_origin_name, make_origin_record
from halfbyte.formats.quantized_linear import QuantizedLinear

_RECORD = "record"  # fact: the layer's JSON record
_ORIGIN = "origin"  # fact: family and facts of its origin, JSON
_ORIGIN_PREFIX = "origin."


class Halfbyte(Family):
    """Files that `halfbyte quantize` and `halfbyte convert` write."""

    name: ClassVar[str] = "halfbyte"
    title: ClassVar[str] = "halfbyte"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("weight_codes", "weight_block_scale"), ()
    )
    lists_layers: ClassVar[bool] = True
    keeps_origins: ClassVar[bool] = True

    def claim(self, source: TensorSource) -> Claim:
        """Claim the layers that the file's metadata lists; certain, as nothing else has it."""
        if not is_halfbyte_metadata(source.metadata) or not isinstance(source, SafetensorsSource):
            return NO_CLAIM
        with HalfbyteFile(source.path) as file:
            plans = {}
            for layer, record in file.layers.items():
                tensors = {part: make_tensor_name(layer, part) for part in record.parts}
                facts = {_RECORD: json.dumps(record.to_json(), sort_keys=True)}
                origin = file.origins.get(layer)
                if origin is not None:
                    facts[_ORIGIN] = json.dumps([origin.family, dict(origin.facts)])
                    tensors |= {
                        _ORIGIN_PREFIX + part: make_origin_name(layer, part)
                        for part in origin.parts
                    }
                plans[layer] = LayerPlan(layer, tensors, facts)
        return Claim(plans, True, "halfbyte_layers in its metadata")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; without facts, as `encode` gives it, it is told by the parts."""
        record = parse_layer_record("layer", json.loads(facts[_RECORD]))
        own = {name: part for name, part in parts.items() if not name.startswith(_ORIGIN_PREFIX)}
        return join_parts("layer", record, own)

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return None: the format holds every record."""
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the record's tensors."""
        return split_linear(linear)[1]

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return what the file says that the layer was converted from."""
        if _ORIGIN not in facts:
            return None
        family, origin_facts = json.loads(facts[_ORIGIN])
        kept = {
            name.removeprefix(_ORIGIN_PREFIX): part
            for name, part in parts.items()
            if name.startswith(_ORIGIN_PREFIX)
        }
        return LayerOrigin(family, kept, origin_facts)

    def encode_origin(self, origin: LayerOrigin) -> Parts:
        """Return the origin's tensors under their names beside the layer's own."""
        return {_ORIGIN_PREFIX + name: part for name, part in origin.parts.items()}

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the metadata that lists records and origins."""
        records = {name: split_linear(layer.linear)[0] for name, layer in layers.items()}
        origins = {
            name: make_origin_record(layer.origin)
            for name, layer in layers.items()
            if layer.origin is not None
        }
        return SideContent(make_metadata(records, None, origins))
