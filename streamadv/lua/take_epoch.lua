-- A training job takes over the run: whatever an older one still sends is refused from now on.
-- KEYS  void, lineage
-- ARGV  version to go on from ('' = the one after the last commit)
-- Returns  {epoch, version, committed}
redis.call('DEL', KEYS[1])
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
local committed = redis.call('HGET', KEYS[2], 'committed') or '0'
local version = ARGV[1] ~= '' and ARGV[1] or committed
redis.call('HSET', KEYS[2], 'version', version)
redis.call('HDEL', KEYS[2], 'end')
return {epoch, tonumber(version), tonumber(committed)}
