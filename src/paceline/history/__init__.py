"""Memory of what was said: an index per prompt over earlier rollouts and live siblings."""

from paceline.history.settings import Settings, make_history

__all__ = ["Settings", "make_history"]
