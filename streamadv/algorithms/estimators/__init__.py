"""One file per estimator; importing this package registers them all."""

from . import grpo as grpo
