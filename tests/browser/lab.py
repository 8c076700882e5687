"""A run with known contents: groups of every kind, with text, advantages and late rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from streamadv.errors import NoBatchError
from streamadv.run import Run
from streamadv.run.consumer import ADVANTAGE
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.support import (
    compute_all,
    consumer_of,
    group_all,
    housekeep,
    join,
    make_overdue,
    producing,
    trajectory,
)

PROMPT: Final = "What is 17 + 25?"
ANSWERS: Final = (
    "I add the tens: 10 + 20 = 30, and the ones: 7 + 5 = 12. So 42.",
    "I add the tens: 10 + 20 = 30, and the ones: 7 + 5 = 13. So 43.",
)
RESULT: Final = "<tool>calculator: 42</tool>\n"
#: What a rollout may say to a browser.
HOSTILE: Final = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    "</pre></textarea><a href=javascript:alert(1)>{{ 7*7 }}</a> 🙂 \x1b[31m\u202e"
)
SIZE: Final = 4


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes and of what the lab's texts repeat."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator([PROMPT, *ANSWERS, RESULT] * 4, vocab_size=400, show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


class Lab:
    """Pushes, groups, computes and trains in this thread."""

    def __init__(self, url: str, name: str, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self.url, self.name = url, name
        self._texts = Tokenizer.from_file(str(tokenizer))
        self.version = 0
        self.random = np.random.default_rng(0)
        self.settings = {
            "keep": {"dropped": 1.0, "trained": 1.0},
            "zero_variance_filter": True,
            "tokenizer": str(tokenizer),
        }

    @contextmanager
    def working(self) -> Iterator[Lab]:
        """With a producer and a trainer."""
        with producing(self.url, self.name, self.settings) as self.producer:
            self.run: Run = join(self.url, self.name)
            self._grouper, self._worker = consumer_of(self.run), consumer_of(self.run, ADVANTAGE)
            housekeep(self.run)
            self.queue = TrainerQueue(
                self.url,
                self.name,
                chain={"estimator": "grpo", "correction": {}},
                pushed=["old_log_probs"],
                batch_groups=2,
                max_staleness=2,
                drop_after=3,
                commit="each_batch",
            )
            yield self
            self.queue.close()
            self.run.connection.close()

    def push(
        self,
        group_id: str,
        rewards: Sequence[float],
        *,
        size: int | None = None,
        text: str | None = None,
        tokens: int = 0,
        version: int | None = None,
    ) -> None:
        """A group; it stays open where `size` is larger. tokens: of one long answer."""
        said = [
            self._rollout(
                *(group_id, index, reward, size or len(rewards)),
                text or ANSWERS[int(reward <= 0)],
                tokens,
                self.version if version is None else version,
            )
            for index, reward in enumerate(rewards)
        ]
        self.producer.push(said)
        group_all(self.run, self._grouper)

    def train(self) -> bool:
        """One batch, committed with the next one. False at the end of the run."""
        try:
            batch = self.queue.next_batch(timeout=0)
        except NoBatchError:
            compute_all(self.run, self._worker)
            batch = self.queue.next_batch(timeout=0)
        if batch is not None:
            self.queue.trained(batch)
            self.version += 1
        return batch is not None

    def end(self) -> None:
        """Train on what is there, to the end of the run."""
        self.producer.finish()
        make_overdue(self.run, "short")
        group_all(self.run, self._grouper)
        while self.train():
            pass
        self.queue.close()

    def tell(self) -> None:
        """A story that every screen shows something of."""
        for k in range(4):
            for number in range(2):
                self.push(
                    f"sum-{k}-{number}", [0.0, 1.0, *self.random.integers(0, 2, SIZE - 2).astype(float)]
                )
            self.push(f"equal-{k}", [0.0] * SIZE)
            self.train()
        self.push("late", [0.0, 1.0], version=0)
        for number in range(2):
            self.push(f"sum-4-{number}", [0.0, 1.0, 1.0, 1.0])
        self.train()
        self.push("hostile/one", [0.0, 1.0], text=HOSTILE)
        self.push("short", [1.0, 0.0], size=SIZE)

    def _rollout(
        self, group_id: str, index: int, reward: float, size: int, answer: str, tokens: int, version: int
    ) -> Trajectory:
        ids, mask = list[int](), list[int]()
        for part, trained in ((PROMPT, 0), ("Let me look it up.\n", 1), (RESULT, 0), (answer, 1)):
            new = self._texts.encode(part).ids
            new = np.resize(new, tokens).tolist() if tokens and part == answer else new
            ids, mask = ids + new, mask + [trained] * len(new)
        log_probs = -self.random.exponential(0.4, len(ids)).astype(np.float32)
        moved = self.random.normal(0, 0.02, len(ids)).astype(np.float32)
        return trajectory(
            *(group_id, index, size),
            input_ids=ids,
            response_mask=mask,
            reward=reward,
            rollout_log_probs=log_probs,
            old_log_probs=np.minimum(log_probs + moved, 0),
            rewards={"format": 1.0},
            data_source="sums",
            model_version=version,
        )
