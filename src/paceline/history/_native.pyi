"""The history index in C++."""

def version() -> str:
    """The version of paceline that this extension was built from."""
