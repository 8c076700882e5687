"""The estimators. Importing this package registers all of them."""

from . import outcomes as outcomes
from . import steps as steps
from . import tokens as tokens
