-- Register packets: the only place of dedupe. Runs in one MULTI after the HSET and PEXPIRE of the payloads; a payload
-- that is not registered is unlinked here, and one that this script never sees ends by its time to live.
-- KEYS  open, groups, ended, ended_before, ledger, trainer, sizes, rollouts, scorer: scoring | void,
--       group_hashes: group ..., (payloads: payload ...)
-- ARGV  producer, limits (see lib/admit), '1' if the run has scorers, number of groups, then for each group: the group (see
--       lib/enter), fencing epoch of its ticket, number of packets, for each packet: number of members, the index of the
--       first if they follow one another without a gap, else '', payload key or '', bytes of the payload, members (see
--       lib/members), member table
-- Returns  for each group one of
--   {'ok'}                           all are pushed
--   {'ok', code of each member of all its packets ...}
--       'pushed', 'duplicate', 'surplus' or 'late' (the group had ended), 'range' (no such slot),
--       'again' (its packet is refused whole because another member is a duplicate or out of range, or to be sent again;
--       this one is new, or follows a new one of its slot),
--       'lost' (the payload had outlived its time: the packet is refused whole)
--   a refusal (lib/enter)
--          or the error STREAMEND: a stream takes no more entries; packets before are registered
-- include enter
-- include append
local PACKET_ARGS = 6
-- include turns
local producer, limits, has_scorers = ARGV[1], ARGV[2], ARGV[3] == '1'
local ended  -- the error of a stream that takes no more entries

-- Unlink a packet's payload. code: the reply for each of its members, if they have the same.
local function refuse(packet, code, codes)
  if packet.key ~= '' then redis.call('UNLINK', packet.key) end
  for i = 1, code and packet.count or 0 do codes[#codes + 1] = code end
end

-- Refuse a packet of which some members are duplicates or out of range: it stays whole, or a part of its payload would
-- belong to nobody.
local function refuse_in_part(group, packet, codes)
-- include members
  refuse(packet)
  for _, member in ipairs(members_of(packet.text)) do
    local at, code = member.index + 1, 'again'
    local letter = string.sub(group.slots, at, at)
    if letter == '' then
      code = 'range'
    elseif letter == '.' then  -- no later packet of this call may take its slot
      group.slots = string.sub(group.slots, 1, at - 1) .. '?' .. string.sub(group.slots, at + 1)
    elseif letter ~= '?' then
      code = 'duplicate'
      count('duplicates', 1)
    end
    codes[#codes + 1] = code
  end
end
-- The slot map with a 'p' for each member of a packet; nil unless all their slots are free.
local function fill(slots, packet)
  local first, filled, at = packet.first, {}, 1
  if first then
    if string.sub(slots, first + 1, first + packet.count) ~= string.rep('.', packet.count) then return nil end
    return string.sub(slots, 1, first) .. string.rep('p', packet.count) .. string.sub(slots, first + packet.count + 1)
  end
  for index in string.gmatch(packet.text, '(%d+) %S+ %S+ %S+\n') do
    local position = index + 1
    if position < at or string.byte(slots, position) ~= 46 then return nil end
    filled[#filled + 1] = string.sub(slots, at, position - 1) .. 'p'
    at = position + 1
  end
  return #filled == packet.count and table.concat(filled) .. string.sub(slots, at) or nil
end

-- Register a packet of an open group. Returns whether it was.
local function register(group, packet, codes)
  local slots = fill(group.slots, packet)
  if not slots then
    refuse_in_part(group, packet, codes)
  elseif packet.key ~= '' and redis.call('PERSIST', packet.key) == 0 then
    refuse(packet, 'lost', codes)
  else
    -- To the first scorer, if it waits for rewards and the run has scorers.
    local is_unscored = has_scorers and string.find(packet.text, '^%d+ usable %- ')
    local stream, name = keys.rollouts, 'rollouts'
    if is_unscored then stream, name = keys.scorer, 'scoring' end
    ended = ended or append(group.id, packet, stream, name)
    if not ended then
      group.slots = slots
      reserve(group.slot_bytes, -packet.count)
      for slot in string.gmatch(group.turned and packet.text or '', '(%d+) %S+ %S+ %S+\n') do drop_turns(group, slot) end
      for i = 1, packet.count do codes[#codes + 1] = 'pushed' end
      return true
    end
    refuse(packet)
  end
  return false
end

-- Register packets of an open group. Returns the group's reply.
local function push_open(group, packets)
  local codes, has_pushed, all_pushed = {'ok'}, false, true
  for _, packet in ipairs(packets) do
    local is_registered = register(group, packet, codes)
    has_pushed, all_pushed = has_pushed or is_registered, all_pushed and is_registered
  end
  if has_pushed then
    play(group, producer)
    change(group, 'slots', all_pushed and group.slots or (string.gsub(group.slots, '%?', '.')))
  end
  save_group(group)
  return all_pushed and {'ok'} or codes
end

-- Packets of a group that has ended: every new member is dropped.
local function push_late(id, packets, tombstone, tombstones)
-- include slots
-- include members
  local codes, late = {'ok'}, after_end(tombstone)
  for _, packet in ipairs(packets) do
    refuse(packet)
    for _, member in ipairs(members_of(packet.text)) do
      local digit, code = string.sub(tombstone, member.index + 2, member.index + 2), 'duplicate'
      if digit == '' then
        code = 'range'
      elseif digit == '0' then
        code, tombstone = late, with_letters(tombstone, 2, {member}, '1')
        count('pushed', 1)
        count('dropped:' .. (member.kind == 'usable' and late or member.kind), 1)
      else
        count('duplicates', 1)
      end
      codes[#codes + 1] = code
    end
  end
  redis.call('HSET', tombstones, id, tombstone)
  return codes
end

local function push(spec, hash, packets)
  local group = load_group(spec.id, hash)
  local tombstone, tombstones
  if group.state == 'none' then tombstone, tombstones = find_ended(spec.id) end
  if tombstone then return push_late(spec.id, packets, tombstone, tombstones) end
  local entered, _, refused = enter(group, spec, producer, limits, '-')
  if entered then return push_open(entered, packets) end
  for _, packet in ipairs(packets) do refuse(packet) end
  return refused
end

local replies, at = {}, 5
for i = 1, tonumber(ARGV[4]) do
  local spec, epoch, packets = spec_of(ARGV, at), ARGV[at + SPEC_ARGS], {}
  local first = at + SPEC_ARGS + 2
  at = first + tonumber(ARGV[first - 1]) * PACKET_ARGS
  for j = first, at - 1, PACKET_ARGS do
    packets[#packets + 1] = {count = tonumber(ARGV[j]), first = tonumber(ARGV[j + 1]), key = ARGV[j + 2],
      bytes = ARGV[j + 3], epoch = epoch, text = ARGV[j + 4], table = ARGV[j + 5]}
  end
  replies[i] = push(spec, keys.group_hashes[i], packets)
end
write_figures()
return ended or replies
