"""A run on Ray: rollout workers and learners in processes of their own, and what passes between them."""
