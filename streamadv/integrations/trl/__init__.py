"""TRL's trainers, fed by the trainer queue. Needs the extra `trl`.

`grpo.py` has `QueueGRPOTrainer`, a GRPOTrainer: TRL's losses, optimizer, callbacks and checkpoints on the batches of a
queue. `async_grpo.py`, which its users import, does the same for TRL's experimental AsyncGRPOTrainer. `config.py` says
which settings of TRL hold for a queue. What every Trainer of transformers needs is in
`streamadv.integrations.transformers`.
"""

from ...extras import require

require("streamadv.integrations.trl", "trl", "accelerate")

from ..transformers import newest_checkpoint, queue_for
from .grpo import QueueGRPOTrainer

__all__ = ["QueueGRPOTrainer", "newest_checkpoint", "queue_for"]
