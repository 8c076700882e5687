"""verl's V1 trainers, fed by the trainer queue. Needs the extra `verl`.

In the order of the data: `agent_loop.py` pushes what verl's agent loops have played. `sampler.py` puts the rows of
each batch (`rows.py`) into TransferQueue, where verl's workers read them. `trainer.py` has verl's asynchronous
trainers with the advantages, marks and checkpoints of the queue; verl finds them if VERL_USE_EXTERNAL_MODULES names
that module. `options.py` has their settings, `algorithm.py` translates verl's own.
"""

from ...extras import require

require("streamadv.integrations.verl", "verl", "transfer_queue")
