-- A dead group goes back into the groups log, whole.
-- KEYS  void, groups, ledger, dead, hash of the dead group
-- ARGV  group id
-- Returns  trajectories requeued, 0 when it is not dead (any more), -1 when its payloads were deleted
redis.call('DEL', KEYS[1])
local flat = redis.call('HGETALL', KEYS[5])
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
if #entry == 0 then return -1 end
redis.call('XADD', KEYS[2], '*', unpack(entry))
redis.call('DEL', KEYS[5])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.pcall('HINCRBY', KEYS[3], 'grouped', group.count)
redis.pcall('HINCRBY', KEYS[3], 'groups_logged', 1)
redis.pcall('HINCRBY', KEYS[3], 'outcome:dead', -1)
redis.pcall('HINCRBY', KEYS[3], 'dead:' .. group.reason, string.format('%d', -tonumber(group.count)))
redis.pcall('HINCRBY', KEYS[3], 'live_bytes', group.bytes)
redis.pcall('HINCRBY', KEYS[3], 'dead_bytes', string.format('%d', -tonumber(group.bytes)))
return tonumber(group.count)
