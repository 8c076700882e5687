-- A batch has been trained on: the version moves on, in the home shard in the run's session first, then in the shard's
-- copy; only the first call for a version counts. Without a higher version only the weights are told.
-- KEYS  void, version: session | trainer, trainer, session, admission
-- fenced by version
-- ARGV  fence, new version, groups of the batch in this shard, KL coefficients JSON ('' = as they are), newest version that
--       has weights and their URI ('<version> <URI>', '' = as they are), version that is committed with it ('' = none)
-- Returns  1, 0 when the version was there already
-- include announce
local function version_of(key) return tonumber(redis.call('HGET', key, 'version') or '') or 0 end
local version = tonumber(ARGV[2])
if keys.version == keys.session then
  if version > version_of(keys.session) then
    redis.call('HSET', keys.session, 'version', ARGV[2])
    if ARGV[4] ~= '' then redis.call('HSET', keys.session, 'kl', ARGV[4]) end
  end
  if ARGV[6] ~= '' then redis.call('HSET', keys.session, 'committed', ARGV[6], 'committed_in', session) end
end
local before = version_of(keys.trainer)
if ARGV[5] ~= '' and version >= before then redis.call('HSET', keys.trainer, 'weights', ARGV[5]) end
if version <= before then return 0 end
redis.call('HSET', keys.trainer, 'version', ARGV[2])
redis.pcall('HINCRBY', keys.trainer, 'held', ARGV[3])
announce()
return 1
