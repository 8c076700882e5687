-- The grouper's hand-off: move packets from the rollouts stream into their groups, and end the groups that then have
-- all they need.
-- KEYS  void, rollouts, open, groups, ended, ended_before, ledger, garbage, malformed, sizes, evals,
--       group_hashes: group ..., (payloads: payload ...)
-- ARGV  consumer group, those of a policy (lib/complete), then for each entry: entry id, position of its group's hash in
--       the list, group id, payload key or '', bytes, fencing epoch, members, member table
-- Returns  {entries taken, position in the list, outcome, data source and rewards of each group that has ended ...}
-- An entry that somebody else has finished (XACK 0) is skipped. A member that no slot waits for is malformed and does not
-- count; so is every member of a packet with usable ones whose payload does not exist.
-- include count
-- include sizes
-- include members
-- include group
-- include ended
-- include malformed
-- include evaluation
-- include complete
-- include broken
local PACKET_ARGS = 8
local policy = policy_of(ARGV, 2)
local has_refused = false

local function packet_at(at)
  local position = tonumber(ARGV[at + 1])
  return {entry = ARGV[at], position = position, group_hash = keys.group_hashes[position], group_id = ARGV[at + 2],
    key = ARGV[at + 3], bytes = ARGV[at + 4], epoch = ARGV[at + 5], text = ARGV[at + 6], table = ARGV[at + 7]}
end

local function refuse(packet, problem)
  has_refused = true
  note_malformed('rollouts', packet.entry, 'group ' .. packet.group_id .. ': ' .. problem, packet.text)
end

-- The members that slots wait for, those that the push script has counted: `letters` is a slot map or a tombstone in
-- which `letter` at `offset` + index says so.
local function waiting_members(packet, letters, offset, letter)
  local members, others = {}, {}
  packet.members = members_of(packet.text)
  for _, member in ipairs(packet.members) do
    local position = offset + member.index
    local list = string.sub(letters, position, position) == letter and members or others
    list[#list + 1] = list == members and member or member.index
  end
  if #others > 0 then refuse(packet, 'no packet is waited for by slot ' .. table.concat(others, ', ')) end
  count('rollouts', -#members)
  return members
end

-- A packet whose group is not open.
local function take_late(packet)
  local tombstone, tombstones = find_ended(packet.group_id)
  local members, late
  if tombstone then
    members, late = waiting_members(packet, tombstone, 2, '2'), after_end(tombstone)
    redis.call('HSET', tombstones, packet.group_id, with_letters(tombstone, 2, members, '1'))
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
  if is_complete(group) then return 'x', 'surplus' end  -- an earlier member of this call was the last one needed
  if member.reward ~= '-' then return 'u' end
  local reward = redis.call('HGET', group.hash, 'score_value:' .. member.index)
  if not reward then return 's' end
  group.has_fields = true
  if reward == 'x' then return 'x', 'unscorable' end
  return 'u'
end

-- Put a packet into an open group.
local function take_packet(group, packet)
  local members, counted = waiting_members(packet, group.slots, 1, 'p'), 0
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

-- Whether a packet brings a group whole: each slot waits for it, each member is usable and has its reward.
local function is_whole(group, packet)
  local slots = #group.slots
  if slots ~= group.size or string.find(group.slots, '[^p]') then return false end
  local _, lines = string.gsub(packet.text, '\n', '')
  local _, rewarded = string.gsub(packet.text, ' usable %-?%d', '')
  return lines == slots and rewarded == slots and string.find(packet.text, ' train\n', 1, true)
    and group.role == 'train' and not string.find(packet.text, ' eval\n', 1, true)
    and tonumber(string.match(packet.text, '(%d+) [^\n]*\n$')) == slots - 1
end

-- The rewards in the text of a packet that has all of them, separated by blanks, without those of baselines.
local function rewards_in(text)
  if string.find(text, ' baseline\n', 1, true) then text = string.gsub(text, '[^\n]* baseline\n', '') end
  return (string.gsub(text, '%d+ %S+ (%S+) %S+\n', '%1 '))
end

-- End a group that has come whole: what take_packet and end_group do, without a look at each member. Returns what end_group
-- returns.
local function take_whole(group, packet)
  local size = group.size
  packet.scored, packet.mask = size, string.rep('1', size)
  group.slots, group.packets = string.rep('u', size), {packet}
  count('rollouts', -size)
  log_group(group, 'complete', size)
  return close_group(group, 'complete', 'c', policy, rewards_in(packet.text))
end

-- Put packets into an open group, in order of arrival. Returns what end_group returns if the group has ended.
local function take_open(group, packets)
  if #packets == 1 and not has_filter(policy) and is_whole(group, packets[1]) then return take_whole(group, packets[1]) end
  local before = group.slots
  count_slots(group)
  for _, packet in ipairs(packets) do take_packet(group, packet) end
  if group.slots == before then return nil end
  if is_complete(group) then return complete(group, policy) end
  change(group, 'slots', group.slots)
  for _, packet in ipairs(group.packets) do change(group, packet.key, packet_field(packet)) end
  save_group(group)
end

local acked, packets, payloads = {}, {}, {}
for at = POLICY_ARGS + 2, #ARGV, PACKET_ARGS do
  if redis.call('XACK', keys.rollouts, ARGV[1], ARGV[at]) == 1 then
    local packet = packet_at(at)
    acked[#acked + 1], packets[#packets + 1] = packet.entry, packet
    if packet.key ~= '' then payloads[#payloads + 1] = packet.key end
  end
end
if #acked == 0 then return {0} end
count('rollouts_packets', -redis.call('XDEL', keys.rollouts, unpack(acked)))

-- A packet of which a scorer could not read the payload is needed by nobody: it ends as its scorer says.
local function has_payload(packet)
  return packet.key == '' or not string.find(packet.text, ' usable ', 1, true) or redis.call('EXISTS', packet.key) == 1
end

local hashes, packets_of = {}, {}  -- in order of arrival
local all_exist = #payloads == 0 or redis.call('EXISTS', unpack(payloads)) == #payloads
for _, packet in ipairs(packets) do
  if not all_exist and not has_payload(packet) then
    refuse(packet, 'the payload does not exist')
  else
    if not packets_of[packet.group_hash] then
      packets_of[packet.group_hash] = {}
      hashes[#hashes + 1] = packet.group_hash
    end
    table.insert(packets_of[packet.group_hash], packet)
  end
end

local reply = {#acked}
for _, hash in ipairs(hashes) do
  local group = load_group(packets_of[hash][1].group_id, hash)
  local outcome, data_source, rewards
  if group.state == 'open' then
    outcome, data_source, rewards = take_open(group, packets_of[hash])
  else
    if group.state == 'broken' then outcome, data_source, rewards = end_broken(group, policy) end
    for _, packet in ipairs(packets_of[hash]) do take_late(packet) end
  end
  if outcome then
    reply[#reply + 1] = packets_of[hash][1].position
    reply[#reply + 1] = outcome
    reply[#reply + 1] = data_source
    reply[#reply + 1] = rewards
  end
end
write_counts()
write_sizes()
-- An entry that no push has counted was taken for one that it has: from here on its counter is right again.
if has_refused then redis.call('HSET', keys.ledger, 'rollouts_packets', redis.call('XLEN', keys.rollouts)) end
return reply
