"""A producer with a made-up agent: `python examples/producer.py redis://localhost:6379`.

Needs a grouper, an advantage worker and a trainer (`examples/trainer.py`) on the same server and run.
"""

from __future__ import annotations

import random
import sys

import numpy as np

import streamadv as sa


async def play(rollout: sa.AsyncRollout, target: int) -> None:
    """Guess a number in four turns; an exception in here would end the rollout as failed."""
    guesses = [random.randrange(10) for _ in range(4)]
    tokens = [target, *guesses]  # the prompt, then one action token a turn
    await rollout.push(
        input_ids=tokens,
        response_mask=[0, 1, 1, 1, 1],
        rollout_log_probs=np.full(5, np.log(0.1)),
        reward=float(target in guesses),
        steps=[
            {"start": turn + 1, "end": turn + 2, "reward": float(guess == target)}
            for turn, guess in enumerate(guesses)
        ],
    )


async def main(url: str) -> None:
    async with sa.Producer(url, run="example") as producer:
        for target in range(10):
            async with producer.group(size=8, data_source="guessing") as group:
                await group.run(play, target)
        await producer.finish()


if __name__ == "__main__":
    sa.run_program(main, sys.argv[1])
