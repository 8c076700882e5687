-- Put a run on the list of runs.
-- KEYS  void, runs
-- ARGV  run
-- Returns  1 when it is new, 0 when it was there
redis.call('DEL', KEYS[1])
return redis.call('HSETNX', KEYS[2], ARGV[1], redis.call('TIME')[1] .. '000')
