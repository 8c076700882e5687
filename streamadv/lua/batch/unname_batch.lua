-- Undo the naming of batch k: its record goes, and the running moments are again those before it.
-- KEYS  void, lineage, batches
-- ARGV  epoch, k, record JSON, running moments JSON before the batch ('' = none)
-- Returns  1, 0 when the record was gone or another one stands there, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HGET', KEYS[3], ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
if ARGV[4] == '' then redis.call('HDEL', KEYS[2], 'running') else redis.call('HSET', KEYS[2], 'running', ARGV[4]) end
return 1
