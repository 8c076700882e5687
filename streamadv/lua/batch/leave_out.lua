-- A rank cannot read a trajectory of its part of a named batch and leaves it out: commit counts it as dead instead of
-- trained. The dead letter of its group says why at once; it has no payloads, since the other members are trained on.
-- KEYS  void, trainer, groups, ledger, dead, dead_group, garbage, applied
-- fenced by trainer
-- ARGV  fence, entry id, group id, rollout index, batch id, reason, detail
-- Returns  1, also when it is left out already; 0 when the shard has no such batch or entry (any more)
-- include dead_letter
local entry, rollout_index, batch = ARGV[2], tonumber(ARGV[4]), ARGV[5]
local logged, exclusions = redis.call('XRANGE', keys.groups, entry, entry), redis.call('HGET', keys.applied, batch)
if #logged == 0 or not exclusions then return 0 end
exclusions = cjson.decode(exclusions)
local left_out = exclusions[entry] or {}
for _, index in ipairs(left_out) do
  if index == rollout_index then return 1 end
end
left_out[#left_out + 1] = rollout_index
exclusions[entry] = left_out
redis.call('HSET', keys.applied, batch, cjson.encode(exclusions))
if #left_out > 1 and redis.call('EXISTS', keys.dead_group) == 1 then  -- else somebody has purged it
  redis.call('HINCRBY', keys.dead_group, 'count', 1)
else
  write_dead_letter(ARGV[3], logged[1][2], ARGV[6], ARGV[7], 1, 0)
  empty_letter(ARGV[3])
end
return 1
