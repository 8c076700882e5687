"""The main job in one go: rollouts of a real environment, all stages as processes, a trainer that learns.

Read in data order: `environment` (tokens and episodes), `policy` (what plays), `rollouts` (producer process),
`trainer` (consumer process) with `learning`, `evaluate` (how well they play), `supervisor` (kills some of them, on the
machine of `streamadv up`) and `view` (what you see).
"""
