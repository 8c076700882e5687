-- Taking a group out of the open ones: into the groups log, if it is to be trained on, and among the tombstones.
-- KEYS  open, groups, ended, ended_before, ledger, garbage, sizes, prompt_ends
--   policy  partial_min_usable ('' = drop), zero_variance ('1' = filter), difficulty_low, difficulty_high
--           ('' = off), dedupe_groups
-- include sizes
-- include group
-- include slots
-- include ended
local POLICY_ARGS = 5
local TOMBSTONE = {['.'] = '0', p = '2', u = '1', s = '1', x = '1'}

-- The policy, from the argument `first` on: `policy_args` of run/manifest.py has the same order.
local function policy_of(args, first)
  return {partial_min_usable = args[first], zero_variance = args[first + 1], difficulty_low = args[first + 2],
    difficulty_high = args[first + 3], dedupe_groups = tonumber(args[first + 4])}
end

local function has_filter(policy)
  return policy.zero_variance == '1' or policy.difficulty_low ~= '' or policy.difficulty_high ~= ''
end

local function mask_of(packet)
  if packet.mask then return packet.mask end
  local mask = {}
  for i, member in ipairs(packet.members) do mask[i] = member.counts and '1' or '0' end
  return table.concat(mask)
end

local function discard(packet)
  if packet.bytes ~= '0' then redis.call('RPUSH', keys.garbage, packet.key .. ' ' .. packet.bytes) end
end

-- The fields of a group in a log: '<size> <members that count> <opened at, ms> <fencing epoch> <version> <outcome>
-- <data source>', a line for each packet, the member tables, and the scores that `producer.score` brought if there are any.
-- Columns of the group have a line as packets have, with their names in place of a mask.
local function entry_of(group, packets, outcome, members)
  local payloads, tables = {}, {}
  for i, packet in ipairs(packets) do
    payloads[i] = packet.key .. ' ' .. packet.bytes .. ' ' .. packet.epoch .. ' ' .. mask_of(packet)
    tables[i] = packet.table
  end
  if (group.columns_key or '') ~= '' then
    payloads[#payloads + 1] = group.columns_key .. ' ' .. group.columns_bytes .. ' 0 ' .. group.column_names
  end
  local head = {group.size, members, group.opened_ms, group.epoch, group.version, outcome, group.data_source}
  local entry = {'group_id', group.id, 'head', table.concat(head, ' '), 'payloads', table.concat(payloads, '\n'),
    'tables', table.concat(tables)}
  if #group.scores > 0 then entry[9], entry[10] = 'scores', '{' .. table.concat(group.scores, ',') .. '}' end
  return entry
end

-- Append the group to the groups log with its scored members.
local function log_group(group, outcome, scored)
  local packets = {}
  for _, packet in ipairs(group.packets) do
    if packet.scored == 0 then discard(packet) else packets[#packets + 1] = packet end
  end
  redis.call('XADD', keys.groups, '*', unpack(entry_of(group, packets, outcome, scored)))
  if group.columns_key ~= '' then group.columns_key = nil end
  count('grouped', scored)
  count('groups_logged', 1)
end

-- The digits of the group's tombstone. Of a slot map that somebody has overwritten only the members tell something: any
-- other slot may be on its way.
local function tombstone_of(group)
  if group.slots and not string.find(group.slots, '[.p]') then return string.rep('1', #group.slots) end
  if group.slots then return (string.gsub(group.slots, '.', TOMBSTONE)) end
  local ended, slots = {}, group.size or 0
  for _, packet in ipairs(group.packets) do
    for _, member in ipairs(packet.members) do
      ended[member.index] = true
      slots = math.max(slots, member.index + 1)
    end
  end
  local digits = {}
  for slot = 0, math.min(slots, MAX_SLOTS) - 1 do digits[slot + 1] = ended[slot] and '1' or '2' end
  return table.concat(digits)
end

-- Take the group out of the open ones and give back what it holds beside its members.
local function remove_group(group)
  redis.call('ZREM', keys.open, group.id)
  redis.call('DEL', group.hash)
  count('groups_open', -1)
  if group.slots and group.slot_bytes then reserve(group.slot_bytes, -slots_with(group, '.')) end
  if group.columns_key == '' then
    reserve(group.columns_bytes, -1)
  elseif group.columns_key then
    discard({key = group.columns_key, bytes = group.columns_bytes})
  end
  if group.producer == '' then count('groups_abandoned', -1) end
  if group.role == 'eval' then count('groups_eval', -1) end
  group.state = 'none'
end

local remembered  -- how many tombstones the young generation has

-- Put a tombstone in the place of the group. Returns the outcome, the group's data source and `rewards`, separated by blanks.
local function close_group(group, outcome, letter, policy, rewards)
  remove_group(group)
  remembered = remembered or redis.call('HLEN', keys.ended)
  if remembered >= policy.dedupe_groups then
    redis.call('UNLINK', keys.ended_before)  -- RENAME would free a million fields before it returns
    redis.call('RENAME', keys.ended, keys.ended_before)
    remembered = 0
  end
  remembered = remembered + redis.call('HSET', keys.ended, group.id, letter .. tombstone_of(group))
  if string.sub(group.id, 1, 7) == 'prompt:' and outcome ~= 'complete' and outcome ~= 'partial' then
-- include prompt_end
    note_prompt_end(group.id, outcome, figures_of(rewards or ''))
  end
  count('outcome:' .. outcome, 1)
  return outcome, group.data_source or '', rewards
end
