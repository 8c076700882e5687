"""What went by: batches rebuilt from the groups that are kept.

In reading order: `source` (where kept groups are read from), `rewind` (a batch computed again), `compare` (what another
chain would have changed).
"""
