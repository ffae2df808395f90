"""The training loop: tasks and rewards, GRPO, refit, checkpoints."""
