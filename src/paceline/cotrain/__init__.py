"""Drafters that follow the policy: what they learn from, how, when, and how they get to the engines."""
