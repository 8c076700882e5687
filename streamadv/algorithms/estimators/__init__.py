"""One file per estimator; importing this package registers them all."""

from . import gae as gae
from . import gigpo as gigpo
from . import grpo as grpo
from . import reinforce as reinforce
from . import step_reinforce as step_reinforce
