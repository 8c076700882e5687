"""Batch k: which groups it takes, its record, the trainer session that names, trains and commits it."""
