-- Put a dead group back into the groups log, whole.
-- KEYS  void, groups, ledger, dead, dead_group, prompt_ends
-- ARGV  group id
-- Returns  trajectories requeued, 0 when it is not dead (any more), -1 when its payloads were deleted, or it is no dead letter of a group
-- include prompt_end
local flat = redis.call('HGETALL', keys.dead_group)
if #flat == 0 then return 0 end
local group, entry = {}, {}
for i = 1, #flat, 2 do
  group[flat[i]] = flat[i + 1]
  local name = string.match(flat[i], '^log:(.*)$')
  if name then
    entry[#entry + 1] = name
    entry[#entry + 1] = flat[i + 1]
  end
end
if group.emptied or not (string.match(group.count or '', '^%d+$') and string.match(group.bytes or '', '^%d+$')) then
  return -1
end
if #entry == 0 or #entry > 100 then return -1 end  -- no script has written it, and `unpack` has a limit
redis.call('XADD', keys.groups, '*', unpack(entry))
redis.call('DEL', keys.dead_group)
note_prompt_end(ARGV[1], 'requeued')
redis.call('ZREM', keys.dead, ARGV[1])
redis.pcall('HINCRBY', keys.ledger, 'grouped', group.count)
redis.pcall('HINCRBY', keys.ledger, 'groups_logged', 1)
redis.pcall('HINCRBY', keys.ledger, 'dead:' .. group.reason, string.format('%d', -tonumber(group.count)))
redis.pcall('HINCRBY', keys.ledger, 'live_bytes', group.bytes)
redis.pcall('HINCRBY', keys.ledger, 'dead_bytes', string.format('%d', -tonumber(group.bytes)))
return tonumber(group.count)
