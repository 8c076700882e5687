-- Register packets: the only place of dedupe. Runs in one MULTI after the HSET and PEXPIRE of the payloads; a payload
-- that is not registered is unlinked here, and one that this script never sees ends by its time to live.
-- KEYS  open, groups, ended, ended_before, ledger, trainer, sizes, rollouts, scorer: scoring | void,
--       group_hashes: group ..., (payloads: payload ...)
-- ARGV  limits (see lib/admit), '1' if the run has scorers, number of groups, then for each group: the group (see
--       lib/admit), fencing epoch of its ticket, number of packets, for each packet: number of members, the index of the
--       first if they follow one another without a gap, else '', payload key or '', bytes of the payload, members (see
--       lib/members), member table
-- Returns  for each group one of
--   {'ok'}                           all are pushed
--   {'ok', code of each member of all its packets ...}
--       'pushed', 'duplicate', 'surplus' or 'late' (the group had ended), 'range' (no such slot),
--       'again' (its packet is refused whole because another member is a duplicate or out of range; this one is new),
--       'lost' (the payload had outlived its time: the packet is refused whole)
--   {'busy', reason, used, limit ...}   the group was unknown and is not admitted now
--   {'over'}                         the group was unknown and the trainer has ended the run
--   {'mismatch', size, role}               open with another size or role
--   {'layout'}                       the run may have another number of shards: read the manifest again
--   {'broken'}                       its hash is not what the scripts wrote
--          or the error STREAMEND: a stream takes no more entries; packets before are registered
-- include clock
-- include count
-- include sizes
-- include slot_bytes
-- include pacing
-- include members
-- include group
-- include admit
-- include ended
-- include enter
-- include append
local has_ended = false  -- whether a stream takes no more entries
local limits, has_scorers, groups = limits_of(ARGV, 1), ARGV[LIMITS_ARGS + 1] == '1', tonumber(ARGV[LIMITS_ARGS + 2])

local function unlink(packet)
  if packet.key ~= '' then redis.call('UNLINK', packet.key) end
end

local function refuse(packet, code, codes)
  unlink(packet)
  for i = 1, packet.count do codes[#codes + 1] = code end
end

-- Refuse a packet of which some members are duplicates or out of range: it stays whole, or a part of its payload would
-- belong to nobody.
local function refuse_in_part(packet, slots, codes)
  unlink(packet)
  for _, member in ipairs(members_of(packet.text)) do
    local code = 'again'
    if member.index >= #slots then
      code = 'range'
    elseif string.sub(slots, member.index + 1, member.index + 1) ~= '.' then
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

-- Append a packet to the first scorer's stream if it waits for rewards and the run has scorers.
local function append_packet(group, packet)
  if has_scorers and string.find(packet.text, '^%d+ usable %- ') then
    return append(group.id, packet, keys.scorer, 'scoring')
  end
  return append(group.id, packet, keys.rollouts, 'rollouts')
end

-- Register a packet of an open group. Returns whether it was.
local function register(group, packet, codes)
  local slots = fill(group.slots, packet)
  if not slots then
    refuse_in_part(packet, group.slots, codes)
  elseif packet.key ~= '' and redis.call('PERSIST', packet.key) == 0 then
    refuse(packet, 'lost', codes)
  elseif has_ended or not append_packet(group, packet) then
    has_ended = true
    unlink(packet)
  else
    group.slots = slots
    reserve(group.slot_bytes, -packet.count)
    for i = 1, packet.count do codes[#codes + 1] = 'pushed' end
    return true
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
    play(group, limits.producer)
    change(group, 'slots', group.slots)
  end
  save_group(group)
  return all_pushed and {'ok'} or codes
end

-- Packets of a group that has ended: every new member is dropped.
local function push_late(id, packets, tombstone, tombstones)
  local codes, late = {'ok'}, after_end(tombstone)
  for _, packet in ipairs(packets) do
    unlink(packet)
    for _, member in ipairs(members_of(packet.text)) do
      local digit, code = slot_digit(tombstone, member.index), 'duplicate'
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
  local _, refused = enter(group, spec, limits, '-')
  if not refused then return push_open(group, packets) end
  for _, packet in ipairs(packets) do unlink(packet) end
  return refused
end

local replies, at = {}, LIMITS_ARGS + 3
for i = 1, groups do
  local spec, epoch, count_packets, packets = spec_of(ARGV, at), ARGV[at + SPEC_ARGS], tonumber(ARGV[at + SPEC_ARGS + 1]), {}
  at = at + SPEC_ARGS + 2
  for j = 1, count_packets do
    packets[j] = {count = tonumber(ARGV[at]), first = tonumber(ARGV[at + 1]), key = ARGV[at + 2], bytes = ARGV[at + 3],
      epoch = epoch, text = ARGV[at + 4], table = ARGV[at + 5]}
    at = at + 6
  end
  replies[i] = push(spec, keys.group_hashes[i], packets)
end
write_counts()
write_sizes()
if has_ended then return redis.error_reply('STREAMEND no more entries fit into its stream') end
return replies
