"""The judge. A process of its own calls it with rollouts that were pushed without a reward.

One that asks a model: `judge = sa.Judge(ask, concurrency=64)`, where `async def ask(rollout)` returns a score.
"""


def judge(rollouts):
    return [score(**rollout.metadata) for rollout in rollouts]


def score(said, box, colour, **_):
    """1 for the right colour after a look into the right box, 0.2 for the look alone."""
    if box not in said:
        return 0.0
    return 1.0 if said[-1] == colour else 0.2
