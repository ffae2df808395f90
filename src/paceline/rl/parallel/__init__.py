"""One learner on the ranks of a mesh: rows of a rollout by context, layers of the policy by pipeline."""
