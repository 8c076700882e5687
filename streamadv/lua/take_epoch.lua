-- A training job takes over the run: whatever an older one still sends is refused from now on.
-- KEYS  void, lineage
-- ARGV  version to go on from ('' = the one after the last commit), epoch known to the job (its own, or of its
--       checkpoint: a server that lost its last moments may have gone back behind it), the job, '1' when it only goes
--       on after such a loss: then it must not take the run from a newer one
-- Returns  {epoch, version, committed}, or -1 when fenced
redis.call('DEL', KEYS[1])
local current = tonumber(redis.call('HGET', KEYS[2], 'epoch') or '') or 0
local known = tonumber(ARGV[2])
if ARGV[4] == '1' and current > known and redis.call('HGET', KEYS[2], 'job') ~= ARGV[3] then return -1 end
local epoch = math.max(current, known) + 1
local committed = redis.call('HGET', KEYS[2], 'committed') or '0'
local version = ARGV[1] ~= '' and ARGV[1] or committed
redis.call('HSET', KEYS[2], 'epoch', string.format('%d', epoch), 'job', ARGV[3], 'version', version)
redis.call('HDEL', KEYS[2], 'end')
return {epoch, tonumber(version), tonumber(committed)}
