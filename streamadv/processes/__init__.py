"""Child processes under a supervisor, as the demo and the benchmarks run them."""
