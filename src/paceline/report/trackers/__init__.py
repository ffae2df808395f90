"""Trackers of other tools: each is told the numbers of a step under the names of ``report.definitions``."""

from paceline.report.trackers.all import Trackers, check_trackers
from paceline.report.trackers.base import Tracked, Tracker, TrackerError, numbers

__all__ = ["Tracked", "Tracker", "TrackerError", "Trackers", "check_trackers", "numbers"]
