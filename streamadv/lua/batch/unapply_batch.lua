-- A batch is taken apart, since it misses groups or nobody knows of it: what is left of it in this shard waits to be
-- named again.
-- KEYS  void, trainer, applied, ledger, groups
-- ARGV  epoch, batch id
-- Returns  1, 0 when it was not applied, -1 when fenced
-- include fence
-- include marks
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local members = redis.call('HGET', KEYS[3], ARGV[2])
if not members then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
local count, still = 0, marks_of(KEYS[3])
for entry, trajectories in string.gmatch(members, '(%d+%-%d+) (%d+)') do
  local there = #redis.call('XRANGE', KEYS[5], entry, entry) > 0
  if there and not is_marked(still, entry) then count = count + tonumber(trajectories) end
end
redis.pcall('HINCRBY', KEYS[4], 'grouped', string.format('%d', count))
redis.pcall('HINCRBY', KEYS[4], 'in_flight', string.format('%d', -count))
return 1
