"""Prompts: a finite data set, of which each epoch plays every prompt exactly once. Nothing here needs torch.

The prompts stay with the producers. The run holds, for each name, what `lua/prompts/` keeps in the home shard. In
reading order:

- `spec.py`: what all producers agree on, the ids of the groups, and the order in an epoch. `prompts.py`: the data
  set that a user gives. `figures.py`: what the last groups have shown.
- `steps.py`: lease a prompt, give it back, tell how its group has ended: calls of scripts.
- `stored.py`: what a run has of its prompts, as rank 0, groupers and observers read and change it; ends, carried home.

The invariant: a prompt that was begun (its position is below `next`) has either ended or an entry. An entry names the
one try that counts; a group of another try changes nothing. A prompt's group that ends says so in the same step, in its
shard's stream `prompt_ends`, and whoever carries that home may do so twice. A trainer trains on a prompt, not on a
group, once (`spec.identity`).
"""

from .figures import TriesSeen
from .prompts import Prompts, Stream

__all__ = ["Prompts", "Stream", "TriesSeen"]
