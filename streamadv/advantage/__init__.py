"""Advantage workers: they compute a work item and publish its results."""
