"""What co-training would take at scale: memory, bytes and layouts of a policy and its drafter, before anything runs."""
