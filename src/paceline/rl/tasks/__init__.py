"""What can be trained on: the built-in tasks, their data, and the door for a user's own."""

from paceline.rl.tasks.base import Prompt, Split, Task
from paceline.rl.tasks.registry import make_task

__all__ = ["Prompt", "Split", "Task", "make_task"]
