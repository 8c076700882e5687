-- Put a run on the list of runs.
-- KEYS  runs
-- ARGV  run
-- Returns  1 when it is new, 0 when it was there
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
return redis.call('HSET', KEYS[1], ARGV[1], redis.call('TIME')[1] .. '000')
