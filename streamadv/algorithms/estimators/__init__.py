"""One file per estimator. Importing this package registers all of them; a new estimator joins this list."""

from . import agentic_reinforce as agentic_reinforce
from . import gae as gae
from . import gdpo as gdpo
from . import gigpo as gigpo
from . import gpg as gpg
from . import grpo as grpo
from . import maxrl as maxrl
from . import opo as opo
from . import pass_at_k as pass_at_k
from . import reinforce as reinforce
from . import reinforce_plus_plus as reinforce_plus_plus
from . import remax as remax
from . import rloo as rloo
from . import step_grpo as step_grpo
from . import step_reinforce as step_reinforce
from . import step_rloo as step_rloo
from . import token_baseline as token_baseline
from . import vtrace as vtrace
