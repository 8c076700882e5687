-- Withdraw a group that a call of `begin` may have opened, after its caller stopped waiting. A group whose tickets nobody
-- else has, and of which no slot is filled, counts no more in pacing; the grouper removes it as if it had never been
-- opened, unless somebody begins it before.
-- KEYS  void, group, open, ledger
-- ARGV  group id, nonce of the call
-- Returns  1 if the group was withdrawn, 0 if not
-- include count
-- include group
local group = load_group(ARGV[1], keys.group)
if group.state ~= 'open' or not group.holders or group.holders == '' or #group.holders >= MAX_HOLDERS then return 0 end
local others = {}
for nonce in string.gmatch(group.holders, '%S+') do
  if nonce ~= ARGV[2] then others[#others + 1] = nonce end
end
if #others == 0 and string.find(group.slots, '[^.]') then return 0 end
redis.call('HSET', keys.group, 'holders', table.concat(others, ' '))
if #others > 0 then return 0 end
redis.call('ZADD', keys.open, 0, ARGV[1])
if group.producer ~= '' and group.role ~= 'eval' then
  redis.call('HSET', keys.group, 'producer', '')
  redis.call('HINCRBY', keys.ledger, 'groups_abandoned', 1)
end
return 1
