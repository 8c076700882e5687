"""Deployable processes: settings, signals, metrics, loop. What they do stands in `streamadv/`."""
