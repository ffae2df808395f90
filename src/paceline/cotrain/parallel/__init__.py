"""Draft co-training on several ranks: contexts in a ring, and pipelines with a channel beside them."""
