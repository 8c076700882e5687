"""Producers: the side of rollout engines. They begin groups, play rollouts and push them. Nothing here needs torch.

The steps of a producer are generators without I/O: they yield requests and receive replies. The blocking and the
asyncio producer only carry the requests out. In reading order:

- `producer.py`, `async_producer.py`: the producers that users open. `requests.py`: the requests, what the scripts
  answer, and the one place where a request is sent again.
- `logic.py`: what both share: its parts, its heartbeat, and how a caller asks for a group. `membership.py`: its place
  in the run, and what it tells the scripts of it.
- `admission.py`: asks whether a group may begin, and waits until the trainer makes room. `prompted.py`: leases prompts
  and begins their groups.
- `tickets.py`: a group as it is asked for, and the right to push a rollout.
- `base_group.py`, `group.py`, `async_group.py`: groups, their slots and rollouts. `failures.py`: why rollouts failed.
- `records.py`: reads a plain record. `extra_columns.py`: extra columns, of a push and of a group. `push.py`:
  what a push sends, in slices, until its group is admitted. `resend.py`: pushes again to a server that has lost data.
  `sender.py`: sends several pushes in one call, from one caller or from many tasks.
"""

from .async_group import AsyncGroup, AsyncRollout
from .async_producer import AsyncProducer
from .group import Group, Rollout
from .producer import Producer
from .tickets import Ticket

__all__ = ["AsyncGroup", "AsyncProducer", "AsyncRollout", "Group", "Producer", "Rollout", "Ticket"]
