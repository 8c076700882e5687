"""What went by: kept groups in files, and batches computed again from them.

In reading order: `folder` (whole files and their names, and where kept groups are read from), `follow` (what ends goes
into files), `table` (as Parquet), `rewind` (a batch computed again), `compare` (what another chain would have changed).
"""
