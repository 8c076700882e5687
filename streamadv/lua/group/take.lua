-- The grouper's hand-off: move packets from the rollouts stream into their groups, and end the groups that then have
-- all they need.
-- KEYS  void, rollouts, open, groups, ended, ended_before, ledger, garbage, malformed, sizes, evals, kept, trainer,
--       prompt_ends, group_hashes: group ..., (payloads: payload ...)
-- ARGV  consumer group, those of a policy (lib/close), then for each group: its id; if its members here may be all of it,
--       each usable and with its reward, its size, else 0; number of packets, and for each packet: entry id, number of
--       members, payload key or '', bytes, fencing epoch, members, member table
-- Returns  {entries taken, position in the list, outcome, data source and rewards of each group that has ended ...}
--          rewards: nil of a group that has come whole
-- An entry that somebody else has finished (XACK 0) is skipped, and so is one whose id another packet has: a server whose
-- clock was set back, and that has lost writes, gives ids a second time. A member that no slot waits for is malformed and
-- does not count; so is every member of a packet with usable ones whose payload does not exist.
-- include close
local GROUP_ARGS, PACKET_ARGS = 3, 7
local policy = policy_of(ARGV, 2)

local acked, payloads, groups, at = {}, {}, {}, POLICY_ARGS + 2
while ARGV[at] do
  local packets, number = {}, tonumber(ARGV[at + 2])
  groups[#groups + 1] = {id = ARGV[at], position = #groups + 1, size = tonumber(ARGV[at + 1]), packets = packets}
  at = at + GROUP_ARGS
  for i = at, at + (number - 1) * PACKET_ARGS, PACKET_ARGS do
    packets[#packets + 1] = {entry = ARGV[i], count = tonumber(ARGV[i + 1]), key = ARGV[i + 2], bytes = ARGV[i + 3],
      epoch = ARGV[i + 4], text = ARGV[i + 5], table = ARGV[i + 6]}
    if ARGV[i + 2] ~= '' then payloads[#payloads + 1] = ARGV[i + 2] end
  end
  at = at + number * PACKET_ARGS
end
local all_exist = #payloads == 0 or redis.call('EXISTS', unpack(payloads)) == #payloads

-- Whether another packet has the id of this one. A payload that exists was not lost, and with it its entry.
local function is_other(group_id, packet)
  if all_exist and packet.key ~= '' then return false end
  local entry = redis.call('XRANGE', keys.rollouts, packet.entry, packet.entry)[1]
  local own = {group_id = group_id, payload = packet.key, members = packet.text}
  for i = 1, entry and #entry[2] or 0, 2 do
    if (own[entry[2][i]] or entry[2][i + 1]) ~= entry[2][i + 1] then return true end
  end
  return false
end

for _, arrived in ipairs(groups) do
  local sent = arrived.packets
  arrived.packets = {}
  for _, packet in ipairs(sent) do
    if not is_other(arrived.id, packet) and redis.call('XACK', keys.rollouts, ARGV[1], packet.entry) == 1 then
      acked[#acked + 1] = packet.entry
      table.insert(arrived.packets, packet)
    end
  end
  if #arrived.packets < #sent then arrived.size = 0 end
end
if #acked == 0 then return {0} end
count('rollouts_packets', -redis.call('XDEL', keys.rollouts, unpack(acked)))
local reply = {#acked}
local function note_ended(arrived, outcome, data_source, rewards)
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = arrived.position, outcome, data_source, rewards
end

-- Groups that have come whole end without a look at each member.
local others = {}
for _, arrived in ipairs(groups) do
  local group, size = load_group(arrived.id, keys.group_hashes[arrived.position]), arrived.size
  arrived.group = group
  if group.state == 'open' and size == group.size and group.slots == string.rep('p', size) and group.role == 'train'
    and all_exist and not has_filter(policy) and not lacks_columns(group) then
    for _, packet in ipairs(arrived.packets) do packet.scored, packet.mask = packet.count, string.rep('1', packet.count) end
    group.slots, group.packets = string.rep('u', size), arrived.packets
    count('rollouts', -size)
    log_group(group, 'complete', size)
    note_ended(arrived, close_group(group, 'complete', 'c', policy, false))
  else
    others[#others + 1] = arrived
  end
end
if #others == 0 then
  write_figures()
  return reply
end

-- include complete
-- include broken
local has_refused = false

local function refuse(group, packet, problem)
  has_refused = true
  note_malformed('rollouts', packet.entry, 'group ' .. group.id .. ': ' .. problem, packet.text)
end

-- The members that slots wait for, those that the push script has counted: `letters` is a slot map or a tombstone in
-- which `letter` at `offset` + index says so.
local function waiting_members(group, packet, letters, offset, letter)
  local members, others = {}, {}
  packet.members = members_of(packet.text)
  for _, member in ipairs(packet.members) do
    local position = offset + member.index
    local list = string.sub(letters, position, position) == letter and members or others
    list[#list + 1] = list == members and member or member.index
  end
  if #others > 0 then refuse(group, packet, 'no packet is waited for by slot ' .. table.concat(others, ', ')) end
  count('rollouts', -#members)
  return members
end

-- A packet whose group is not open.
local function take_late(group, packet)
  local tombstone, tombstones = find_ended(group.id)
  local members, late
  if tombstone then
    members, late = waiting_members(group, packet, tombstone, 2, '2'), after_end(tombstone)
    redis.call('HSET', tombstones, group.id, with_letters(tombstone, 2, members, '1'))
  else  -- forgotten: more groups have ended since than are remembered
    members, late = members_of(packet.text), 'late'
    count('rollouts', -#members)
  end
  for _, member in ipairs(members) do count('dropped:' .. (member.kind == 'usable' and late or member.kind), 1) end
  if #members > 0 then discard(packet) end
end

-- How the slot of a member ends: its letter in the slot map, and why it is dropped if it is.
local function judge(group, member)
  if (member.role == 'eval') ~= (group.role == 'eval') then return 'x', 'wrong_role' end  -- no producer sends that
  if member.kind ~= 'usable' then return 'x', member.kind end
  if is_full(group) then return 'x', 'surplus' end  -- an earlier member of this call was the last one needed
  if member.reward ~= '-' then return 'u' end
  local reward = redis.call('HGET', group.hash, 'score_value:' .. member.index)
  if not reward then return 's' end
  group.has_fields = true
  if reward == 'x' then return 'x', 'unscorable' end
  return 'u'
end

-- Put a packet into an open group.
local function take_packet(group, packet)
  local members, counted = waiting_members(group, packet, group.slots, 1, 'p'), 0
  for _, member in ipairs(members) do
    local letter, reason = judge(group, member)
    member.letter, member.counts = letter, letter ~= 'x'
    if letter == 'u' then group.usable = group.usable + 1 end
    if letter == 'x' then
      group.unusable = group.unusable + 1
      count('dropped:' .. reason, 1)
    else
      counted = counted + 1
    end
  end
  if #members == 0 then return end
  group.slots = with_letters(group.slots, 1, members)
  count('open', counted)
  if counted > 0 then table.insert(group.packets, packet) else discard(packet) end
end

-- Put packets into an open group, in order of arrival. Returns what end_group returns if the group has ended.
local function take_open(group, packets)
  local before = group.slots
  count_slots(group)
  for _, packet in ipairs(packets) do take_packet(group, packet) end
  if group.slots == before then return nil end
  if is_complete(group) then return complete(group, policy) end
  change(group, 'slots', group.slots)
  for _, packet in ipairs(group.packets) do change(group, packet.key, packet_field(packet)) end
  save_group(group)
end

-- The packets whose payload exists. One of which a scorer could not read it is needed by nobody: it ends as its scorer says.
local function with_payload(group, packets)
  local found = {}
  for _, packet in ipairs(packets) do
    if all_exist or packet.key == '' or not string.find(packet.text, ' usable ', 1, true)
      or redis.call('EXISTS', packet.key) == 1 then
      found[#found + 1] = packet
    else
      refuse(group, packet, 'the payload does not exist')
    end
  end
  return found
end

for _, arrived in ipairs(others) do
  local group, packets = arrived.group, with_payload(arrived.group, arrived.packets)
  local outcome, data_source, rewards
  if group.state == 'open' then
    outcome, data_source, rewards = take_open(group, packets)
  elseif #packets > 0 then
    if group.state == 'broken' then outcome, data_source, rewards = end_broken(group, policy) end
    for _, packet in ipairs(packets) do take_late(group, packet) end
  end
  if outcome then note_ended(arrived, outcome, data_source, rewards) end
end
write_figures()
-- An entry that no push has counted was taken for one that it has: from here on its counter is right again.
if has_refused then redis.call('HSET', keys.ledger, 'rollouts_packets', redis.call('XLEN', keys.rollouts)) end
return reply
