"""What went by: kept groups in files, and batches computed again from them.

In reading order: `folder` (whole files and their names), `follow` (what ends goes into files), `table` (as Parquet),
`source` (where kept groups are read from), `rewind` (a batch computed again), `compare` (what another chain would have
changed).
"""
