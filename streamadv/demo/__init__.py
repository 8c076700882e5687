"""The whole pipeline in one command: rollouts of a real environment, all stages as processes, a trainer that learns.

In the order of the data: `environment` (tokens and episodes), `policy` (and how it plays), `rollouts` (the
producer process), `trainer` (the consumer process), `evaluate` (how well the policy plays),
`supervisor` (kills some processes, on the machine of `streamadv up`), `progress` (what is known meanwhile), `view` (the
lines), `picture` (the curve). `settings` go to all processes.
"""
