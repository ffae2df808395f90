"""What all sections of the configuration share: unknown keys are refused, impossible values named."""

import msgspec


def require(holds: bool, key: str, value: object, wanted: str) -> None:
    """ValueError that names the key, its value and what it must be, unless it ``holds``."""
    if not holds:
        raise ValueError(f"{key}: {value!r} must be {wanted}")


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: unknown keys are refused."""
