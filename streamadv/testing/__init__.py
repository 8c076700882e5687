"""Your environment and loop in a simulated world, where a seed decides who goes next and what fails.

Reading order: `strands` and `waits` (threads that take turns, virtual time), `values`, `keyspace`, `store` and `lua`
(what a server does), `server` (how it fails), `wire` and `async_wire` (connections to it), `plan` (a schedule as
choices, cut down), `world` (all of them together), `roles` (the library's own processes). The others are streamadv's
own use of it, whose schedules `python -m streamadv.testing` runs: `scene`, `players`, `producing`, `job`, `archiver`
and `constants` (who takes part), `pipeline` (a schedule of them), `inspection` and `lookout` (what is looked at
meanwhile), `answers`, `excuses` and `judge` (whether the promises held).
"""

from .plan import Choices, cut_down
from .roles import advantage_worker, grouper
from .strands import Killed, Process, Stuck
from .wire import URL
from .world import World

__all__ = ["URL", "Choices", "Killed", "Process", "Stuck", "World", "advantage_worker", "cut_down", "grouper"]
