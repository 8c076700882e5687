-- A batch is taken apart, since it misses groups or nobody knows of it: what is left of it in this shard waits to be
-- named again.
-- KEYS  void, trainer, applied, ledger, groups
-- fenced by trainer
-- ARGV  epoch, batch id
-- Returns  1, 0 when it was not applied
-- include marks
local members = redis.call('HGET', keys.applied, ARGV[2])
if not members then return 0 end
redis.call('HDEL', keys.applied, ARGV[2])
local count, still = 0, marks_of(keys.applied)
for entry, trajectories in string.gmatch(members, '(%d+%-%d+) (%d+)') do
  local there = #redis.call('XRANGE', keys.groups, entry, entry) > 0
  if there and not is_marked(still, entry) then count = count + tonumber(trajectories) end
end
redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', count))
redis.pcall('HINCRBY', keys.ledger, 'in_flight', string.format('%d', -count))
return 1
