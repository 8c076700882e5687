"""Child processes: how a supervisor (the demo, a benchmark) starts, hears, kills and ends them, and their memory."""
