-- Cancel slots of an open group: the highest of those allowed that nobody has ended. The same call sent again, under its
-- nonce, cancels no more.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, rollouts
-- ARGV  the group (see lib/enter); producer; limits (see lib/admit); nonce of this call, how many slots, for each slot from 0 on '1' if it may be
--       cancelled, else '0'
-- Returns  {'ok', index of each slot cancelled ...}   fewer than wanted: no more of those allowed are free
--          {'ended', 'surplus' | 'late'}   the group had ended: nothing changes
--          or a refusal (lib/enter)
-- include slots
-- include enter
-- include append
-- include turns
local PACKET_MEMBERS = 64
local spec, producer, limits, nonce, wanted, allowed = spec_of(ARGV, 1), unpack(ARGV, SPEC_ARGS + 1)
local field = 'cancel:' .. nonce
wanted = tonumber(wanted)

local group = load_group(spec.id, keys.group)
local tombstone = group.state == 'none' and find_ended(spec.id)
if tombstone then return {'ended', after_end(tombstone)} end
local group, _, refused = enter(group, spec, producer, limits, '-')
if refused then return refused end

-- Append a packet of cancelled slots. Returns what append does.
local function cancel(members)
  local lines = {}
  for i, member in ipairs(members) do lines[i] = member.index .. ' cancelled - ' .. group.role .. '\n' end
  local packet = {key = '', bytes = '0', epoch = '0', text = table.concat(lines), table = '', count = #members}
  local ended = append(group.id, packet, keys.rollouts, 'rollouts')
  if ended then return ended end
  group.slots = with_letters(group.slots, 1, members, 'p')
  reserve(group.slot_bytes, -#members)
  for _, member in ipairs(group.turned and members or {}) do drop_turns(group, string.format('%d', member.index)) end
end

local cancelled, members = {}, {}
for index in string.gmatch(redis.call('HGET', keys.group, field) or '', '%d+') do
  cancelled[#cancelled + 1] = index
end
local before, index, ended = #cancelled, math.min(#allowed, #group.slots), nil
while before + #members < wanted and index > 0 do
  index = index - 1
  if string.sub(allowed, index + 1, index + 1) == '1' and string.sub(group.slots, index + 1, index + 1) == '.' then
    members[#members + 1] = {index = index}
  end
end
for first = 1, #members, PACKET_MEMBERS do
  local packet = {}
  for i = math.min(#members, first + PACKET_MEMBERS - 1), first, -1 do packet[#packet + 1] = members[i] end
  ended = ended or cancel(packet)
  if not ended then
    for i = #packet, 1, -1 do cancelled[#cancelled + 1] = string.format('%d', packet[i].index) end
  end
end
if #cancelled > before then
  play(group, producer)
  change(group, 'slots', group.slots)
  change(group, field, table.concat(cancelled, ' '))
end
save_group(group)
write_figures()
table.insert(cancelled, 1, 'ok')  -- `unpack` has a limit
return ended or cancelled
