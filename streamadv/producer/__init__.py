"""Producers: the side of rollout engines. Groups are admitted, played, and pushed; nothing here needs torch.

What a producer does is a set of generators that yield requests and receive replies, without I/O. The blocking and the
asyncio producer only carry the requests out. In reading order:

- `base_producer.py`, `producer.py`, `async_producer.py`: the producers that users open; `requests.py`: what the steps
  may ask of them, and the one place where a request is sent again.
- `logic.py`: what a producer consists of, and its heartbeat; `membership.py`: its place in the run.
- `admission.py`: the decision whether a group may begin, asked for; `replies.py`: the scripts' answers, read.
- `announcements.py`: waiting for admission until the trainer makes room.
- `tickets.py`, `checks.py`: the right to push a rollout; what callers pass is checked.
- `next_group.py`: the admission that travels with a push.
- `slots.py`: what this process knows of the slots of a group; `base_group.py`, `group.py`, `async_group.py`: groups and
  rollouts; `failures.py`: why rollouts failed.
- `records.py`: what is pushed, read by hand; `extra_columns.py`: extra columns as the run has them. `encode.py`,
  `push.py`, `resend.py`: what a push sends, in slices, and again to a server that has lost it; `together.py`,
  `sender.py`: several pushes in one call, of one caller or of many tasks.
"""

from .async_group import AsyncGroup, AsyncRollout
from .async_producer import AsyncProducer
from .group import Group, Rollout
from .producer import Producer
from .tickets import Ticket

__all__ = ["AsyncGroup", "AsyncProducer", "AsyncRollout", "Group", "Producer", "Rollout", "Ticket"]
