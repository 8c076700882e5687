"""Measurements behind `streamadv bench`: this project, the peers' ways and the memory-copy floor in one run."""
