"""What speculation would give: recorded rollouts replayed through drafters without a model."""
