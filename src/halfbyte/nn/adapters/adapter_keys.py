"""Which tensor of an adapter file is what: the key styles of PEFT, diffusers, kohya and ComfyUI.

A key is `<path of the linear><suffix>`. The suffix says what the tensor is, whatever tool wrote it:

| suffix | written by |
|---|---|
| `.lora_A.weight`, `.lora_B.weight`, `.lora_A.<name>.weight` | PEFT, diffusers, ComfyUI |
| `.lora_down.weight`, `.lora_up.weight`, `.alpha` | kohya, ComfyUI |
| `.lora.down.weight`, `to_q_lora.down.weight`, `.lora_linear_layer.down.weight` | older diffusers |
| `.lokr_w1`, `.lokr_w1_a`, `.lokr_w1_b`, `.lokr_w2` ... | LyCORIS and PEFT LoKr |
| `.hada_w1_a`, `.hada_w1_b`, `.hada_w2_a`, `.hada_w2_b` | LyCORIS and PEFT LoHa |

What is known and cannot be a low-rank delta of a linear (DoRA, Tucker cores, full differences) is
refused with its reason; any other key is an error too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from halfbyte.errors import CheckpointError

# The prefix that PEFT saves under; its scale stands in adapter_config.json and nowhere else.
PEFT_PREFIX: Final = "base_model.model."
# What tools put before the path in the model, with dots ...
PATH_PREFIXES: Final = (
    PEFT_PREFIX,
    "transformer.",
    "unet.",
    "diffusion_model.",
    "text_encoder.",
    "text_encoder_2.",
    "model.",
)
# ... and before a path whose dots have become underscores.
FLAT_PREFIXES: Final = (
    "lora_unet_",
    "lora_transformer_",
    "lora_te1_",
    "lora_te2_",
    "lora_te3_",
    "lora_te_",
    "lycoris_",
)
_NAME: Final = r"(?P<name>\.[^.]+)?"
_ROLES: Final = tuple(
    (re.compile(pattern + r"\Z"), role)
    for pattern, role in (
        (rf"\.lora_A{_NAME}\.weight", "down"),
        (rf"\.lora_B{_NAME}\.weight", "up"),
        (r"\.lora_down\.weight", "down"),
        (r"\.lora_up\.weight", "up"),
        (r"(\.|_)lora\.down\.weight", "down"),
        (r"(\.|_)lora\.up\.weight", "up"),
        (r"\.lora_linear_layer\.down\.weight", "down"),
        (r"\.lora_linear_layer\.up\.weight", "up"),
        (r"\.alpha", "alpha"),
        *((rf"\.lokr_w{i}{part}", f"lokr_w{i}{part}") for i in "12" for part in ("", "_a", "_b")),
        *((rf"\.hada_w{i}{part}", f"hada_w{i}{part}") for i in "12" for part in ("_a", "_b")),
    )
)
_DORA: Final = "DoRA rescales every row by the norm of the merged weight, which no low rank does"
_TUCKER: Final = "a Tucker core belongs to a convolution, only linears are 4-bit"
_FULL: Final = "a full difference of a weight or bias is no low-rank delta; merge it at the source"
_REFUSED: Final = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"\.(dora_scale|lora_magnitude_vector)\b", _DORA),
        (r"\.(lora_mid\.weight|lokr_t[12]|hada_t[12])\Z", _TUCKER),
        (r"\.(diff|diff_b|set_weight|w_norm|b_norm)\Z", _FULL),
        (r"\.lora_[AB](\.[^.]+)?\.bias\Z", "a LoRA with bias (lora_bias) changes the bias too"),
        (r"\.lora_embedding_[AB]\b", "a LoRA of an embedding; only linears take one"),
        (r"\.(oft_blocks|oft_R|oft_diag|boft_[RsB]|ia3_l|vera_lambda\w*)\b", "not a low rank"),
    )
)
_MAX_NAMED: Final = 12


@dataclass(frozen=True)
class AdapterKey:
    """A key taken apart.

    Attributes:
        key: as in the file. path: of the linear, as the file spells it. role: "down", "up",
        "alpha", "lokr_w1_a" and so on. name: of the adapter, where the key has one, else "".
    """

    key: str
    path: str
    role: str
    name: str = ""


def parse_keys(where: object, keys: Iterable[str]) -> dict[str, dict[str, AdapterKey]]:
    """Return the keys by path and role.

    Args:
        where: the file, for errors.
        keys: of all its tensors.

    Raises CheckpointError that lists keys of no known kind, refused kinds with the reason, two keys
    of one role, and files that hold several named adapters.
    """
    groups: dict[str, dict[str, AdapterKey]] = {}
    unknown: list[str] = []
    names: set[str] = set()
    for key in keys:
        parsed = parse_key(where, key)
        if parsed is None:
            unknown.append(key)
            continue
        roles = groups.setdefault(parsed.path, {})
        if parsed.name:
            names.add(parsed.name)
        if parsed.role in roles and roles[parsed.role].name == parsed.name:
            raise CheckpointError(
                f"{where}: {roles[parsed.role].key!r} and {key!r} are the same factor of "
                f"{parsed.path!r}; keep one"
            )
        roles[parsed.role] = parsed
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensor(s) are of no adapter kind known here: "
            f"{list_names(unknown)}; LoRA, LoKr and LoHa of linears are read"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{where}: holds several adapters: {list_names(sorted(names))}; save them one by one"
        )
    return groups


def parse_key(where: object, key: str) -> AdapterKey | None:
    """Return a key taken apart, None for an unknown one; CheckpointError for a refused kind."""
    for pattern, reason in _REFUSED:
        if pattern.search(key):
            raise CheckpointError(f"{where}: tensor {key!r}: {reason}")
    for pattern, role in _ROLES:
        match = pattern.search(key)
        if match is None or not match.start():
            continue
        path = key[: match.start()].replace(".processor.", ".")
        name = (match.groupdict().get("name") or "").removeprefix(".")
        return AdapterKey(key, path, role, name)
    return None


def list_names(names: Iterable[str]) -> str:
    """Return the first names and how many more there are."""
    found = list(names)
    shown = ", ".join(map(repr, found[:_MAX_NAMED]))
    return shown + (f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else "")
