-- A batch has been trained on: the version moves on. The same script serves the run's lineage and each shard's
-- copy; only the first call for a version counts.
-- KEYS  void, lineage or trainer
-- ARGV  epoch, new version, groups of the batch in this shard, KL coefficients JSON ('' = as they are)
-- Returns  1, 0 when the version was there already, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local version = tonumber(redis.call('HGET', KEYS[2], 'version') or '') or 0
if tonumber(ARGV[2]) <= version then return 0 end
redis.call('HSET', KEYS[2], 'version', ARGV[2])
redis.pcall('HINCRBY', KEYS[2], 'held', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], 'kl', ARGV[4]) end
return 1
