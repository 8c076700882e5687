-- A batch has been trained on: the version moves on. The same script serves the run's session hash and each shard's
-- copy; only the first call for a version counts.
-- KEYS  void, version: session | trainer, trainer, admission
-- fenced by version
-- ARGV  epoch, new version, groups of the batch in this shard, KL coefficients JSON ('' = as they are), '1' for a shard's
--       copy, newest version that has weights and their URI ('<version> <URI>', '' = as they are)
-- Returns  1, 0 when the version was there already
-- include announce
local version = tonumber(redis.call('HGET', keys.version, 'version') or '') or 0
if ARGV[6] ~= '' and tonumber(ARGV[2]) >= version then redis.call('HSET', keys.version, 'weights', ARGV[6]) end
if tonumber(ARGV[2]) <= version then return 0 end
redis.call('HSET', keys.version, 'version', ARGV[2])
redis.pcall('HINCRBY', keys.version, 'held', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', keys.version, 'kl', ARGV[4]) end
if ARGV[5] == '1' then announce() end
return 1
