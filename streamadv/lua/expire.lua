-- End a group whose deadline has passed, unless records pushed before the deadline still wait in the rollouts
-- stream: the grouper's own downtime must not lose anything.
-- KEYS  void, open, rollouts, group, groups, ended, ended_before, ledger, garbage, malformed, sizes
-- ARGV  group id, partial_min_usable, zero_variance, difficulty_low, difficulty_high, dedupe_groups
-- Returns  {outcome, data source}, or {} when the group is not (or no longer) due
-- include clock
-- include ended
-- include malformed
-- include sizes
-- include complete
-- include broken
redis.call('DEL', KEYS[1])
local keys = {open = KEYS[2], group = KEYS[4], groups = KEYS[5], ended = KEYS[6], ended_before = KEYS[7],
  ledger = KEYS[8], garbage = KEYS[9], malformed = KEYS[10], sizes = KEYS[11]}
local policy = {partial_min_usable = ARGV[2], zero_variance = ARGV[3], difficulty_low = ARGV[4],
  difficulty_high = ARGV[5], dedupe_groups = tonumber(ARGV[6])}
local id = ARGV[1]
local deadline = tonumber(redis.call('ZSCORE', keys.open, id) or '')
if not deadline then return {} end
local state = group_state(keys)
if state == 'none' then  -- a group is opened and ended in one step each
  redis.call('ZREM', keys.open, id)
  redis.call('DEL', keys.group)  -- foreign fields, if anything
  if (tonumber(redis.call('HGET', keys.ledger, 'groups_open') or '') or 0) > redis.call('ZCARD', keys.open) then
    redis.call('HINCRBY', keys.ledger, 'groups_open', -1)
  end
  note_malformed(keys, 'open', id, 0, 'there is no such group', '')
  return {}
end
if state == 'broken' then return {end_broken(keys, id, policy)} end
if deadline > now_ms() then return {} end
local oldest = redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', 1)
if oldest[1] and tonumber(string.match(oldest[1][1], '^(%d+)')) <= deadline then return {} end
local usable = tonumber(redis.call('HGET', keys.group, 'usable') or '') or 0
return {end_group(keys, id, short_outcome(usable, policy, 'expired'), 'e', policy)}
