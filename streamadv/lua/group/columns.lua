-- Register the columns of a group, which it has once for all of its members. Runs in one MULTI after the HSET and PEXPIRE of
-- their payload, which is unlinked here if it is not registered.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, columns: payload
-- ARGV  the group (see lib/enter); producer; limits (see lib/admit); bytes of the payload, names of the columns ('a,b')
-- Returns  {'ok', 'brought'}, {'ok', 'duplicate'} if it has them, {'ok', 'lost'} if the payload had outlived its time, or
--          {'ended'}: it has ended, or nobody plays it; else a refusal (lib/enter)
-- include slots
-- include enter
local spec, producer, limits, bytes, names = spec_of(ARGV, 1), unpack(ARGV, SPEC_ARGS + 1)

local function refuse(reply)
  redis.call('UNLINK', keys.columns)
  return reply
end

local group = load_group(spec.id, keys.group)
local is_over = group.state == 'none' and find_ended(spec.id) or group.state == 'open' and is_withdrawn(group)
if is_over then return refuse({'ended'}) end
local group, _, refused = enter(group, spec, producer, limits, '-')
if refused then return refuse(refused) end
local code = 'brought'
if group.columns_key and group.columns_key ~= '' then
  code = refuse('duplicate')
elseif redis.call('PERSIST', keys.columns) == 0 then
  code = refuse('lost')
else
  if group.columns_key then reserve(group.columns_bytes, -1) end
  count('live_bytes', tonumber(bytes))
  change(group, 'columns', bytes .. ' ' .. keys.columns .. ' ' .. names)
  -- A group that has waited for them alone ends at its deadline: now.
  if slots_with(group, 'u') >= group.size or not string.find(group.slots, '[.ps]') then
    redis.call('ZADD', keys.open, 0, spec.id)
  end
end
save_group(group)
write_figures()
return {'ok', code}
