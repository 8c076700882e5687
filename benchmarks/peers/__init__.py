"""The ways of others, written anew: `verl` and `roll` compute; `pipelinerl` and `transferqueue` run as processes."""
