"""The gateway: agents that nobody can change speak to it as to OpenAI or Anthropic, and the run gets what was sampled.

A producer of the run with an HTTP front. It owns tokens and turns, not tasks, sandboxes, rewards or engines. In reading
order:

- `options.py`: how a gateway is set up, and what of a request an agent may choose. `refusals.py`: what it says
  instead of an answer.
- `keys.py`: a rollout's key is its ticket, signed. `access.py`: hands rollouts out; needs no package. `running.py`:
  rollouts that are processes.
- `turns.py`: a turn as the server keeps it, and the calls that append and read turns.
- `sessions.py`: the rollouts that this process knows: opened, restored, ended.
- `engines.py`: the engines behind it. `loading.py`: brings them the trainer's weights.
- `dialects/`: the requests and answers of each API, as those of chat completions.
- `joining.py`: which conversation a request continues. `tokens.py`: token in, token out.
- `live.py`: streams that leave while the engine samples.
- `asking.py`: one turn, from the request to the answer. `http.py`: URLs, keys, errors. `server.py`: the process.
"""

from .access import Access, Gateway, GatewayError
from .keys import BadKeyError, Claim, Keys

__all__ = ["Access", "BadKeyError", "Claim", "Gateway", "GatewayError", "Keys"]
