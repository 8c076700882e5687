-- Put a run on the list of runs.
-- KEYS  runs_void, runs
-- ARGV  run
-- Returns  1 when it is new, 0 when it was there
return redis.call('HSETNX', keys.runs, ARGV[1], redis.call('TIME')[1] .. '000')
