-- Open groups of an instance of a producer that is lost stop counting in pacing (evaluation never counts), until a process pushes to them or touches them.
-- KEYS  void, ledger, open, group_hashes: group ...
-- ARGV  the producer as their hashes have it, id of each group ...
-- Returns  number of groups that stop counting: those that this producer was the last to open, push to or touch
local abandoned = 0
for i, group_hash in ipairs(keys.group_hashes) do
  local group = redis.pcall('HMGET', group_hash, 'producer', 'head')
  local is_played = not group.err and group[1] == ARGV[1] and not string.find(group[2] or '', '^eval ')
  if is_played and redis.call('ZSCORE', keys.open, ARGV[i + 1]) then
    redis.call('HSET', group_hash, 'producer', '')
    abandoned = abandoned + 1
  end
end
if abandoned > 0 then redis.pcall('HINCRBY', keys.ledger, 'groups_abandoned', abandoned) end
return abandoned
