"""Thin doors into what other people run."""
