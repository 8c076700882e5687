-- Undo a batch in a shard: the groups it still owns are grouped again and may be named again.
-- KEYS  void, trainer, applied, owners, ledger
-- fenced by trainer
-- ARGV  epoch, batch id
-- Returns  1, 0 when the shard did not know it
local known, count, flat = redis.call('HDEL', keys.applied, ARGV[2]), 0, redis.call('HGETALL', keys.owners)
for i = 1, #flat, 2 do
  local owner, trajectories = string.match(flat[i + 1], '^(%S+) (%d+)$')
  if owner == ARGV[2] then
    known = 1
    redis.call('HDEL', keys.owners, flat[i])
    count = count + tonumber(trajectories)
  end
end
redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', count))
redis.pcall('HINCRBY', keys.ledger, 'in_flight', string.format('%d', -count))
return known
