-- The last step of taking over a run: other ranks of the job may go on from what stands there.
-- KEYS  void, lineage
-- ARGV  epoch, running moments JSON to go on from ('' = none)
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if ARGV[2] == '' then redis.call('HDEL', KEYS[2], 'running') else redis.call('HSET', KEYS[2], 'running', ARGV[2]) end
redis.call('HSET', KEYS[2], 'settled', ARGV[1])
return 1
