"""Memory of what was said: an index per prompt over earlier rollouts and live siblings."""
