-- The grouper fills in rewards that `producer.score` brought for members it had taken before, and ends their groups if
-- those were the last ones missing.
-- KEYS  void, scored, open, groups, ended, ended_before, ledger, garbage, sizes, group_hashes: group ...
-- ARGV  those of a policy (lib/complete), then items as they stand in the list: '<index> <group id>' ...
-- Returns  {outcome, data source, ...} of the groups that have ended
-- include count
-- include sizes
-- include members
-- include group
-- include ended
-- include complete
local policy = policy_of(ARGV, 1)

-- Discard packets none of whose members counts any more.
local function discard_unscorable(group)
  load_packets(group)
  local others = {}
  for _, packet in ipairs(group.packets) do
    local counts = false
    for _, member in ipairs(packet.members) do
      counts = counts or (member.counts and letter_of(group, member.index) ~= 'x')
    end
    if counts then
      others[#others + 1] = packet
    else
      redis.call('HDEL', group.hash, packet.key)
      discard(packet)
    end
  end
  group.packets, group.has_fields = others, false
end

-- Give the member its reward, or end its slot as unscorable.
local function fill_in(group, index)
  local value = redis.call('HGET', group.hash, 'score_value:' .. index)
  if letter_of(group, index) ~= 's' or not value then return end
  local letter = value == 'x' and 'x' or 'u'
  group.slots = with_letters(group.slots, 1, {{index = index}}, letter)
  redis.call('HSET', group.hash, 'slots', group.slots)
  if letter == 'x' then
    count('open', -1)
    count('dropped:unscorable', 1)
  end
  return letter
end

local ended = {}
for i = POLICY_ARGS + 1, #ARGV do
  if redis.call('LREM', keys.scored, 1, ARGV[i]) == 1 then
    local index, id = string.match(ARGV[i], '^(%d+) (.+)$')
    local group = load_group(id, keys.group_hashes[i - POLICY_ARGS])
    local letter = group.state == 'open' and fill_in(group, tonumber(index))
    if letter then
      count_slots(group)
      if letter == 'x' then discard_unscorable(group) end
      if is_complete(group) then
        local outcome, data_source = complete(group, policy)
        ended[#ended + 1] = outcome
        ended[#ended + 1] = data_source
      end
    end
  end
end
write_counts()
write_sizes()
return ended
