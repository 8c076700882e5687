"""The trainer queue: each rank plans, fetches and packs its share of a batch."""

from .queue import TrainerQueue

__all__ = ["TrainerQueue"]
