"""The estimators. Importing this package registers all of them.

`outcomes`, `steps` and `tokens`, by what has a number each.
"""

from . import outcomes as outcomes
from . import steps as steps
from . import tokens as tokens
