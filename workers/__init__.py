"""Deployable processes: settings, signals, metrics, loop. Their work is done in `streamadv/`."""
