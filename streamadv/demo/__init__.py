"""The main job in one go: rollouts of a real environment, all stages as processes, a trainer that learns.

Read in data order: `environment` (tokens and episodes), `policy` (what plays), `rollouts` (producer process),
`trainer` (consumer process), `checkpoints` (what it starts again from), `evaluate` (how well they play),
`supervisor` (starts, kills, watches) and `view` (what you see).
"""
