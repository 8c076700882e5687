"""A scorer that actors import."""

from __future__ import annotations

import streamadv as sa


def by_index(trajectories: list[sa.UnscoredTrajectory]) -> list[float]:
    return [float(trajectory.rollout_index) for trajectory in trajectories]
