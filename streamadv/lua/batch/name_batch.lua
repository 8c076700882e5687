-- Write the record of batch k, once: the one point where anything of batch scope is decided.
-- KEYS  void, lineage, batches
-- ARGV  epoch, k, record JSON, running moments JSON with this batch ('' = none)
-- Returns  1, 0 when batch k has a record, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3]) == 0 then return 0 end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], 'running', ARGV[4]) end
redis.call('HDEL', KEYS[2], 'end', 'ends')
return 1
