-- The grouper fills in rewards that `producer.score` brought for members it had taken before, and ends their groups if
-- those were the last ones missing. Once the groups of a call have APPLY_SLOTS slots it leaves scores of others in the list.
-- KEYS  void, scored, open, groups, ended, ended_before, ledger, garbage, sizes, evals, kept, trainer,
--       prompt_ends, group_hashes: group ...
-- ARGV  those of a policy (lib/close), then items as they stand in the list: '<index> <group id>' ...
-- Returns  {group id, outcome, data source, rewards, ...} of the groups that have ended
-- include close
-- include complete
local APPLY_SLOTS = 1024
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
  if is_full(group) or letter_of(group, index) ~= 's' then return end
  local value = redis.call('HGET', group.hash, 'score_value:' .. index)
  if not value then return end
  local letter = value == 'x' and 'x' or 'u'
  group.slots = with_letters(group.slots, 1, {{index = index}}, letter)
  if letter == 'u' then
    group.usable = group.usable + 1
    return
  end
  group.unusable, group.has_unscorable = group.unusable + 1, true
  count('open', -1)
  count('dropped:unscorable', 1)
end

local groups, group_of, slots = {}, {}, 0  -- each group is loaded once: many scores may be of one large group
for i = POLICY_ARGS + 1, #ARGV do
  local index, id = string.match(ARGV[i], '^(%d+) (.+)$')
  local group = group_of[id]
  if (group or slots < APPLY_SLOTS) and redis.call('LREM', keys.scored, 1, ARGV[i]) == 1 then
    if not group then
      group = load_group(id, keys.group_hashes[i - POLICY_ARGS])
      group.before, group_of[id], groups[#groups + 1] = group.slots, group, group
      slots = slots + #(group.slots or '')
      if group.state == 'open' then count_slots(group) end
    end
    if group.state == 'open' then fill_in(group, tonumber(index)) end
  end
end

local ended = {}
for _, group in ipairs(groups) do
  if group.has_unscorable then discard_unscorable(group) end
  if group.slots == group.before then
    -- Nothing waited for these scores, or somebody has overwritten the group.
  elseif is_complete(group) then
    ended[#ended + 1] = group.id
    ended[#ended + 1], ended[#ended + 2], ended[#ended + 3] = complete(group, policy)
  else
    change(group, 'slots', group.slots)
    save_group(group)
  end
end
write_figures()
return ended
