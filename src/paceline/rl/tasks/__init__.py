"""What can be trained on: the built-in tasks, their data, and the door for a user's own."""
