-- Undo a batch in a shard: the groups it still owns are grouped again and may be named again, its results are removed.
-- KEYS  void, trainer, applied, owners, ledger, results, unlinked: output | void ...
-- fenced by trainer
-- ARGV  fence, batch id, then of each result: entry id, bytes of its output columns
-- Returns  1, 0 when the shard did not know it
-- include close_batch
local known, count, flat = close_batch(ARGV[2], 3, #keys.unlinked), 0, redis.call('HGETALL', keys.owners)
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
